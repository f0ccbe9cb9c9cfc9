"""Gradients written over their own parameters: the same bits as ever, no range, and a way out of every odd case."""

from __future__ import annotations

from functools import cache

import pytest
import torch

from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.bundle.gradient import BundleGradient
from tests.planning.races import find_races, issued_operations
from tests.random_eviction import RandomOptions
from tests.systems.models_plain import CASES, build
from tests.systems.models_small import build as build_small
from tests.systems.models_small import tokens
from tests.systems.running import (
    RANDOM,
    RESIDENT,
    Run,
    assert_equal,
    evict_at_once,
    managed,
    parameters_of,
    settings,
    start,
    train,
    train_as,
)
from tests.systems.setups import in_turn

STEPS = 3
OPTIONS = RandomOptions(in_place=True)
WHOLE = RandomOptions(in_place=True, chunk_parameters=100)  # all blocks in one chunk


@cache
def reference(case: str, dtype: str = "bf16") -> Run:
    return train(start(RESIDENT, build(case), settings(dtype=dtype, clip=1.0)), tokens(STEPS, 1), CASES[case].loss)


@cache
def small_reference(model: str, accumulate: int = 1) -> Run:
    return train_as(RESIDENT, build_small(model), tokens(STEPS, accumulate), clip=0.5)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(3)
def test_the_bits_are_those_of_resident(case: str) -> None:
    options = RandomOptions(in_place=True, chunk_parameters=7)
    asked = settings(dtype="bf16", clip=1.0, log_events=True)
    run = train(start(RANDOM, build(case), asked, options), tokens(STEPS, 1), CASES[case].loss)
    assert_equal(reference(case), run)
    log = run.engine.log  # type: ignore[attr-defined]
    assert find_races(issued_operations(log.operations)) == []
    assert any(entry.label.startswith("gradients over parameters") for entry in log.operations)


@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(2)
def test_nothing_is_used_after_its_release(case: str) -> None:
    engine = start(RANDOM, build(case), settings(dtype="bf16", clip=1.0), OPTIONS)
    evict_at_once(engine)
    run = train(engine, tokens(STEPS, 1), CASES[case].loss)  # before the reference, which draws random numbers too
    assert_equal(reference(case), run)


@pytest.mark.parametrize(("model", "recompute"), in_turn(["opt", "gpt2"], [("none",), ("full",)]))
def test_a_simple_step_has_no_range_but_for_tied_parameters(model: str, recompute: str) -> None:
    ids = tokens(STEPS, 1)
    expected = train_as(RESIDENT, build_small(model), ids, recompute=recompute)
    run = train_as(RANDOM, build_small(model), ids, OPTIONS, recompute=recompute, log_events=True)
    assert_equal(expected, run)
    assert run.counters.get("gradient_detours", 0) == 0
    layout = run.engine.layout  # type: ignore[attr-defined]
    made = {e.label for e in run.engine.log.bytes if e.label.startswith("gradient of bundle")}  # type: ignore[attr-defined]
    ranged = {f"gradient of bundle {b.index}" for b in layout.bundles if b.index not in layout.in_place}
    assert made == ranged
    assert len(layout.in_place) > 4 * len(ranged)


def test_several_micro_batches_have_ranges() -> None:
    ids = tokens(STEPS, 2)
    run = train_as(RANDOM, build_small("opt"), ids, OPTIONS, clip=0.5, log_events=True)
    assert_equal(small_reference("opt", accumulate=2), run)
    labels = {e.label for e in run.engine.log.operations}  # type: ignore[attr-defined]
    assert not any(label.startswith("gradients over parameters") for label in labels)


def test_a_unit_that_enters_again_gets_its_parameters_back() -> None:
    """As hooks do for outputs whose gradients come late; here the runtime is told so by hand."""
    ids = tokens(STEPS, 1)
    engine = start(RANDOM, build_small("opt"), settings(clip=0.5, log_events=True), WHOLE)
    runtime, seen = engine.runtime, []  # type: ignore[attr-defined]
    leave = runtime.backward_exit

    def leave_and_return(unit: int) -> None:
        held = runtime.holds_backward(unit)
        leave(unit)
        if held and unit == 3:
            runtime.backward_enter(unit)
            seen.append({bundle.index for bundle in runtime._managed(unit) if bundle.gradients.written})
            leave(unit)

    runtime.backward_exit = leave_and_return
    run = train(engine, ids)
    assert_equal(small_reference("opt"), run)
    assert seen
    assert not any(seen)
    assert run.counters["gradient_detours"] > 0
    assert find_races(issued_operations(engine.log.operations)) == []  # type: ignore[attr-defined]


def test_a_gradient_sent_off_while_another_is_brought_together_is_summed_once() -> None:
    """As where that wants room; here the runtime is told so by hand."""
    ids = tokens(STEPS, 1)
    engine = start(RANDOM, build_small("opt"), settings(clip=0.5, log_events=True), OPTIONS)
    flushes, gradients, sent = managed(engine).flushes, managed(engine).gradients, set[int]()
    assemble, busy = gradients.in_place.assemble, list[int]()

    def assemble_and_send_others(bundle: ManagedBundle, gradient: BundleGradient) -> None:
        assemble(bundle, gradient)
        others = [each for each in gradients.bundles.values() if each is not bundle and each.gradients.written]
        if others and not busy:
            busy.append(bundle.index)
            flushes.relieve()
            busy.clear()
            sent.update(each.index for each in others if gradient.complete and not each.gradients.written)

    gradients.in_place.assemble = assemble_and_send_others
    run = train(engine, ids)
    assert_equal(small_reference("opt"), run)
    assert sent
    assert find_races(issued_operations(engine.log.operations)) == []  # type: ignore[attr-defined]


def test_an_exception_in_backward_leaves_the_parameters_as_they_were() -> None:
    ids = tokens(STEPS, 1)
    engine = start(RANDOM, build_small("opt"), settings(clip=0.5), OPTIONS)
    before = parameters_of(engine)
    blocks = next(m for m in engine.module.modules() if isinstance(m, torch.nn.ModuleList))

    def fail(module: torch.nn.Module, gradient: object) -> None:
        raise RuntimeError("on purpose")

    handle = blocks[1].register_full_backward_pre_hook(fail)
    with pytest.raises(RuntimeError, match="on purpose"):
        engine.backward(engine(input_ids=ids[0, 0]).logits.float().sum())
    handle.remove()
    assert not any(bundle.gradients.written for bundle in managed(engine).gradients.bundles.values())
    assert all(torch.equal(value, before[name]) for name, value in parameters_of(engine).items())
    assert_equal(small_reference("opt"), train(engine, ids))


def test_reading_a_parameter_that_is_a_gradient_is_refused_by_name() -> None:
    ids = tokens(1, 1)
    engine = start(RANDOM, build_small("opt"), settings(), WHOLE)
    blocks = next(m for m in engine.module.modules() if isinstance(m, torch.nn.ModuleList))
    weight = blocks[3].get_parameter("fc1.weight")

    def read(module: torch.nn.Module, gradient: object) -> None:
        weight.abs().sum()  # the backward of its unit is over

    blocks[1].register_full_backward_pre_hook(read)
    with pytest.raises(RuntimeError, match=r"reads parameter .*layers.3.fc1.weight outside the unit"):
        engine.backward(engine(input_ids=ids[0, 0]).logits.float().sum())
    engine.close()
