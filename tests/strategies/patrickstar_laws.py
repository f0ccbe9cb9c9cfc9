"""The rules of PatrickStar's paper as checks: of a plan with what it was made from, and of what a run's lanes were given.

Each raises AssertionError where its rule is broken. They look at plans and logs alone, not at how the strategy makes them.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from systems.planning.layout import Layout
from systems.planning.plan import OpKind, Plan, Tier
from systems.planning.step.operations import Work
from systems.planning.step.schedule import expand
from systems.planning.step.timeline import timeline
from systems.planning.strategy import PlanningContext
from systems.planning.trace import ENTER, Phase, Trace
from tests.planning.machines import computes_beside_fetches

Step = Sequence[tuple[str, str]]  # (lane, label), as issued
EVICTIONS = (OpKind.WRITE_BACK, OpKind.DROP)


@dataclass(frozen=True)
class Planned:
    layout: Layout
    trace: Trace
    plan: Plan
    context: PlanningContext

    @property
    def whole(self) -> frozenset[int]:
        tiers = self.plan.optimizer_tier
        return frozenset(b.index for b in self.layout.bundles if tiers[b.segments[0]] is Tier.DEVICE)


@dataclass(frozen=True)
class Moved:
    """What moves at one moment. there: resident before it, but for what lives there; held: what may not go there."""

    moment: int
    fetched: tuple[int, ...]
    evicted: tuple[int, ...]
    there: frozenset[int]
    held: frozenset[int]


def moves(planned: Planned) -> Iterator[Moved]:
    """Of a step, by what units hold, when gradients are complete, and whether they stay then."""
    layout, trace, plan = planned.layout, planned.trace, planned.plan
    there = set(plan.resident_at_start - planned.whole)
    holds: dict[int, int] = {}
    carried: set[int] = set()
    for number, moment in enumerate(trace.moments):
        bundles = layout.bundles_of_unit.get(moment.unit, ())
        entering = moment.phase in ENTER
        for bundle in bundles:
            holds[bundle] = holds.get(bundle, 0) + (1 if entering else -1)
        if moment.phase is Phase.BACKWARD_EXIT:
            carried.update(plan.in_place.intersection(bundles))
        carried.difference_update(trace.flushes[number])
        if moment.phase is Phase.STEP_END:
            there -= {b for flushes in trace.flushes for b in flushes}
        else:
            there -= set(trace.flushes[number]) - plan.staying - {b for b, count in holds.items() if count}
        mine = sorted((p for p in plan.operations if p.trigger == number), key=lambda p: p.priority)
        fetched = tuple(p.operation.bundle for p in mine if p.operation.kind is OpKind.FETCH)
        evicted = tuple(p.operation.bundle for p in mine if p.operation.kind in EVICTIONS)
        yield Moved(number, fetched, evicted, frozenset(there), frozenset(carried | {b for b, n in holds.items() if n}))
        there.update(fetched)
        there.difference_update(evicted)


# ---- of plans


def fetched_when_needed(planned: Planned) -> None:
    """No FETCH before the ENTER of a unit that demands it (Algorithm 1, line 24: when a tensor is accessed)."""
    for p in planned.plan.operations:
        if p.operation.kind is OpKind.FETCH:
            entering = planned.trace.moments[p.trigger]
            assert entering.phase in ENTER, f"bundle {p.operation.bundle} is fetched at moment {p.trigger}, ahead of its use"
            assert p.operation.bundle in planned.layout.bundles_of_unit[entering.unit]


def farthest_is_evicted(planned: Planned) -> None:
    """OPT: what goes is used no earlier than what could have gone and stays. A gradient is used at ADAM."""
    last, uses = len(planned.trace) - 1, dict[int, list[int]]()
    for number, moment in enumerate(planned.trace.moments):
        for bundle in planned.layout.bundles_of_unit.get(moment.unit, ()) if moment.phase in ENTER else ():
            uses.setdefault(bundle, []).append(number)

    def next_use(bundle: int, moment: int) -> int:
        mine = [*uses[bundle], *([last] if bundle in planned.plan.staying else [])]
        return min((use for use in mine if use > moment), default=min(mine) + last + 1)

    for moved in moves(planned):
        stays = moved.there - moved.held - set(moved.evicted)
        for gone in moved.evicted:
            sooner = [b for b in stays if next_use(b, moved.moment) > next_use(gone, moved.moment)]
            assert not sooner, f"moment {moved.moment}: bundle {gone} goes, and {sooner} are used later"


def first_of_the_list_is_evicted(planned: Planned) -> None:
    """As in the warm-up step (7.3): in the order of the chunk list."""
    for moved in moves(planned):
        stays = moved.there - moved.held - set(moved.evicted)
        for gone in moved.evicted:
            assert all(gone < other for other in stays), f"moment {moved.moment}: bundle {gone} goes before {sorted(stays)}"


def evicted_for_want_of_room(planned: Planned, share: float = 1.0) -> None:
    """With the last that goes the moment would have more than it may. share: of the device, for model data."""
    memory, budget = timeline(planned.layout, planned.trace, planned.plan, planned.context), planned.context.device_budget
    for moved in moves(planned):
        if moved.evicted:
            pool = memory.device_pool_bytes[moved.moment] + planned.layout.bundle_bytes(moved.evicted[-1])
            most = budget - memory.device_non_model_bytes[moved.moment] if share == 1 else int(share * budget)
            assert pool > most, f"moment {moved.moment}: {moved.evicted} go though there is room"


def gradients_stay(planned: Planned) -> None:
    """A gradient that lies in its parameters' chunk moves at the step's end (6.1.2), unless the plan evicts it."""
    last, evicted = len(planned.trace) - 1, {(m.moment, bundle) for m in moves(planned) for bundle in m.evicted}
    mine = planned.plan.in_place - planned.whole
    for o in expand(planned.layout, planned.trace, planned.plan, planned.context).bare:
        if o.kind is Work.OFFLOAD and o.bundle in mine and o.moment != last:
            assert (o.moment, o.bundle) in evicted, f"the gradient of bundle {o.bundle} leaves at moment {o.moment}"


def margin_is_filled(planned: Planned) -> None:
    """OS chunks are placed in list order as long as they fit beside peak non-model data and all parameters (7.2)."""
    layout, each = planned.layout, planned.context.optimizer_itemsize
    left = planned.context.device_budget - max(planned.trace.non_model_bytes) - layout.param_bytes // planned.context.ranks
    fits = set()
    for bundle in layout.bundles:
        if bundle.trainable and layout.shard_numel(bundle.index) * each <= left:
            left -= layout.shard_numel(bundle.index) * each
            fits.add(bundle.index)
    assert planned.whole == fits, f"placed are {sorted(planned.whole)}, and the margin holds {sorted(fits)}"


# ---- of what a run's lanes were given: one step


def labels(operations: Sequence[Any]) -> Step:
    return [(o.lane, o.label) for o in operations]


def run_fetched_when_needed(step: Step, layout: Layout, plan: Plan) -> None:
    """Between a fetch and the next that compute does lies nothing but fetches and evictions, and that is the unit's."""
    for number, (lane, label) in enumerate(step):
        found = re.match(r"fetch bundle (\d+)", label)
        if found is None or lane != "h2d":
            continue
        then = next((text for where, text in step[number:] if where == "compute"), "nothing")
        unit = re.fullmatch(r"hold for \('(?:forward|backward)', (\d+)\)", then)
        assert unit is not None, f"{label}: then compute does {then}"
        assert int(found[1]) in layout.bundles_of_unit[int(unit[1])], f"{label} for {then}"


