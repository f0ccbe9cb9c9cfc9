"""Updates that run ahead of the norm: bits of waiting whatever they assumed, in the host's budget (invariants 1, 5, 11)."""

from __future__ import annotations

import time
from collections.abc import Callable
from contextlib import suppress
from functools import cache
from itertools import cycle
from types import FrameType
from typing import Any

import pytest
import torch
from torch import nn

from systems.device.memory.host import HostMapping
from systems.planning.step.operations import LaneOperation, Work
from systems.planning.strategy import PlanningContext
from systems.substrate import engine as managed_engine
from systems.substrate.bundle.versions import SecondVersions
from systems.substrate.engine import ManagedEngine
from systems.substrate.moves.ahead import RECENT
from systems.substrate.system import ManagedSystem
from systems.system import Engine
from tests.planning.races import find_races
from tests.systems import models_small
from tests.systems.every import STRATEGIES
from tests.systems.interrupts import Place, Trace
from tests.systems.models_plain import CASES, build
from tests.systems.models_small import next_token_loss, tokens
from tests.systems.running import RESIDENT, Run, assert_equal, finished, host_need, managed, one_step, settings, start
from tests.systems.setups import in_turn
from tests.systems.test_ordering import as_issued, sleeps

LOSS = CASES["stack"].loss
TIGHT = 150_000  # bytes: about 40 % of what resident needs in fp32
STEPS = 6
BeforeStep = Callable[[Any, Engine, int], None]  # between backward and step(), told the number of the step


def trained(
    system: Any,
    *,
    spoil: Callable[[Any, list[int]], None] = lambda model, current: None,
    before_step: BeforeStep = lambda model, engine, number: None,
    jitter: Callable[[], None] | None = None,
    options: Any = None,
    **given: Any,
) -> Run:
    """spoil: puts hooks on the model, which look at the number of the step in progress."""
    model, current = build("stack"), [0]
    accumulate = given.get("accumulate", 1)
    asked = {"device_memory": TIGHT, "log_events": True} if isinstance(system, ManagedSystem) else {}
    engine = start(system, model, settings(**(asked | given)), options, jitter)
    spoil(model, current)
    losses = []
    for number, batch in enumerate(tokens(STEPS, accumulate)):
        current[0] = number
        total = 0.0
        for micro in batch:
            loss = LOSS(engine, micro, batch[:, :, 1:].numel())
            engine.backward(loss)
            total += loss.item()
        before_step(model, engine, number)
        engine.step()
        losses.append(total)
        if isinstance(engine, ManagedEngine):
            assert not any(stored.slot_holds_gradient for stored in engine.store.segments)
    return finished(engine, losses)


def ran_ahead(engine: Any) -> list[int]:
    """Bundles, an entry an update."""
    found = (op.what for op in engine.log.operations if isinstance(op.what, LaneOperation))
    return [each.bundle for each in found if each.kind is Work.UPDATE_AHEAD]


def counted(run: Run) -> tuple[int, int]:
    """Steps in which what ran ahead was dropped, and steps in which nothing did for that clipping was expected."""
    return run.counters["steps_that_missed"], run.counters["steps_that_waited"]


@pytest.mark.parametrize(
    ("system", "dtype", "accumulate"), in_turn(STRATEGIES, [("fp32", 1), ("bf16", 2), ("fp16", 1)], each=2), ids=str
)
@pytest.mark.one_in(5)
def test_they_do_by_default_and_change_no_bit(system: str, dtype: str, accumulate: int) -> None:
    given: dict[str, Any] = {"dtype": dtype, "accumulate": accumulate, "clip": 1e6}
    run = trained(STRATEGIES[system], jitter=sleeps(1, 2e-4), **given)
    assert_equal(trained(RESIDENT, **given), run)
    engine: Any = run.engine
    ahead = ran_ahead(engine)
    assert ahead and set(ahead) == engine.cursor.plan.ahead, "void: nothing ran ahead"
    assert counted(run) == (0, 0)
    assert find_races(as_issued(engine.log.operations)) == []
    assert 0 < (run.memory.host_second_version_bytes or 0) < (run.memory.host_peak_bytes or 0)
    assert engine.startup_s()["second_versions"] > 0


