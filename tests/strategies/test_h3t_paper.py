"""H3T's variant=paper, on plans: laws of the paper's workflow, that the default's plans break them, and what breaks each."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import replace
from functools import cached_property
from itertools import pairwise, product
from typing import Any, get_args

import pytest

from systems.planning import hardware
from systems.planning.clock.simulator import Simulation
from systems.planning.layout import Layout
from systems.planning.plan import COPY_LANES, LaneKind, OpKind, Plan, UpdateRule
from systems.planning.step.demand import demand_of
from systems.planning.step.operations import Work
from systems.planning.step.schedule import Schedule, expand
from systems.planning.step.validator import validate
from systems.planning.strategy import PlanningContext
from systems.planning.trace import ENTER, Moment, Phase, Trace
from systems.strategies.h3t.compiling import Compiler
from systems.strategies.h3t.costs import PAPER, PAPER_WITHOUT_LINK, SUBSTRATE, SUBSTRATE_OF_RANKS, LayerCosts, ModelCosts, Rules
from systems.strategies.h3t.evaluation import runtime_of
from systems.strategies.h3t.modelling import Modeller
from systems.strategies.h3t.options import H3TOptions, Solver
from systems.strategies.h3t.segments import PaperCompiler
from systems.strategies.h3t.switches import ALL_ON, Switches, array_of
from tests.planning.machines import machine, simulate
from tests.planning.synthetic import context, layout_of, trace_of

EMBEDDING, FIRST, SECOND, THIRD, HEAD = range(5)
LAYERS = frozenset({FIRST, SECOND, THIRD})
BOTH = (False, True)


class Compiled:
    """All layers alike, compiled; the schedule of that."""

    def __init__(self, compiles: type[Compiler], s: Switches, *, ranks: int = 1, accumulate: int = 1) -> None:
        sizes = [2 * ranks] * HEAD + [20 * ranks]  # beside the layers there is room
        self.layout: Layout = layout_of([(size, [unit]) for unit, size in enumerate(sizes)], ranks=ranks)
        self.trace: Trace = trace_of(self.layout, accumulate=accumulate, seconds=0.1)
        self.context: PlanningContext = context(ranks=ranks, accumulate=accumulate)
        self.switches = s
        compiler = compiles(self.layout, self.trace, self.context, UpdateRule.AFTER_NORM, LAYERS)
        self.plan: Plan = compiler.plan(dict.fromkeys(LAYERS, s), others="resident")
        validate(self.layout, self.trace, self.plan, self.context)

    @cached_property
    def schedule(self) -> Schedule:
        return expand(self.layout, self.trace, self.plan, self.context)

    def at(self, phase: Phase, unit: int) -> int:
        return self.trace.moments.index(Moment(phase, unit))

    def fetches(self) -> Iterator[tuple[int, int]]:
        """(trigger, moment of the use that it is for) of layers' bundles, without those for the next step."""
        demand = demand_of(self.layout, self.trace, self.context)
        for planned in self.plan.operations:
            bundle, trigger = planned.operation.bundle, planned.trigger
            if bundle in LAYERS and planned.operation.kind is OpKind.FETCH and trigger < len(self.trace) - 1:
                yield trigger, next(span.begin for span in demand.hold_spans[bundle] if span.begin >= trigger)


# ---- laws: each raises AssertionError where it does not hold


def no_layer_waits_for_a_fetch_of_its_own_enter(found: Compiled) -> None:
    """A.2: "there are still asynchronous operations in the economical mode". The layer before computes in between."""
    fetches = list(found.fetches())
    assert fetches, "void: nothing is fetched"
    for trigger, use in fetches:
        between = [m for m in found.trace.moments[trigger:use] if m.phase in ENTER and m.unit != found.trace.moments[use].unit]
        assert between, found.trace.moments[use]


def copies_are_one_at_a_time(found: Compiled) -> None:
    """3.2.3: one PCI-E stream for both directions, in the order of issue."""
    seen = simulated(found)
    copies = sorted((e.start_s, e.start_s + e.duration_s, e.label) for e in seen.events if e.lane in ("h2d", "d2h"))
    assert {e.lane for e in seen.events} >= {"h2d", "d2h"}, "void: one direction"
    assert all(a[1] <= b[0] + 1e-9 for a, b in pairwise(copies))
    issued = [o.label for o in found.schedule.bare if o.lane in COPY_LANES]
    assert [label for _, _, label in copies] == issued


def simulated(found: Compiled) -> Simulation:
    nbytes = found.layout.shard_bytes(SECOND)
    slow = machine(devices=found.context.ranks, h2d_bytes_per_s=nbytes / 0.15, d2h_bytes_per_s=nbytes / 0.25)
    return simulate(found.layout, found.trace, found.plan, found.context, slow)


