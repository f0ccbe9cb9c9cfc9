"""Plans in which a rank's own part comes and goes apart from the rest: fetches in two, and drops that leave the shard."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from systems.planning.plan import Operation, OpKind, Plan, PlannedOperation
from systems.planning.step.demand import Demand


def in_two(plan: Plan, demand: Demand, *, ranks: int, move: bool) -> Plan:
    """Where the plan lets go of a bundle for a while its shard stays. move: each fetch from the host is a move, and the rest is
    gathered when it is used.
    """
    ordered = sorted(plan.operations, key=lambda p: (p.trigger, p.priority))
    found: list[tuple[int, int, Operation]] = []
    resident, shrunk = set(plan.resident_at_start), set[int]()
    for number, planned in enumerate(ordered):
        trigger, bundle, kind = planned.trigger, planned.operation.bundle, planned.operation.kind
        if bundle in plan.sharded:
            found.append((trigger, number, planned.operation))
        elif kind is not OpKind.FETCH:
            later = [p for p in ordered[number + 1 :] if p.operation.bundle == bundle]
            comes = later[0].trigger if later else 0
            stale = [moment for moment, bundles in enumerate(demand.stale) if bundle in bundles and moment >= trigger]
            goes = len(later) > 1 or bool(stale)
            if kind is OpKind.DROP and later and goes and not any(moment <= comes for moment in stale):
                shrunk.add(bundle)
                kind = OpKind.SHRINK
            found.append((trigger, number, Operation(kind, bundle)))
        elif bundle in shrunk or not move:
            shrunk.discard(bundle)
            found.append((trigger, number, planned.operation))
        else:
            uses = [moment for moment, bundles in enumerate(demand.demanded) if bundle in bundles]
            use = next((moment for moment in uses if moment >= trigger), None)
            if use is None:
                use = uses[0]
                if ranks > 1:
                    resident.discard(bundle)
            found.append((trigger, number, Operation(OpKind.MOVE, bundle)))
            found.append((use, len(ordered) + number, planned.operation))
    found.sort(key=lambda each: each[:2])
    operations = tuple(PlannedOperation(trigger, number, operation) for number, (trigger, _, operation) in enumerate(found))
    shards = shards_at_end(operations, demand) - plan.sharded if ranks > 1 else frozenset[int]()
    return replace(plan, operations=operations, resident_at_start=frozenset(resident), shards_at_start=shards)


def shards_at_end(operations: Sequence[PlannedOperation], demand: Demand) -> frozenset[int]:
    """Bundles of which a step leaves this rank's part on the device."""
    shards = set[int]()
    for moment, stale in enumerate(demand.stale):
        shards.difference_update(stale)
        for planned in operations:
            if planned.trigger == moment and planned.operation.kind is not OpKind.FETCH:
                leaves = planned.operation.kind in (OpKind.MOVE, OpKind.SHRINK)
                (shards.add if leaves else shards.discard)(planned.operation.bundle)
    return frozenset(shards)