@pytest.mark.parametrize("system", STRATEGIES)
@pytest.mark.one_in(2)
def test_the_two_versions_count_in_turn(system: str) -> None:
    seen: list[dict[int, int]] = []

    def look(model: Any, engine: Engine, number: int) -> None:
        seen.append({index: each.number for index, each in managed(engine).versions.of.items()})

    run = trained(STRATEGIES[system], before_step=look)
    engine: Any = run.engine
    *_, first, second = seen
    assert first and set(first) == set(second)
    for index in set(ran_ahead(engine)):
        assert first[index] != second[index]
    assert all(stored.state is None for stored in engine.store.segments), "closed"


class WithIdle(nn.Module):
    """A block with a weight that now and then gets no gradient."""

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.used, self.idle = nn.Linear(48, 48), nn.Linear(48, 48)
        self.asleep = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(self.used(x) if self.asleep else self.used(x) + self.idle(x))


@pytest.mark.parametrize(("system", "accumulate"), in_turn(STRATEGIES, [(1,), (2,)]))
@pytest.mark.one_in(2)
def test_what_gets_no_gradient_is_whole_in_either_version(system: str, accumulate: int) -> None:
    """A block's weight that sleeps, in a bundle with one that does not: its state goes along."""
    runs = []
    for chosen in (RESIDENT, STRATEGIES[system]):
        model: Any = nn.Sequential(*(WithIdle() for _ in range(4)))
        given: dict[str, Any] = {} if chosen is RESIDENT else {"device_memory": 200_000, "log_events": True}
        engine = start(chosen, model, settings(accumulate=accumulate, **given))
        losses = []
        for number, batch in enumerate(tokens(8, accumulate)):
            model[1].asleep = number in (3, 4, 5)
            losses.append(one_step(engine, batch, LOSS))
        runs.append(finished(engine, losses))
    assert_equal(*runs)
    assert ran_ahead(runs[1].engine), "void: nothing ran ahead"


@pytest.mark.parametrize("system", STRATEGIES)
@pytest.mark.one_in(2)
def test_accumulators_are_cleared_behind_both_versions(system: str) -> None:
    """The next micro-batch adds to the one that counts by then, and the update read by way of the other."""
    model = build("stack")
    engine: Any = start(STRATEGIES[system], model, settings(accumulate=2, device_memory=TIGHT, log_events=True))
    for batch in tokens(4, 2):
        one_step(engine, batch, LOSS)
    engine.drain()
    cleared = {op.ticket for op in engine.log.operations if isinstance(op.what, LaneOperation) and op.what.kind is Work.CLEAR}
    assert engine.versions.of, "void: nothing ran ahead"
    for index in engine.cursor.plan.ahead:
        assert all(memory.writer.id in cleared for memory in engine.versions.of[index].states())
    engine.close()


@pytest.mark.parametrize("system", STRATEGIES)
@pytest.mark.one_in(2)
def test_a_model_has_its_values_back_whichever_version_counted(system: str) -> None:
    runs = []
    for chosen in (RESIDENT, STRATEGIES[system]):
        for steps in (3, 4):
            model = build("stack")
            engine = start(chosen, model, settings(dtype="bf16", **({} if chosen is RESIDENT else {"device_memory": TIGHT})))
            for batch in tokens(steps, 1):
                one_step(engine, batch, LOSS)
            engine.close()
            runs.append({name: value.detach().clone() for name, value in model.named_parameters()})
    for expected, found in zip(runs[:2], runs[2:], strict=True):
        assert all(torch.equal(value, found[name]) for name, value in expected.items())