def post_process_is_queued_by_the_economical_switch(found: Compiled) -> None:
    """Backward segment of SECOND: the gradient of THIRD leaves before FIRST is fetched, or after. Forward: FIRST goes."""
    operations = found.schedule.bare
    begin, turn = found.at(Phase.BACKWARD_EXIT, THIRD), found.at(Phase.FORWARD_EXIT, FIRST)
    leaves = next(o.ticket for o in operations if o.kind is Work.OFFLOAD and o.bundle == THIRD)
    comes = [o.ticket for o in operations if o.kind in (Work.FETCH, Work.GATHER) and o.bundle == FIRST and o.moment == begin]
    assert comes and (leaves < comes[0]) == found.switches.economical_backward
    goes = next(o.ticket for o in operations if o.kind is Work.DROP and o.bundle == FIRST and o.moment == turn)
    comes = [o.ticket for o in operations if o.kind in (Work.FETCH, Work.GATHER) and o.bundle == THIRD and o.moment == turn]
    assert comes and (goes < comes[0]) == found.switches.economical_forward


def what_rests_moves_behind_the_update_alone(found: Compiled) -> None:
    """3.2.2: partition releases what was gathered; without lazy prefetching the shard stays, which of one rank is all."""
    assert found.switches.partition and not found.switches.lazy_prefetch
    copies = [o for o in found.schedule.bare if o.lane is LaneKind.H2D and o.bundle in LAYERS]
    assert len(copies) == len(LAYERS) and {o.moment for o in copies} == {len(found.trace) - 1}


Law = Callable[[Compiled], None]
AHEAD = replace(ALL_ON, economical_forward=False, economical_backward=False)
RESTS = Switches(partition=True, economical_forward=True, economical_backward=True)
LAWS: Mapping[str, tuple[Law, Switches, tuple[int, ...]]] = {  # with switches under which the default breaks it; ranks
    "asynchronous": (no_layer_waits_for_a_fetch_of_its_own_enter, ALL_ON, (1, 2)),
    "one queue": (copies_are_one_at_a_time, replace(ALL_ON, synchronise=False), (1, 2)),
    "order": (post_process_is_queued_by_the_economical_switch, AHEAD, (1, 2)),
    "rest": (what_rests_moves_behind_the_update_alone, RESTS, (1,)),
}
CASES = [(law, ranks) for law, (_, _, sizes) in LAWS.items() for ranks in sizes]


@pytest.mark.parametrize(("law", "ranks"), CASES)
def test_the_paper_s_plans_obey_and_the_default_s_do_not(law: str, ranks: int) -> None:
    holds, s, _ = LAWS[law]
    holds(Compiled(PaperCompiler, s, ranks=ranks))
    with pytest.raises(AssertionError, match=r"^(?!void)"):
        holds(Compiled(Compiler, s, ranks=ranks))
    assert Compiled(PaperCompiler, s, ranks=ranks).plan != Compiled(Compiler, s, ranks=ranks).plan


RULES: Mapping[str, tuple[str, Any]] = {  # what is put in the place of a rule's method
    "asynchronous": ("_trigger", Compiler._trigger),
    "one queue": ("plan", Compiler.plan),
    "order": ("_economical", lambda *_: True),
    "rest": ("_released", Compiler._released),
}


@pytest.mark.parametrize(("law", "ranks"), CASES)
def test_a_law_without_its_rule_is_broken(law: str, ranks: int, monkeypatch: pytest.MonkeyPatch) -> None:
    holds, s, _ = LAWS[law]
    monkeypatch.setattr(PaperCompiler, *RULES[law])
    with pytest.raises(AssertionError, match=r"^(?!void)"):
        holds(Compiled(PaperCompiler, s, ranks=ranks))


@pytest.mark.parametrize(("forward", "backward", "ranks"), list(product(BOTH, BOTH, (1, 2))))
def test_each_economical_switch_orders_its_own_pass(forward: bool, backward: bool, ranks: int) -> None:
    s = replace(ALL_ON, economical_forward=forward, economical_backward=backward)
    for law in ("asynchronous", "order", "one queue"):
        LAWS[law][0](Compiled(PaperCompiler, replace(s, synchronise=law != "one queue"), ranks=ranks))


def test_in_a_segment_it_is_the_switch_of_the_layer_that_computes() -> None:
    """As the cost model has it: THIRD's forward is prepared in SECOND's segment, FIRST's backward too."""
    found = Compiled(PaperCompiler, ALL_ON)
    compiler = PaperCompiler(found.layout, found.trace, found.context, UpdateRule.AFTER_NORM, LAYERS)
    plan = compiler.plan({**dict.fromkeys(LAYERS, ALL_ON), SECOND: AHEAD}, others="resident")
    firsts = {(p.trigger, p.operation.bundle) for p in plan.operations if p.first}
    assert firsts == {(found.at(Phase.FORWARD_EXIT, FIRST), THIRD), (found.at(Phase.BACKWARD_EXIT, THIRD), FIRST)}