def run_updates_behind_backward(step: Step, layout: Layout, plan: Plan) -> None:
    begun = [n for n, (lane, label) in enumerate(step) if label.startswith("update") and lane in ("cpu", "compute")]
    ended = [n for n, (_, label) in enumerate(step) if label.startswith("release by ('backward'")]
    assert begun and ended and min(begun) > max(ended), f"{step[min(begun)][1]} comes before {step[max(ended)][1]}"


def run_gradients_stay(step: Step, layout: Layout, plan: Plan) -> None:
    """Of chunks no gradient leaves before the last backward has ended, but where the plan evicts it."""
    ended = max(n for n, (_, label) in enumerate(step) if label.startswith("release by ('backward'"))
    evicted = {p.operation.bundle for p in plan.operations if p.operation.kind is OpKind.WRITE_BACK}
    for lane, label in step[:ended]:
        found = re.match(r"offload bundle (\d+)", label)
        if lane == "d2h" and found is not None and int(found[1]) in layout.in_place - evicted:
            raise AssertionError(f"{label} ahead of {step[ended][1]}")


RUN_LAWS: dict[str, Callable[[Step, Layout, Plan], None]] = {
    "fetched when needed": run_fetched_when_needed,
    "updates behind backward": run_updates_behind_backward,
    "gradients stay": run_gradients_stay,
}


def compute_waits(planned: Planned) -> None:
    """6.1.2: what an operator accesses is moved before it computes, and nothing computes beside that."""
    assert not computes_beside_fetches(planned.layout, planned.trace, planned.plan, planned.context)