@cache
def usual_norms() -> list[float]:
    return [norm for norm in trained(RESIDENT).norms if norm is not None]


def large_in(step: int) -> Callable[[Any, list[int]], None]:
    def spoil(model: Any, current: list[int]) -> None:
        model.blocks[2].up.weight.register_hook(lambda gradient: gradient * (1e3 if current[0] == step else 1.0))

    return spoil


@pytest.mark.parametrize(("system", "accumulate"), in_turn(STRATEGIES, [(1,), (2,)]))
@pytest.mark.one_in(2)
def test_a_step_that_is_clipped_against_expectation(system: str, accumulate: int) -> None:
    """The factor was assumed. What was updated with it is dropped, and the next steps are expected to be clipped too."""
    given: dict[str, Any] = {"clip": 10 * max(usual_norms()), "spoil": large_in(3), "accumulate": accumulate}
    run = trained(STRATEGIES[system], **given)
    assert_equal(trained(RESIDENT, **given), run)
    assert [outcome.clip_factor < 1 for outcome in run.engine.outcomes] == [number == 3 for number in range(STEPS)]
    assert ran_ahead(run.engine), "void: nothing ran ahead"
    assert counted(run) == (1, min(RECENT, STEPS - 4))


@pytest.mark.parametrize("system", STRATEGIES)
@pytest.mark.one_in(2)
def test_where_every_step_is_clipped_nothing_runs_ahead(system: str) -> None:
    run = trained(STRATEGIES[system], clip=min(usual_norms()) / 2)
    assert_equal(trained(RESIDENT, clip=min(usual_norms()) / 2), run)
    assert not ran_ahead(run.engine)
    assert counted(run)[0] == 0 < counted(run)[1]


@pytest.mark.parametrize(("system", "block", "accumulate"), in_turn(STRATEGIES, [(0, 1), (2, 2), (3, 1)], each=2), ids=str)
@pytest.mark.one_in(5)
def test_an_overflow_in_any_bundle_drops_them(system: str, block: int, accumulate: int) -> None:
    def spoil(model: Any, current: list[int]) -> None:
        model.blocks[block].up.weight.register_hook(lambda g: g * (torch.inf if current[0] in (3, 4) else 1.0))

    run = trained(STRATEGIES[system], spoil=spoil, accumulate=accumulate)
    assert_equal(trained(RESIDENT, spoil=spoil, accumulate=accumulate), run)
    assert run.skipped == [number in (3, 4) for number in range(STEPS)]
    assert ran_ahead(run.engine), "void: nothing ran ahead"


@pytest.mark.parametrize(("system", "accumulate"), in_turn(STRATEGIES, [(1,), (2,)]))
@pytest.mark.one_in(2)
def test_hyperparameters_that_change_behind_backward(system: str, accumulate: int) -> None:
    """What was read when the first update ran ahead is not what step() finds."""

    def change(model: Any, engine: Engine, number: int) -> None:
        engine.set_lr(1e-3 if number == 3 else 1e-4)

    run = trained(STRATEGIES[system], before_step=change, accumulate=accumulate)
    assert_equal(trained(RESIDENT, before_step=change, accumulate=accumulate), run)
    assert ran_ahead(run.engine), "void: nothing ran ahead"
    assert counted(run)[0] >= 1


@pytest.mark.parametrize(("system", "accumulate"), in_turn(STRATEGIES, [(1,), (2,)]))
@pytest.mark.one_in(2)
def test_hyperparameters_that_change_once_nothing_that_ran_ahead_is_left(system: str, accumulate: int) -> None:
    """All was dropped, as where the host's memory was needed; what the groups said before it ran ahead holds no more."""
    dropped: list[int] = []

    def change(model: Any, engine: Engine, number: int) -> None:
        if number == 3 and isinstance(engine, ManagedEngine):
            dropped.append(len(engine.ahead.assumed))
            engine.ahead.release()
        engine.set_lr(1e-3 if number == 3 else 1e-4)

    run = trained(STRATEGIES[system], before_step=change, accumulate=accumulate)
    assert_equal(trained(RESIDENT, before_step=change, accumulate=accumulate), run)
    assert dropped[0], "void: nothing ran ahead"


