"""PatrickStar's own rules as they are carried out: resident's bits, laws of what the lanes were given, gradients that stay."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Iterator
from functools import cache
from typing import Any

import pytest
import torch

from systems.planning.plan import OpKind, Tier
from systems.planning.policy.base import StrategyBase
from systems.strategies.patrickstar.options import PatrickStarOptions
from systems.strategies.patrickstar.strategy import PatrickStar
from systems.substrate.moves.staying import StayingGradients
from tests.planning.races import find_races
from tests.strategies.patrickstar_laws import RUN_LAWS, Step, labels
from tests.systems.interrupts import Course, Sweep, chosen
from tests.systems.interrupts import build as build_stack
from tests.systems.models_plain import CASES
from tests.systems.models_plain import build as build_plain
from tests.systems.models_small import build, next_token_loss, tokens
from tests.systems.running import (
    RESIDENT,
    Run,
    assert_equal,
    evict_at_once,
    finished,
    managed,
    one_step,
    patrickstar,
    settings,
    start,
    train,
    train_as,
)
from tests.systems.test_ordering import as_issued, assert_sound, sleeps
from tests.systems.test_ranks import STEPS, assert_is_one_rank, on_one_rank, on_ranks
from tests.systems.test_ranks_matrix import CLIP, assert_alike, half
from tests.systems.test_shards import Last, assert_as_planned, assert_bytes_as_planned, plan_of

MODELS = ("opt-tiny", "gpt-tiny", "bert-tiny", "t5-tiny")
PUBLISHED = ("paper", "spongebob", "static-partition", "osc")


@cache
def reference(model: str) -> Run:
    return train_as(RESIDENT, build(model), tokens(STEPS, 1), clip=0.5)


def budget_of(model: str, share: float) -> int:
    return int(share * (reference(model).memory.device_peak_bytes or 0)) + 1


def assert_as_it_should_be(found: list[Run], last: Last) -> None:
    """On every rank: no race, no wait that could not end, traffic and bytes as planned."""
    for rank, run in enumerate(found):
        log = managed(run.engine).log
        assert not find_races(as_issued(log.operations))
        assert_sound(managed(run.engine))
        assert_as_planned(run, last.counters[rank], [o.what for o in log.operations[last.issued[rank] :]])
        assert_bytes_as_planned(plan_of(run), log.bytes[last.bytes[rank] - 1 :])
        assert run.counters["fallbacks"] == run.counters.get("departures", 0) == 0
        if Tier.DEVICE not in plan_of(run).optimizer_tier:  # else gradients in autograd's buffers are bounded, not counted
            assert plan_of(run).predicted_device_peak_bytes == run.memory.device_peak_bytes
    if len(found) > 1:
        assert_alike(found)


@pytest.mark.parametrize("size", [1, 2])
@pytest.mark.parametrize("model", MODELS)
@pytest.mark.parametrize("variant", PUBLISHED)
@pytest.mark.one_in(16)
def test_half_of_resident_s_memory_holds_its_bits(variant: str, model: str, size: int) -> None:
    last, budget = Last(), half(model)
    given: dict[str, Any] = {"clip": CLIP, "device_memory": budget, "log_events": True}
    found = on_ranks(patrickstar(), model, size, 1, {"variant": variant}, before=last.note, **given)
    assert_is_one_rank(on_one_rank(model, size, CLIP, "fp32"), found)
    assert_as_it_should_be(found, last)
    for run in found:
        assert (run.memory.device_peak_bytes or 0) <= (plan_of(run).predicted_device_peak_bytes or 0) <= budget
        assert bool(plan_of(run).staying) == (size == 1), "of several ranks a gradient leaves at its flush"


@pytest.mark.parametrize(("model", "share"), [("opt", 0.3), ("opt", 0.5), ("gpt2", 0.35)])
@pytest.mark.parametrize("variant", PUBLISHED)
@pytest.mark.one_in(3)
def test_with_less_memory_gradients_are_evicted_and_nothing_else_changes(variant: str, model: str, share: float) -> None:
    last = Last()
    given: dict[str, Any] = {"clip": 0.5, "device_memory": budget_of(model, share), "log_events": True}
    engine = start(patrickstar(), build(model), settings(**given), PatrickStarOptions.model_validate({"variant": variant}))
    run = train(engine, tokens(STEPS, 1), each_step=lambda step, it: last.note(it, 0, step))
    assert_equal(reference(model), run)
    assert_as_it_should_be([run], last)


# ---- laws of what the lanes were given


@cache
def steady(variant: str, share: float = 1.0, **changed: Any) -> tuple[Step, Any, Any]:
    """What the lanes were given in the last of several steps, the layout and the plan. changed: options set otherwise."""
    options = PatrickStarOptions.model_validate({"variant": variant}).model_copy(update=changed)
    asked = settings(device_memory=budget_of("opt", share), log_events=True)
    engine: Any = start(patrickstar(), build("opt"), asked, options)
    begin = 0
    for batch in tokens(4, 1):
        engine.drain()
        begin = len(engine.log.operations)
        one_step(engine, batch)
    engine.drain()
    found = labels(engine.log.operations[begin:]), engine.layout, engine.cursor.plan
    engine.close()
    return found


@pytest.mark.parametrize("law", RUN_LAWS)
@pytest.mark.parametrize(("variant", "share"), [("paper", 0.35), ("osc", 1.0), ("static-partition", 0.5), ("spongebob", 0.35)])
def test_a_run_keeps_the_paper_s_rules(law: str, variant: str, share: float) -> None:
    step, layout, plan = steady(variant, share)
    assert plan.staying and any(label.startswith("fetch") for _, label in step), "void: nothing stays or moves"
    RUN_LAWS[law](step, layout, plan)


@pytest.mark.parametrize("law", RUN_LAWS)
def test_a_run_by_default_does_not(law: str) -> None:
    with pytest.raises(AssertionError):
        RUN_LAWS[law](*steady("base", 0.35))


def rule_off(law: str, monkeypatch: pytest.MonkeyPatch) -> dict[str, Any]:
    if law != "fetched when needed":  # of what stays no update runs ahead either
        monkeypatch.setattr(PatrickStar, "division", StrategyBase.division)
    changed: dict[str, dict[str, Any]] = {
        "fetched when needed": {"prefetch": 8},
        "updates behind backward": {"run_ahead": True},
        "gradients stay": {},
    }
    return changed[law]


@pytest.mark.parametrize("law", RUN_LAWS)
def test_without_its_rule_a_law_is_broken(law: str, monkeypatch: pytest.MonkeyPatch) -> None:
    changed = rule_off(law, monkeypatch)
    with pytest.raises(AssertionError):
        RUN_LAWS[law](*steady.__wrapped__("osc", **changed))


def test_the_device_holds_a_gradient_that_stays_and_the_host_gets_it_once() -> None:
    """Between its flush and the step's end it is on the device, in as many bytes; the traffic is the default's."""
    step, layout, plan = steady("osc")
    assert not [p for p in plan.operations if p.operation.kind is not OpKind.FETCH], "void: something is evicted"
    offloaded = [label for lane, label in step if lane == "d2h"]
    assert len(offloaded) == len(set(offloaded)) == len([b for b in layout.bundles if b.trainable])


def test_a_gradient_that_leaves_without_a_copy_is_found(monkeypatch: pytest.MonkeyPatch) -> None:
    """The bits, and the traffic, are looked at: what stays and is dropped instead of being sent is missed."""

    def lost(staying: StayingGradients, bundle: Any) -> None:
        bundle.gradients.let_go()
        staying.there.pop(bundle.index)

    monkeypatch.setattr(StayingGradients, "leave", lost)
    with pytest.raises(AssertionError):
        test_with_less_memory_gradients_are_evicted_and_nothing_else_changes("osc", "opt", 0.5)


# ---- what is not as planned


def options() -> PatrickStarOptions:
    return PatrickStarOptions(variant="paper")


@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(6)
def test_user_models_at_half_of_resident_s_memory(case: str) -> None:
    """Units called twice, late gradients, several entries: where a gradient cannot stay it does not."""
    expected = train(start(RESIDENT, build_plain(case), settings(clip=1.0)), tokens(STEPS, 1), CASES[case].loss)
    budget = int(0.5 * (expected.memory.device_peak_bytes or 0))
    engine = start(patrickstar(), build_plain(case), settings(clip=1.0, device_memory=budget), options())
    assert_equal(expected, train(engine, tokens(STEPS, 1), CASES[case].loss))


def train_lengths(system: Any, lengths: tuple[int, ...], budget: int, asked: Any = None, **given: Any) -> Run:
    engine = start(system, build("opt"), settings(device_memory=budget, clip=1.0, **given), asked)
    return finished(engine, [one_step(engine, tokens(1, 1, length=n, seed=s)[0]) for s, n in enumerate(lengths)])


@pytest.mark.parametrize("lengths", [(8, 8, 60, 16, 48, 48), (32, 32, 4, 32, 8)])
@pytest.mark.parametrize("share", [0.45, 0.6])
def test_steps_of_other_lengths_have_the_bits(lengths: tuple[int, ...], share: float) -> None:
    expected = train_lengths(RESIDENT, lengths, 1 << 30)
    budget = int(share * (expected.memory.device_peak_bytes or 0))
    run = train_lengths(patrickstar(), lengths, budget, options(), log_events=True)
    assert_equal(expected, run)
    assert not find_races(as_issued(managed(run.engine).log.operations))
    assert (run.memory.device_peak_bytes or 0) <= budget


@pytest.mark.parametrize("share", [0.35, 0.6])
def test_for_want_of_room_gradients_that_stay_go_first(share: float) -> None:
    """Whatever is let go of leaves at once, and now and then what waits does."""
    asked = settings(clip=0.5, device_memory=budget_of("opt", share), log_events=True)
    engine: Any = start(patrickstar(), build("opt"), asked, options())
    evict_at_once(engine)
    run = train(engine, tokens(STEPS, 1))
    assert_equal(reference("opt"), run)
    assert not find_races(as_issued(engine.log.operations))


def between(engine: Any, act: Callable[[Any], None], at: int = 2) -> Run:
    """Something is done between backward and step of one step, when gradients stay."""
    losses = []
    for step, batch in enumerate(tokens(STEPS, 1)):
        value = next_token_loss(engine, batch[0], batch[:, :, 1:].numel())
        engine.backward(value)
        losses.append(value.item())
        if step == at:
            act(engine)
        engine.step()
    return finished(engine, losses)


@pytest.mark.parametrize("share", [0.35, 0.6])
def test_a_pass_without_gradients_reads_parameters_and_not_what_stays(share: float) -> None:
    """Its result is resident's, bit for bit, and so is the step's."""
    found: dict[str, list[float]] = {"ours": [], "theirs": []}

    def looks(name: str) -> Callable[[Any], None]:
        def look(engine: Any) -> None:
            engine.eval()
            with torch.no_grad():
                found[name].append(next_token_loss(engine, tokens(1, 1, seed=9)[0, 0], 7).item())
            engine.train()
            if name == "ours":
                stays.extend(managed(engine).gradients.staying.there)

        return look

    stays: list[int] = []
    expected = between(start(RESIDENT, build("opt"), settings(clip=0.5)), looks("theirs"))
    asked = settings(clip=0.5, device_memory=budget_of("opt", share))
    run = between(start(patrickstar(), build("opt"), asked, options()), looks("ours"))
    assert_equal(expected, run)
    assert found["ours"] == found["theirs"]
    assert stays or share < 0.5, "void: nothing stayed until then"


@pytest.mark.parametrize("jitter", [False, True])
def test_a_skipped_step_changes_nothing_though_gradients_stayed(jitter: bool) -> None:
    def bad(system: Any, **given: Any) -> Run:
        calls = itertools.count()

        def loss(model: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
            value = next_token_loss(model, ids, count)
            return value * torch.inf if next(calls) == 2 else value

        pause = sleeps() if jitter and given else None
        engine = start(system, build("opt"), settings(clip=1.0, **given), options() if given else None, pause)
        return train(engine, tokens(5, 1), loss)

    expected, run = bad(RESIDENT), bad(patrickstar(), device_memory=budget_of("opt", 0.5))
    assert run.skipped == expected.skipped == [False, False, True, False, False]
    assert repr(run.losses) == repr(expected.losses)
    assert all(torch.equal(value, run.parameters[name]) for name, value in expected.parameters.items())


class BrokenError(Exception):
    pass


def breaking(staying: StayingGradients, name: str, count: int) -> Iterator[None]:
    """The count-th call of a method breaks off, before it has done anything, or behind it."""
    method, calls = getattr(staying, name), itertools.count()

    def call(*given: Any) -> None:
        number = next(calls)
        if number == count:
            raise BrokenError
        method(*given)
        if number == count + 1:
            setattr(staying, name, method)
            raise BrokenError

    setattr(staying, name, call)
    yield
    setattr(staying, name, method)


@pytest.mark.parametrize("name", ["stay", "leave"])
@pytest.mark.parametrize("count", [0, 3])
def test_a_step_that_breaks_off_is_forgotten_with_all_that_stays(name: str, count: int) -> None:
    """Twice, ahead of a call and behind one; then the same steps have the bits of a run in which nothing broke."""
    asked = settings(clip=0.5, device_memory=budget_of("opt", 0.5), log_events=True)
    engine: Any = start(patrickstar(), build("opt"), asked, options())
    batches, losses = tokens(STEPS, 1), []
    for step, batch in enumerate(batches):
        if step == 2:
            breaks = breaking(engine.gradients.staying, name, count)
            next(breaks)
            for _ in range(2):
                with pytest.raises(BrokenError):
                    one_step(engine, batch)
                engine.discard()
                assert not engine.gradients.staying.there
                assert engine.device.account.pool == sum(block.nbytes for block in engine.recovery.owned())
            next(breaks, None)
        losses.append(one_step(engine, batch))
    run = finished(engine, losses)
    expected = reference("opt")
    assert_equal(expected, run)


def test_ctrl_c_at_every_place_where_a_gradient_stays_or_leaves() -> None:
    """Of a step under a plan: it is forgotten or done, and nothing is lost of either memory."""
    ids = tokens(1, 1)[0]
    course = Course(start(RESIDENT, build_stack(), settings()), ids)
    chosen_options = PatrickStarOptions(variant="osc")
    sweep = Sweep(lambda: start(patrickstar(), build_stack(), settings(device_memory=150_000), chosen_options), course, 1)
    places = chosen(sweep.places(), [0.0, 1.0])
    mine = [(place, time) for place, time in places if place.file.endswith("moves/staying.py")]
    assert len(mine) > 20, "void: nothing stays"
    for place, time in mine:
        sweep.interrupt(place, time)
    sweep.end()
    assert sweep.happened > len(mine) // 2, "void: hardly any interrupt came"


def test_a_gradient_leaves_where_its_plan_evicts_it() -> None:
    """Once, in the middle of the backward pass, as a gradient: nothing is written back behind it."""
    step, layout, _ = steady("static-partition", 0.5)
    ended = max(n for n, (_, label) in enumerate(step) if label.startswith("release by ('backward'"))
    early = {label.split()[2] for lane, label in step[:ended] if lane == "d2h" and label.startswith("offload")}
    chunks = {str(bundle) for bundle in layout.in_place}
    assert early & chunks, "void: no gradient is evicted"
    offloaded = [label for lane, label in step if label.startswith("offload")]
    assert len(offloaded) == len(set(offloaded)) == len([b for b in layout.bundles if b.trainable])
    assert not any(label.startswith("write-back") for _, label in step[ended:])