def test_a_layer_is_prepared_where_the_segment_before_its_own_begins() -> None:
    found = Compiled(PaperCompiler, ALL_ON)
    begins = [
        ((Phase.FORWARD_ENTER, FIRST), (Phase.STEP_BEGIN, -1)),
        ((Phase.FORWARD_ENTER, SECOND), (Phase.FORWARD_ENTER, FIRST)),
        ((Phase.FORWARD_ENTER, THIRD), (Phase.FORWARD_EXIT, FIRST)),
        ((Phase.BACKWARD_ENTER, THIRD), (Phase.FORWARD_EXIT, THIRD)),
        ((Phase.BACKWARD_ENTER, SECOND), (Phase.BACKWARD_ENTER, THIRD)),
        ((Phase.BACKWARD_ENTER, FIRST), (Phase.BACKWARD_EXIT, THIRD)),
    ]
    assert sorted(found.fetches()) == sorted((found.at(*trigger), found.at(*use)) for use, trigger in begins)


def test_micro_steps_are_steps_of_their_own() -> None:
    found = Compiled(PaperCompiler, ALL_ON, accumulate=2)
    no_layer_waits_for_a_fetch_of_its_own_enter(found)
    triggers = [found.trace.moments[trigger] for trigger, use in found.fetches() if found.trace.moments[use].micro_step == 1]
    assert Moment(Phase.BACKWARD_END, micro_step=0) in triggers and len(triggers) == 2 * len(LAYERS)


@pytest.mark.parametrize(("ranks", "link"), [(1, None), (8, None), (8, 2e11)])
def test_the_solvers_reckon_by_the_paper_s_rules(ranks: int, link: float | None) -> None:
    profile = machine(devices=ranks, device_link_bytes_per_s=link)
    found = Compiled(Compiler, ALL_ON)

    def rules(*paper: bool) -> Rules:
        return Modeller(found.layout, context(ranks=ranks), profile, LAYERS, str, *paper).rules

    theirs = PAPER if ranks == 1 or link else PAPER_WITHOUT_LINK
    assert rules(True) == replace(theirs, needs_remat=True, renews=True)
    assert rules() == (SUBSTRATE if ranks == 1 else SUBSTRATE_OF_RANKS)


@pytest.mark.parametrize("s", [ALL_ON, AHEAD, RESTS, Switches(), Switches(partition=True)])
def test_a_shard_that_rests_costs_its_copy_behind_the_update(s: Switches) -> None:
    """Figure 3a. Under other rules it is free, the paper's as figures are drawn by them too."""
    layer = LayerCosts("layer", forward_s=1.0, backward_s=2.0, prefetch_s=0.25)
    rows = array_of([s] * 3)[None]

    def seconds(rules: Rules) -> float:
        return float(runtime_of(ModelCosts((layer,) * 3, rules), rows)[0])

    moved = 0.0 if s.lazy_prefetch else 3 * 0.25
    assert seconds(replace(PAPER, renews=True)) == pytest.approx(seconds(PAPER) + moved)


# ---- options


def test_the_variant_solves_by_algorithm_4_and_updates_behind_the_backward() -> None:
    found = H3TOptions(variant="paper")
    assert (found.solver, found.run_ahead, found.nonfinite, found.profile_steps, found.bins) == ("dp", False, "skip", 10, 128)
    assert (H3TOptions().solver, H3TOptions().run_ahead) == ("best", True)
    for solver in get_args(Solver):
        if solver != "best":
            assert H3TOptions(variant="paper", solver=solver).solver == solver


@pytest.mark.parametrize("given", [{"solver": "best"}, {"run_ahead": True}, {"nonfinite": "stop"}])
def test_what_is_not_the_paper_s_is_refused_in_a_line(given: dict[str, Any]) -> None:
    with pytest.raises(ValueError, match="variant=paper has ") as refused:
        H3TOptions(variant="paper", **given)
    (error,) = refused.value.errors()  # type: ignore[attr-defined]
    assert "\n" not in error["msg"] and str(next(iter(given))) in error["msg"]


def test_the_machines_of_the_paper_have_the_streams_that_it_says() -> None:
    """C.2: no NVLink on the 2080 Ti."""
    names = ("h3t-2080ti-10g-x8", "h3t-a100-40g-x8")
    assert [hardware.load(name).device_link_bytes_per_s is not None for name in names] == [False, True]