@pytest.mark.parametrize(("system", "accumulate"), in_turn(STRATEGIES, [(1,), (2,)]))
@pytest.mark.one_in(3)
def test_a_gradient_that_comes_after_its_bundle_was_updated(system: str, accumulate: int) -> None:
    """As nobody foresees: the mechanism is handed more of the last block's gradient once all of backward is over."""
    late: list[int] = []

    def more(model: Any, engine: Engine, number: int) -> None:
        ours = managed(engine)
        parameter = next(p.index for p in ours.index.parameters if p.name == "blocks.3.up.weight")
        bundle = ours.layout.bundle_of_parameter[parameter]
        if number == 3:
            late.append(bundle in ours.ahead.assumed)
            extra = torch.full(model.blocks[3].up.weight.shape, 0.01)
            ours.runtime.gradient(parameter, bundle, extra)
            ours.flushes.end_backward()

    both = []
    for ahead in (False, True):
        options = STRATEGIES[system].Options(run_ahead=ahead)
        both.append(trained(STRATEGIES[system], before_step=more, accumulate=accumulate, options=options))
    assert_equal(*both)
    assert late == [False, True], "void: it had not been updated"


@pytest.mark.parametrize(("system", "accumulate"), in_turn(STRATEGIES, [(1,), (2,)]))
@pytest.mark.one_in(2)
def test_who_looks_between_backward_and_step_sees_the_weights_before_it(system: str, accumulate: int) -> None:
    seen: dict[str, list[float]] = {"resident": [], system: []}
    for name, chosen in (("resident", RESIDENT), (system, STRATEGIES[system])):

        def look(model: Any, engine: Engine, number: int, name: str = name) -> None:
            with torch.no_grad():
                seen[name].append(LOSS(engine, tokens(1, 1)[0][0], 1).item())

        trained(chosen, before_step=look, accumulate=accumulate)
    assert seen["resident"] == seen[system]


@pytest.mark.parametrize(
    ("system", "pages", "accumulate"), in_turn(STRATEGIES, [(8, 1), (16, 1), (40, 2), (90, 1)], each=2), ids=str
)
@pytest.mark.one_in(4)
def test_the_host_s_budget_holds(system: str, pages: int, accumulate: int) -> None:
    budget = host_need(STRATEGIES[system], build("stack"), accumulate=accumulate, device_memory=TIGHT) + 4096 * pages
    run = trained(STRATEGIES[system], host_memory=budget, accumulate=accumulate)
    assert_equal(trained(RESIDENT, accumulate=accumulate), run)
    engine: Any = run.engine
    assert max(event.live for event in engine.log.bytes if event.tier == "host") <= budget
    assert bool(ran_ahead(engine)) == bool(engine.cursor.plan.ahead) == (pages > 8), "8 are too few for a bundle"


@pytest.mark.parametrize("system", [name for name in STRATEGIES if name != "h3t"])  # whose inputs want some host memory too
def test_a_host_without_any_room_is_told_of_once(system: str) -> None:
    with pytest.warns(RuntimeWarning, match=r"[\d.]+KiB of host memory .* run ahead of it: raise `host_memory`") as told:
        run = trained(STRATEGIES[system], host_memory=host_need(STRATEGIES[system], build("stack"), device_memory=TIGHT))
    assert len([each for each in told if "run ahead" in str(each.message)]) == 1
    assert not ran_ahead(run.engine)
    assert_equal(trained(RESIDENT), run)


