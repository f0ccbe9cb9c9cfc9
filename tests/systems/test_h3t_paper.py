"""H3T's variant=paper as it runs: the bits of resident, laws on a run's event log, what the default does, what breaks each.

Ranks are threads. Settings of the switches are given in the solvers' stead where a law is about one of them.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cache
from typing import Any

import pytest

from systems.device.emulated import EmulatedDevice
from systems.device.lanes.lane import Lane
from systems.device.watch.events import LoggedBytes, LoggedOperation
from systems.planning.plan import COPY_LANES, Plan
from systems.planning.step.operations import LaneOperation, Work
from systems.planning.trace import Trace
from systems.strategies.h3t.candidates import Candidate
from systems.strategies.h3t.compiling import Compiler
from systems.strategies.h3t.options import H3TOptions
from systems.strategies.h3t.search import Search
from systems.strategies.h3t.segments import PaperCompiler
from systems.strategies.h3t.switches import ALL_ON, Switches
from tests.planning.races import find_races
from tests.systems.models_plain import CASES
from tests.systems.models_plain import build as build_plain
from tests.systems.models_small import tokens
from tests.systems.running import Run, h3t, managed, one_step, settings, start
from tests.systems.test_ordering import as_issued, assert_sound
from tests.systems.test_ranks import STEPS, assert_is_one_rank, on_one_rank, on_ranks
from tests.systems.test_ranks_matrix import CLIP, assert_alike, half
from tests.systems.test_shards import Last, assert_as_planned, assert_bytes_as_planned, plan_of, schedule_of

MODELS = ("opt-tiny", "gpt-tiny", "bert-tiny", "t5-tiny")
COPIES = {lane.value for lane in COPY_LANES}
AHEAD = replace(ALL_ON, economical_forward=False, economical_backward=False)


# ---- bits, bytes and order, beside resident


@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("solver", ["dp", "on"])
@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.one_in(8)
def test_half_of_resident_s_memory_holds_the_bits_of_one_rank(model: str, solver: str, size: int) -> None:
    last, budget, asked = Last(), half(model), {"variant": "paper", "solver": solver}
    found = on_ranks(h3t(), model, size, 1, asked, before=last.note, clip=CLIP, device_memory=budget, log_events=True)
    assert_is_one_rank(on_one_rank(model, size, CLIP, "fp32"), found)
    for rank, run in enumerate(found):
        log, plan = managed(run.engine).log, plan_of(run)
        issued, in_bytes = log.operations[last.issued[rank] :], log.bytes[last.bytes[rank] - 1 :]
        assert not find_races(as_issued(log.operations))
        assert_sound(managed(run.engine))
        assert_as_planned(run, last.counters[rank], [o.what for o in issued])
        assert_bytes_as_planned(plan, in_bytes)
        assert plan.one_copy_queue and plan.barriers and not plan.ahead
        assert ran_in(issued) == planned_in(run), "one queue of copies, as scheduled"
        assert run.counters["fallbacks"] == 0 and (plan.predicted_device_peak_bytes or 0) <= budget
        peak = max(each.live for each in in_bytes if each.tier == "device")
        assert peak <= (plan.predicted_device_peak_bytes or 0)
        assert solver == "dp" or peak == plan.predicted_device_peak_bytes  # what was never open is bounded, not measured
    if size > 1:
        assert_alike(found)


def ran_in(issued: Sequence[LoggedOperation]) -> list[LaneOperation]:
    """Copies of both ways, in the order of their issue."""
    return [o.what for o in issued if isinstance(o.what, LaneOperation) and o.lane in COPIES]


def planned_in(run: Run) -> list[LaneOperation]:
    on_lanes = (o for o in schedule_of(run).bare if o.lane in COPY_LANES)
    return [LaneOperation(o.kind, o.lane, o.name, o.bundle, o.segment) for o in on_lanes if o.lane is not None]


# ---- one rank's steady step, looked at closely


@dataclass(frozen=True)
class Stepped:
    """The last of some steps. carried_out: copies in the order in which they ended, by which thread."""

    operations: tuple[LoggedOperation, ...]
    bytes: tuple[LoggedBytes, ...]
    carried_out: tuple[tuple[LaneOperation, str], ...]
    plan: Plan
    trace: Trace
    bundle_of: Mapping[int, int]  # of a layer's unit

    @property
    def pool_peak(self) -> int:
        return max(each.pool for each in self.bytes if each.tier == "device")

    @property
    def peak(self) -> int:
        return max(each.live for each in self.bytes if each.tier == "device")


def sleeping() -> None:
    """Copies to the device take a while each, others do not."""
    if threading.current_thread().name == "lane-h2d":
        time.sleep(0.004)


def stepped(s: Switches | None = None, **given: Any) -> Stepped:
    """A model of four large layers and small activations. s: of every layer; None leaves it to the solver."""
    options = H3TOptions(**({"profile_steps": 1} | given | ({} if s is None else {"solver": "drawn"})))
    carried_out: list[tuple[LaneOperation, str]] = []
    with pytest.MonkeyPatch.context() as patch:
        if s is not None:
            patch.setattr(Search, "_assigned", lambda self, name, costs, budget: (s,) * len(costs.layers))
        patch.setattr(Lane, "_carry_out", noting(carried_out))
        engine = managed(
            h3t().initialize(
                build_plain("stack"),
                settings(log_events=True),
                options,
                device=lambda log: EmulatedDevice(1 << 30, log, jitter=sleeping),
            )
        )
        with engine:
            begin = in_bytes = 0
            for batch in tokens(STEPS, 1):
                engine.drain()
                begin, in_bytes = len(engine.log.operations), len(engine.log.bytes)
                carried_out.clear()
                one_step(engine, batch, CASES["stack"].loss)
            engine.drain()
            plan = engine.cursor.plan
            assert plan is not None and not plan.provisional and engine.counters()["fallbacks"] == 0
            trace, _ = engine.planner.plans[plan.signature]
            bundle_of = {unit: engine.layout.bundles_of_unit[unit][0] for unit in engine.strategy._blocks}
            operations, logged = engine.log.operations[begin:], engine.log.bytes[in_bytes - 1 :]
            return Stepped(tuple(operations), tuple(logged), tuple(carried_out), plan, trace, bundle_of)


def noting(carried_out: list[tuple[LaneOperation, str]]) -> Callable[..., None]:
    carry_out = Lane._carry_out

    def noted(lane: Lane, job: Any, **more: Any) -> None:
        operation: LaneOperation = job.operation
        carry_out(lane, job, **more)
        if operation.lane in COPY_LANES:
            carried_out.append((operation, threading.current_thread().name))

    return noted


# ---- laws: each raises AssertionError where it does not hold


def copies_end_in_the_order_of_their_issue(found: Stepped) -> None:
    """3.2.3: one stream, both ways."""
    issued = ran_in(found.operations)
    assert {o.lane for o in issued} == set(COPY_LANES), "void: one direction"
    assert [operation for operation, _ in found.carried_out] == issued
    assert {thread for _, thread in found.carried_out} == {"lane-h2d"}


def no_layer_waits_for_a_fetch_of_its_own_enter(found: Stepped) -> None:
    """A.2: asynchronous in the economical mode too. Some unit is entered in between, but where a step begins with a layer."""
    fetches, entered = 0, False
    for place, fetch in enumerate(found.operations):
        what, entered = fetch.what, entered or fetch.label.startswith("hold for")
        if isinstance(what, LaneOperation) and what.kind is Work.FETCH and what.bundle in found.bundle_of.values():
            (unit,) = (unit for unit, bundle in found.bundle_of.items() if bundle == what.bundle)
            later = [o.label for o in found.operations[place + 1 :] if o.label.startswith("hold for")]
            if later and entered:
                fetches += 1
                assert not later[0].endswith(f", {unit})"), f"{what.label} is issued as {later[0]} begins"
    assert fetches, "void: nothing is fetched"


def updates_are_behind_the_last_gradient(found: Stepped) -> None:
    """3.1: "finally use the parameter optimizer"; figure 3a, the closed loop."""
    kinds = [o.what.kind for o in found.operations if isinstance(o.what, LaneOperation)]
    updates = [place for place, kind in enumerate(kinds) if kind in (Work.UPDATE, Work.UPDATE_AHEAD)]
    assert updates and max(place for place, kind in enumerate(kinds) if kind is Work.OFFLOAD) < min(updates)


def segments_end_in_barriers(found: Stepped) -> None:
    """3.3.2: dynamic programming forces segment synchronisation on: four layers twice, and the ends of short segments."""
    assert len(found.plan.barriers) == sum(o.label.startswith("barrier") for o in found.operations) >= 2 * 4 + 1


def preparation_is_queued_first_unless_economical(found: Stepped) -> None:
    """A.2, in the third layer's backward segment, under AHEAD: the second layer comes before the fourth's gradient goes."""
    _, second, _, fourth = (found.bundle_of[unit] for unit in sorted(found.bundle_of))
    queue = [(o.kind, o.bundle) for o in ran_in(found.operations)]
    comes = [place for place, each in enumerate(queue) if each == (Work.FETCH, second)]
    assert comes[1] < queue.index((Work.OFFLOAD, fourth))


def economical_mode_saves_memory(ahead: Stepped, economical: Stepped) -> None:
    assert economical.pool_peak < ahead.pool_peak and economical.peak < ahead.peak


Law = Callable[[Stepped], None]
PAPER: dict[str, Any] = {"variant": "paper"}
LAWS: Mapping[str, tuple[Law, Switches | None]] = {  # with switches, None for the solver's
    "one queue": (copies_end_in_the_order_of_their_issue, replace(AHEAD, synchronise=False)),
    "asynchronous": (no_layer_waits_for_a_fetch_of_its_own_enter, ALL_ON),
    "order": (preparation_is_queued_first_unless_economical, AHEAD),
    "updates": (updates_are_behind_the_last_gradient, ALL_ON),
    "barriers": (segments_end_in_barriers, None),
}


@cache
def steady(s: Switches | None, variant: str) -> Stepped:
    return stepped(s, variant=variant)


@pytest.mark.parametrize("law", LAWS)
def test_a_run_obeys_the_paper_and_the_default_s_does_not(law: str) -> None:
    holds, s = LAWS[law]
    holds(steady(s, "paper"))
    with pytest.raises(AssertionError, match=r"^(?!void)"):
        holds(steady(s, "global-offload"))


def test_economical_backward_and_forward_each_save_memory() -> None:
    """On a model of large layers: what comes takes the room of what has left, behind it in the one queue."""
    economical_mode_saves_memory(steady(AHEAD, "paper"), steady(ALL_ON, "paper"))
    forward = stepped(replace(ALL_ON, economical_forward=False), **PAPER)
    assert steady(ALL_ON, "paper").pool_peak < forward.pool_peak
    for found in (steady(AHEAD, "paper"), steady(ALL_ON, "paper"), forward):
        assert found.pool_peak == found.plan.predicted_model_peak_bytes


def without_one_queue(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PaperCompiler, "plan", Compiler.plan)


def with_fetches_where_layers_begin(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PaperCompiler, "_trigger", Compiler._trigger)


def with_every_segment_economical(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(PaperCompiler, "_economical", lambda *_: True)


def with_updates_ahead_of_the_norm(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(H3TOptions, "rules", {})


def without_barriers(patch: pytest.MonkeyPatch) -> None:
    unchecked = Search.unchecked

    def as_the_best(*given: Any, **more: Any) -> Candidate:
        found = unchecked(*given, **more)
        return replace(found, plan=replace(found.plan, barriers=frozenset()))

    patch.setattr(Search, "unchecked", as_the_best)


RULES: Mapping[str, Callable[[pytest.MonkeyPatch], None]] = {
    "one queue": without_one_queue,
    "asynchronous": with_fetches_where_layers_begin,
    "order": with_every_segment_economical,
    "updates": with_updates_ahead_of_the_norm,
    "barriers": without_barriers,
}


@pytest.mark.parametrize("law", LAWS)
def test_a_law_without_its_rule_is_broken(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    holds, s = LAWS[law]
    RULES[law](monkeypatch)
    with pytest.raises(AssertionError, match=r"^(?!void)"):
        holds(stepped(s, **PAPER))


def test_without_their_order_neither_mode_saves_memory(monkeypatch: pytest.MonkeyPatch) -> None:
    with_every_segment_economical(monkeypatch)
    with pytest.raises(AssertionError):
        economical_mode_saves_memory(stepped(AHEAD, **PAPER), steady(ALL_ON, "paper"))


def test_a_plan_of_another_kind_has_its_two_queues_back() -> None:
    """The device goes by the plan in force."""
    engine = managed(start(h3t(), build_plain("stack"), settings(), H3TOptions(profile_steps=1, **PAPER)))
    with engine:
        for batch in tokens(2, 1):
            one_step(engine, batch, CASES["stack"].loss)
        assert engine.device.transfers.one_copy_queue
        engine.drain()
        engine.in_force.apply(None)
        assert not engine.device.transfers.one_copy_queue
