"""From switches to a Plan: when each bundle is fetched and dropped. See the package's docstring for what each switch means."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass

from systems.planning.layout import Layout
from systems.planning.plan import Operation, OpKind, Plan, PlannedOperation, UpdateRule, optimizer_tiers
from systems.planning.step.demand import Demand, Span, demand_of
from systems.planning.strategy import PlanningContext
from systems.planning.trace import ENTER, Phase, Trace
from systems.strategies.h3t.barriers import barriers
from systems.strategies.h3t.layers import layer_of_bundle
from systems.strategies.h3t.switches import Switches

HELD = Switches(partition=True, lazy_prefetch=True, economical_forward=True, economical_backward=True)
EARLY = Switches(partition=True, lazy_prefetch=True)
RESIDENT = Switches()
FIRST, DROPS, FETCHES = -1, 0, 1  # turns at a moment; the first before gradients leave
OTHERS: Mapping[str, Switches] = {"resident": RESIDENT, "early": EARLY, "held": HELD}  # of other modules' bundles


@dataclass(frozen=True)
class Compiler:
    """Plans of one kind of step. blocks: units that are layers."""

    layout: Layout
    trace: Trace
    context: PlanningContext
    rule: UpdateRule
    blocks: frozenset[int]

    def plan(self, switches: Mapping[int, Switches], *, others: str, on_device: frozenset[int] = frozenset()) -> Plan:
        """switches: per layer's unit; one that has none is no layer of this step, and its bundle is there only while held.

        others: a key of OTHERS. on_device: bundles that are updated there, and stay.
        """
        demand = demand_of(self.layout, self.trace, self.context)
        layers = layer_of_bundle(self.layout, self.blocks)
        found: list[tuple[int, int, int, Operation]] = []
        resident, shards = set(on_device), set[int]()
        gone = {b: moment for moment in reversed(range(len(self.trace))) for b in demand.stale[moment]}
        for bundle in (b.index for b in self.layout.bundles if b.index not in on_device):
            mine = switches.get(layers[bundle], HELD) if bundle in layers else OTHERS[others]
            near = switches if layers.get(bundle, -1) in switches else {}
            found += self._operations(demand, bundle, mine, gone.get(bundle), near)
            if not mine.lazy_prefetch and demand.hold_spans.get(bundle):
                (shards if self._rests(mine, gone.get(bundle)) else resident).add(bundle)
        operations = [
            PlannedOperation(trigger, number, operation, first=turn == FIRST)
            for number, (trigger, turn, _, operation) in enumerate(sorted(found, key=lambda each: each[:3]))
        ]
        rematerialise = frozenset(unit for unit, s in switches.items() if s.rematerialise)
        hidden = frozenset(unit for unit, s in switches.items() if s.offload_hidden)
        return Plan(
            signature=self.trace.signature,
            operations=tuple(operations),
            optimizer_tier=optimizer_tiers(self.layout, on_device),
            resident_at_start=frozenset(resident),
            shards_at_start=frozenset(shards),
            update_rule=self.rule,
            rematerialise=rematerialise,
            offload_inputs=hidden & rematerialise,
            barriers=barriers(self.trace, switches),
        )

    def _rests(self, s: Switches, gone: int | None) -> bool:
        """True if, of several ranks, each has its part on the device from one step to the next."""
        return self.context.ranks > 1 and not s.lazy_prefetch and gone is not None

    def _operations(
        self, demand: Demand, bundle: int, s: Switches, gone: int | None, layers: Mapping[int, Switches]
    ) -> Iterator[tuple[int, int, int, Operation]]:
        """(trigger, turn there, next use, operation) of a bundle that the host updates, or that is frozen. gone: the first
        moment at which its device copy is stale. layers: switches of all layers; none of a bundle that is no layer's.
        """
        rests, last = self._rests(s, gone), len(self.trace) - 1
        fetch, drop = Operation(OpKind.FETCH, bundle), Operation(OpKind.SHRINK if rests else OpKind.DROP, bundle)
        spans = demand.hold_spans.get(bundle, ())
        before: Span | None = None
        for span in spans:
            after = -1 if before is None else before.end
            if before is not None and gone is not None and before.end <= gone <= span.begin:
                yield span.begin, FETCHES, span.begin, fetch  # its gradient has left, and it is used once more
            elif before is None:
                if s.lazy_prefetch or rests:
                    yield *self._trigger(span.begin, after, s, layers), span.begin, fetch
            elif self._released(span.begin, s) and span.begin > before.end + 1:
                yield before.end, DROPS, 0, drop
                yield *self._trigger(span.begin, after, s, layers), span.begin, fetch
            before = span
        if before is None:
            return
        stale = gone is not None and gone >= before.end
        if s.lazy_prefetch and not (stale and gone == before.end):
            if before.end < last and not (stale and gone is not None and gone < last):
                yield before.end, DROPS, 0, drop
        elif not s.lazy_prefetch and gone is not None:
            yield last, FETCHES, spans[0].begin, Operation(OpKind.MOVE, bundle) if rests else fetch

    def _released(self, begin: int, s: Switches) -> bool:
        """True if the bundle goes between a use and the next one, which begins there."""
        return s.partition if self.trace.moments[begin].phase is Phase.BACKWARD_ENTER else s.lazy_prefetch

    def _trigger(self, begin: int, after: int, s: Switches, layers: Mapping[int, Switches]) -> tuple[int, int]:
        """Where a fetch for the use at `begin` is issued: there if economical, else where the layer before it begins; and its
        turn there.

        after: the moment since which the bundle is gone.
        """
        backward = self.trace.moments[begin].phase is Phase.BACKWARD_ENTER
        if s.economical_backward if backward else s.economical_forward:
            return begin, FETCHES
        entering = [m for m in range(after + 1, begin) if self.trace.moments[m].phase in ENTER]
        phase = self.trace.moments[begin].phase
        near = [m for m in entering if self.trace.moments[m].phase is phase and self.trace.moments[m].unit in self.blocks]
        if near:
            return near[-1], FETCHES
        return entering[-1] if entering else min(after + 1, begin), FETCHES