@pytest.mark.parametrize(("system", "longer"), [("elixir", 32), ("patrickstar", 32), ("elixir", 48), ("patrickstar", 64)])
@pytest.mark.one_in(3)
def test_states_that_come_home_find_room(system: str, longer: int) -> None:
    """Second versions lie where states on the device have left their place at home; a longer batch sends those back."""
    lengths = (8, 8, 8, 8, longer, longer, 8, 8)
    host = host_need(STRATEGIES[system], models_small.build("opt", positions=158))
    runs, held = [], list[int]()
    for chosen in (RESIDENT, STRATEGIES[system]):
        given: dict[str, Any] = {"host_memory": host, "device_memory": 2_900_000, "log_events": True}
        model = models_small.build("opt", positions=158)
        jitter = None if chosen is RESIDENT else sleeps(longer, 2e-4)
        engine = start(chosen, model, settings(**({} if chosen is RESIDENT else given)), None, jitter)
        losses = []
        for length in lengths:
            losses.append(one_step(engine, tokens(1, 1, length=length, seed=length)[0], next_token_loss))
            if isinstance(engine, ManagedEngine):
                held.append(len(engine.versions.of))
        runs.append(finished(engine, losses))
    assert_equal(*runs)
    ours: Any = runs[1].engine
    assert max(event.live for event in ours.log.bytes if event.tier == "host") <= host
    assert held[0] > 1 and ours.counters()["demotions"] > 0, "void: nothing came home"
    assert held[4] < held[3], "some of them had to go"
    assert find_races(as_issued(ours.log.operations)) == []


class InFunction(Trace):
    """Ctrl-C at event `number` of a function of this project's code and of what that calls; none if there are fewer."""

    def __init__(self, function: Callable[..., Any], number: int) -> None:
        self._code, self._left, self._depth = function.__code__, number, 0
        self.happened = False

    def see(self, place: Place) -> None:
        if not self._depth:
            return
        self._left -= 1
        if self._left == 0:
            self.happened = True
            raise KeyboardInterrupt

    def _step(self, frame: FrameType, event: str, arg: object) -> Any:
        if frame.f_code is self._code and event in ("call", "return"):
            self._depth += 1 if event == "call" else -1
        return super()._step(frame, event, arg)


def give_back_and_make_anew(engine: Any) -> None:
    """As where states come home, and leave again."""
    assert any(each.number for each in engine.versions.of.values()), "void: no second one counts"
    with engine._recovering():
        engine.ahead.release()
        engine.in_force.apply(engine.cursor.plan)
    assert engine.versions.of, "void: none was made"


FUNCTIONS = SecondVersions.make, SecondVersions.bring_home, HostMapping.close
ROWS = list(zip(cycle(STRATEGIES), FUNCTIONS * 2, [1, 2] * 3, strict=False))


@pytest.mark.parametrize(("system", "function", "accumulate"), ROWS, ids=lambda each: getattr(each, "__qualname__", None))
@pytest.mark.one_in(6)
def test_ctrl_c_while_second_versions_come_and_go(system: str, function: Any, accumulate: int) -> None:
    """At one event after another: the bits of a step or of none, and every byte of the host is somebody's."""
    expected, batches = trained(RESIDENT, accumulate=accumulate), list(tokens(STEPS, accumulate))
    number, happened = 1, 0
    while True:
        engine: Any = start(STRATEGIES[system], build("stack"), settings(device_memory=TIGHT, accumulate=accumulate))
        losses = [one_step(engine, batch, LOSS) for batch in batches[:4]]
        fault = InFunction(function, number)
        with suppress(KeyboardInterrupt), fault.within():
            give_back_and_make_anew(engine)
        engine.drain()
        mappings = engine.recovery._host_mappings()
        assert engine.store.host.pool == sum(mapping.held_bytes for mapping in mappings)
        losses += [one_step(engine, batch, LOSS) for batch in batches[4:]]
        assert_equal(expected, finished(engine, losses))
        assert engine.store.host.pool == 0
        happened += fault.happened
        if not fault.happened:
            break
        number += 1 + number // 2
    assert happened > 3, "void: hardly any interrupt came"


@pytest.mark.parametrize(("system", "accumulate"), in_turn(STRATEGIES, [(1,), (2,)]))
@pytest.mark.one_in(2)
def test_ctrl_c_as_a_bundle_lies_in_its_first_version_again(system: str, accumulate: int) -> None:
    """And nobody has been told yet that this one counts."""
    expected, batches = trained(RESIDENT, accumulate=accumulate), list(tokens(STEPS, accumulate))
    engine: Any = start(STRATEGIES[system], build("stack"), settings(device_memory=TIGHT, accumulate=accumulate))
    losses = [one_step(engine, batch, LOSS) for batch in batches[:4]]
    bundle = next(engine.bundles[index] for index, each in engine.versions.of.items() if each.number)
    lie_in = bundle.lie_in

    def broken_off(*args: Any) -> None:
        lie_in(*args)
        bundle.lie_in = lie_in
        raise KeyboardInterrupt

    bundle.lie_in = broken_off
    with pytest.raises(KeyboardInterrupt):
        give_back_and_make_anew(engine)
    losses += [one_step(engine, batch, LOSS) for batch in batches[4:]]
    assert_equal(expected, finished(engine, losses))


def test_the_mechanism_is_told_what_the_strategy_was(monkeypatch: pytest.MonkeyPatch) -> None:
    """One context for both: a budget that one of them does not know would be passed."""
    told: list[PlanningContext] = []
    make = STRATEGIES["elixir"].strategy.__init__

    def noted(self: Any, options: Any, context: PlanningContext) -> None:
        told.append(context)
        make(self, options, context)

    monkeypatch.setattr(STRATEGIES["elixir"].strategy, "__init__", noted)
    engine: Any = start(STRATEGIES["elixir"], build("stack"), settings(device_memory=TIGHT))
    assert engine.planner._context is told[-1]
    engine.close()


@pytest.mark.parametrize("system", STRATEGIES)
@pytest.mark.one_in(2)
def test_ctrl_c_as_a_step_is_done_drops_no_update(system: str) -> None:
    """What ran ahead may still be queued by then, and it counts."""
    pause = [0.0]
    engine: Any = start(STRATEGIES[system], build("stack"), settings(device_memory=TIGHT), None, lambda: time.sleep(pause[0]))
    losses = []
    for number, batch in enumerate(tokens(STEPS, 1)):
        loss = LOSS(engine, batch[0], batch[:, :, 1:].numel())
        end = engine.ahead.end

        def broken(kept: Any = (), end: Any = end) -> None:
            engine.ahead.end = end
            raise KeyboardInterrupt

        if number == 4:
            pause[0], engine.ahead.end = 0.03, broken
        engine.backward(loss)
        with suppress(KeyboardInterrupt):
            engine.step()
        pause[0] = 0.0
        losses.append(loss.item())
    assert_equal(trained(RESIDENT), finished(engine, losses))


@pytest.mark.parametrize("system", STRATEGIES)
def test_they_run_ahead_again_once_others_have_had_the_memory(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    had: list[int] = []

    def look(model: Any, engine: Engine, number: int) -> None:
        if isinstance(engine, ManagedEngine):
            had.append(len(engine.versions.of))

    model = build("stack")
    engine: Any = start(STRATEGIES[system], model, settings(device_memory=TIGHT))
    losses = []
    for number, batch in enumerate(tokens(STEPS, 1)):
        if number == 4:
            monkeypatch.setattr(managed_engine, "free_host_memory", lambda: 1000)
            engine.state_dict()
            assert not engine.versions.of
            monkeypatch.undo()
        losses.append(one_step(engine, batch, LOSS))
        look(model, engine, number)
    assert had[3] == had[4] > 0, "void: nothing ran ahead"
    assert_equal(trained(RESIDENT), finished(engine, losses))
