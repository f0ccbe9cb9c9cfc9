"""Block inputs that wait for their backward on the host: same bits, less on the device, nothing left behind."""

from __future__ import annotations

import gc
import random
import time
import weakref
from dataclasses import replace
from functools import cache, partial
from itertools import pairwise
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import settings as how
from hypothesis import strategies as st
from pydantic import BaseModel
from torch import nn
from torch.utils.checkpoint import checkpoint

from models.data import open_dataset
from models.loss import count_labels, token_loss
from models.registry import build as build_registered
from models.registry import initial_weights, resolve
from systems.device.watch.events import LoggedOperation
from systems.errors import BudgetError, OutOfMemoryError, UnsupportedError
from systems.strategies.elixir.options import ElixirOptions
from systems.strategies.patrickstar.options import PatrickStarOptions
from tests.planning.races import find_races, issued_operations
from tests.random_eviction import RandomOptions
from tests.systems.every import with_option
from tests.systems.models_plain import DIM, Block, Stack, squared_error
from tests.systems.models_small import tokens
from tests.systems.running import (
    AMPLE,
    RANDOM,
    RESIDENT,
    Run,
    assert_equal,
    elixir,
    evict_at_once,
    finished,
    managed,
    one_step,
    settings,
    start,
    train,
)
from tests.systems.setups import Setup, budget_of, in_turn, reference

ON_HOST: dict[str, tuple[Any, BaseModel]] = with_option("activations", "host")
OTHERS = [name for name in ON_HOST if name not in ("patrickstar", "elixir", "random")]
INPUTS = 4 * 2 * 16 * 64  # elements of one micro-batch's block inputs in a Setup: blocks x batch x length x width


def check_log(engine: Any) -> None:
    """Nothing raced, and the budget held at every event."""
    assert find_races(issued_operations(engine.log.operations)) == []
    device = [entry for entry in engine.log.bytes if entry.tier == "device"]
    assert all(0 <= e.pool <= e.live <= engine.memory().device_budget_bytes for e in device)


# ---- the same bits


@pytest.mark.parametrize(
    ("system", "setup", "level"),
    [
        ("patrickstar", Setup("opt", "full"), "tight"),
        ("patrickstar", Setup("gpt2", "full", 2, "half-frozen", "bf16", clip=0.5), "half"),
        ("patrickstar", Setup("gpt2", "reentrant", 2, clip=0.5), "tight"),
        ("elixir", Setup("opt", "reentrant", 1, "untied"), "half"),
        ("elixir", Setup("gpt2", "non-reentrant", 2, "tied", "bf16"), "tight"),
        ("random", Setup("opt", "non-reentrant", 1, "half-frozen"), "tight"),
        *((name, Setup("gpt2", "full", 2, "tied", "bf16", clip=0.5), "half") for name in OTHERS),
    ],
    ids=str,
)
@pytest.mark.one_in(3)
def test_equals_resident(system: str, setup: Setup, level: str) -> None:
    chosen, options = ON_HOST[system]
    run = setup.run(chosen, budget_of(setup, level), options, log_events=True)
    assert_equal(reference(setup), run)
    held = INPUTS * (4 if setup.dtype == "fp32" else 2)
    moved = [step["activation_offload_bytes"] for step in run.per_step]
    assert moved == [2 * held * setup.accumulate] * len(moved)
    assert all(min(step["h2d_bytes"], step["d2h_bytes"]) >= step["activation_offload_bytes"] / 2 for step in run.per_step)
    assert run.memory.host_activation_bytes == held, "slots serve every micro-batch and step again"
    assert run.counters["fallbacks"] == 0
    check_log(run.engine)


@cache
def of_a_family(name: str, system: str, accumulate: int) -> Run:
    """3 steps with recomputation, dropout and clipping; in half of resident's peak for the others."""
    shape = resolve(name, {"dropout": 0.1, "num_layers": 2})
    data = open_dataset("synthetic", vocab_size=shape.vocab_size, seed=3, objective=shape.objective)
    loss_of = partial(token_loss, objective=shape.objective)
    chosen, options, budget = RESIDENT, None, AMPLE
    if system != "resident":
        chosen, options = ON_HOST[system]
        budget = (of_a_family(name, "resident", accumulate).memory.device_peak_bytes or 0) // 2
    asked = settings(
        initial_weights=initial_weights(shape, 1),
        accumulate=accumulate,
        clip=1.0,
        recompute="full",
        device_memory=budget,
        log_events=True,
    )
    engine, losses = start(chosen, build_registered(shape), asked, options), []
    torch.manual_seed(5)
    for step in range(3):
        batches = [data.batch(step, micro_step=m, batch_size=2, seq_len=32) for m in range(accumulate)]
        count, total = sum(count_labels(b, objective=shape.objective) for b in batches), 0.0
        for batch in batches:
            loss = loss_of(engine, batch, count)
            engine.backward(loss)
            total += loss.item()
        engine.step()
        losses.append(total)
    return finished(engine, losses)


@pytest.mark.parametrize(
    ("name", "accumulate"),
    [
        pytest.param(name, accumulate, marks=pytest.mark.slow if (number + accumulate) % 2 else ())
        for number, name in enumerate(["opt-tiny", "gpt-tiny", "bert-tiny", "t5-tiny"])
        for accumulate in (1, 2)
    ],
)
@pytest.mark.one_in(2)
def test_every_family_with_dropout(name: str, accumulate: int) -> None:
    run = of_a_family(name, "patrickstar", accumulate)
    assert_equal(of_a_family(name, "resident", accumulate), run)
    engine: Any = run.engine
    each = 2 * 32 * resolve(name).hidden_size * 4
    assert run.counters["activation_offload_bytes"] == 3 * accumulate * 2 * each * len(engine.index.blocks)
    check_log(engine)


@pytest.mark.parametrize("seed", [1, 2])
def test_late_copies_change_no_bit(seed: int) -> None:
    """With random sleeps in the lanes; and with parameters gone the moment they are released."""
    setup, luck = Setup("gpt2", "full", 2, clip=0.5), random.Random(seed)
    chosen, options = ON_HOST["patrickstar"]
    asked = settings(accumulate=2, clip=0.5, recompute="full", device_memory=budget_of(setup, "half"), log_events=True)
    engine = start(chosen, setup.build(), asked, options, lambda: time.sleep(luck.choice((0, 0, 0, 0.001))))
    if seed == 2:
        evict_at_once(engine)
    assert_equal(reference(setup), train(engine, tokens(3, 2)))
    check_log(engine)


@cache
def logged() -> tuple[tuple[LoggedOperation, ...], tuple[str, ...]]:
    """What was issued, and the names of the model's units."""
    setup = Setup("opt", "full")
    engine: Any = setup.run(ON_HOST["random"][0], budget_of(setup, "tight"), ON_HOST["random"][1], log_events=True).engine
    return tuple(engine.log.operations), engine.layout.unit_names


def test_each_input_comes_while_the_block_after_it_goes_backward() -> None:
    operations, names = logged()
    labels = [operation.label for operation in operations]
    blocks = [unit for unit, name in enumerate(names) if f"fetch-input ({name})" in labels]
    assert len(blocks) == 4
    last = len(labels) - 1 - labels[::-1].index(f"hold for ('forward', {blocks[0]})")  # the last step
    for unit, after in pairwise(blocks):
        assert labels.index(f"fetch-input ({names[unit]})", last) < labels.index(f"hold for ('backward', {after})", last)


@pytest.mark.parametrize(
    ("lane", "begins", "ends"),
    [
        ("d2h", "offload-input", ""),
        ("compute", "input of unit", "leaves"),
        ("h2d", "fetch-input", ""),
        ("compute", "input of", ""),
    ],
)
def test_a_forgotten_wait_is_found(lane: str, begins: str, ends: str) -> None:
    """Take the waits from one operation of each kind: a race is named."""
    operations, _ = logged()
    issued = issued_operations(operations)
    issued = [replace(o, lane=f"cpu {o.ticket}") if o.lane == "cpu" else o for o in issued]
    assert find_races(issued) == []
    chosen = [
        number
        for number, o in enumerate(operations)
        if o.lane == lane and o.label.startswith(begins) and o.label.endswith(ends) and o.waits
    ]
    assert chosen, "void: nothing of this kind waits"
    for index in reversed(chosen):
        planted = [*issued[:index], replace(issued[index], waits=()), *issued[index + 1 :]]
        if any(operations[index].ticket in (race.first, race.second) for race in find_races(planted)):
            return
    raise AssertionError(f"none of {len(chosen)} is missed")


@how(max_examples=4, deadline=None)
@given(st.lists(st.frozensets(st.integers(0, 3)), min_size=3, max_size=3))
def test_any_set_of_blocks_in_any_step(switches: list[frozenset[int]]) -> None:
    """A switch a layer, as H3T has it, and set anew for each step."""
    setup = Setup("opt", "full")
    chosen, options = ON_HOST["elixir"]
    engine: Any = start(chosen, setup.build(), settings(recompute="full", device_memory=budget_of(setup, "half")), options)
    blocks = sorted(engine.index.blocks)

    def choose(step: int, engine: Any) -> None:
        engine.strategy.offloaded_inputs = frozenset(blocks[number] for number in switches[step])

    run = train(engine, tokens(3, 1), each_step=choose)
    assert_equal(reference(setup), run)
    each = INPUTS // 4 * 4
    assert [step["activation_offload_bytes"] for step in run.per_step] == [2 * each * len(blocks) for blocks in switches]


# ---- memory


class Wide(Stack):
    """Many blocks, so that their inputs are most of what a step with recomputation keeps."""

    BLOCKS, ROWS = 16, 256

    def __init__(self) -> None:
        super().__init__(count=self.BLOCKS)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x.repeat(self.ROWS // x.shape[0], 1).requires_grad_() * 1.0)


def wide_loss(model: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
    return model(ids[:, :16].float().div(128).repeat(1, 3)).square().sum() / count


def wide_run(options: BaseModel, budget: int = AMPLE) -> Run:
    torch.manual_seed(0)
    asked = settings(recompute="full", device_memory=budget, log_events=True)
    return train(start(ON_HOST["patrickstar"][0], Wide(), asked, options), tokens(3, 1), wide_loss)


def test_the_device_holds_two_inputs_instead_of_all() -> None:
    options = PatrickStarOptions(variant="osc", run_ahead=False)
    kept, moved = (wide_run(options.model_copy(update={"activations": where})) for where in ("device", "host"))
    assert_equal(kept, moved)
    each = Wide.ROWS * DIM * 4
    saved = (kept.memory.device_peak_bytes or 0) - (moved.memory.device_peak_bytes or 0)
    assert (Wide.BLOCKS - 3) * each <= saved <= Wide.BLOCKS * each
    curves = [max(run.engine.statistics().non_model_bytes) for run in (kept, moved)]  # type: ignore[union-attr]
    assert (Wide.BLOCKS - 3) * each <= curves[0] - curves[1] <= Wide.BLOCKS * each, "the tracer sees what left"
    assert moved.memory.host_activation_bytes == Wide.BLOCKS * each
    assert (moved.memory.host_peak_bytes or 0) - (kept.memory.host_peak_bytes or 0) == Wide.BLOCKS * each
    check_log(moved.engine)


def test_a_budget_that_only_fits_without_the_inputs() -> None:
    expected = wide_run(PatrickStarOptions())
    budget = (Wide.BLOCKS - 2) * Wide.ROWS * DIM * 4
    with pytest.raises(OutOfMemoryError):
        wide_run(PatrickStarOptions(), budget)
    run = wide_run(PatrickStarOptions(activations="host"), budget)
    assert_equal(expected, run)
    assert (run.memory.device_peak_bytes or 0) <= budget
    assert run.per_step[-1]["on_demand_fetches"] == 0, "the steps are planned"
    check_log(run.engine)


def test_an_input_that_finds_no_room_ahead_comes_when_it_is_asked_for() -> None:
    torch.manual_seed(0)
    asked = settings(recompute="full", log_events=True)
    engine: Any = start(RANDOM, Wide(), asked, RandomOptions(activations="host"))
    inputs = managed(engine).inputs
    fetch, refused = inputs._fetch, []

    def scarce(kept: Any) -> None:
        """As the device would with room for one input only."""
        waiting = [k for k in inputs._stack if k.tensor is not None and not k.taken]
        if kept.tensor is None and waiting:
            refused.append(kept)
            raise OutOfMemoryError("no room", tier="device", need=kept.nbytes, have=0)
        fetch(kept)

    inputs._fetch = scarce
    run = train(engine, tokens(3, 1), wide_loss)
    assert len(refused) == run.counters["activation_prefetches_refused"] == 1
    assert_equal(wide_run(PatrickStarOptions()), run)
    check_log(engine)


def test_other_lengths_replace_the_slots() -> None:
    """The host holds the longest, not all lengths together; shorter ones use the same slots."""
    runs: list[Run] = []
    for system, options in ((RESIDENT, None), ON_HOST["patrickstar"]):
        budget = AMPLE if options is None else int(0.6 * (runs[0].memory.device_peak_bytes or 0))
        engine = start(system, Setup().build(), settings(recompute="full", device_memory=budget), options)
        losses = [one_step(engine, tokens(1, 1, length=length, seed=length)[0]) for length in (8, 16, 48, 8, 32)]
        runs.append(finished(engine, losses))
    assert_equal(*runs)
    assert runs[1].memory.host_activation_bytes == 4 * 2 * 48 * 64 * 4


# ---- departures


class DropoutBlock(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return nn.functional.dropout(super().forward(x), 0.2, self.training)


@pytest.mark.parametrize("system", ON_HOST)
@pytest.mark.one_in(2)
def test_evaluation_and_a_forward_that_nobody_uses(system: str) -> None:
    runs = []
    for chosen, options in ((RESIDENT, None), ON_HOST[system]):
        torch.manual_seed(0)
        budget = AMPLE if options is None else 200_000
        engine = start(chosen, Stack(DropoutBlock), settings(recompute="full", device_memory=budget, log_events=True), options)
        losses = []
        for number, batch in enumerate(tokens(4, 1)):
            if number:
                with torch.no_grad():
                    losses.append(squared_error(engine, tokens(1, 1, batch=5)[0, 0], 1).item())
            loss = squared_error(engine, batch[0], 30)
            with torch.no_grad():
                losses.append(squared_error(engine, batch[0], 1).item())  # between forward and backward
            engine.backward(loss)
            losses.append(squared_error(engine, batch[0], 30).item())  # with gradients, and thrown away
            engine.step()
        if options is not None:
            assert managed(engine).inputs._stack == [], "what nobody asks for any more gives its slot back"
            check_log(engine)
        runs.append(finished(engine, losses))
    assert_equal(*runs)


class OnPurposeError(Exception):
    pass


@pytest.mark.parametrize(("system", "where"), in_turn(ON_HOST, [("forward",), ("backward",)]))
@pytest.mark.one_in(4)
def test_an_exception_leaves_no_slot_in_use(system: str, where: str) -> None:
    def fail(*_: Any) -> None:
        raise OnPurposeError

    setup, (chosen, options) = Setup("opt", "full", 2, clip=1.0), ON_HOST[system]
    asked = settings(recompute="full", accumulate=2, clip=1.0, device_memory=2_000_000, log_events=True)
    engine = start(chosen, setup.build(), asked, options)
    ours, losses, graphs = managed(engine), [], []
    model: Any = engine.module
    layer = model.model.decoder.layers[2]
    for batch in tokens(3, 2):
        engine.backward(one_loss(engine, batch[0]))
        handle = layer.fc1.register_forward_hook(fail) if where == "forward" else layer.fc1.weight.register_hook(fail)

        def attempt(ids: torch.Tensor = batch[1]) -> None:
            graphs.append(one_loss(engine, ids))  # kept: its handles outlive the step
            engine.backward(graphs[-1])

        with pytest.raises(OnPurposeError):
            attempt()
        handle.remove()
        assert ours.inputs._stack == [] and ours.inputs._leaving == []
        losses.append(one_step(engine, batch))
    assert_equal(reference(setup), finished(engine, losses))
    check_log(engine)
    assert ours.store.host.pool == ours.device.account.pool == 0


def one_loss(model: Any, ids: torch.Tensor) -> torch.Tensor:
    return model(input_ids=ids).logits.float().square().mean()


@pytest.mark.parametrize("stop", ["forward", "backward"])
def test_close_in_the_middle_of_a_step_leaves_nothing(stop: str) -> None:
    chosen, options = ON_HOST["patrickstar"]
    engine = start(chosen, Setup().build(), settings(recompute="full", accumulate=2), options)
    one_step(engine, tokens(1, 2)[0])
    loss = one_loss(engine, tokens(1, 1)[0, 0])
    if stop == "backward":
        engine.backward(loss)
    ours = managed(engine)
    maps = [weakref.ref(slot.mapping._map) for slot in ours.inputs._slots._all]
    assert len(maps) == 4
    engine.close()
    gc.collect()
    assert ours.store.host.live == ours.device.account.pool == 0
    assert [m for m in maps if m() is not None] == [], "a graph that is still around keeps no host memory"
    assert not any("forward" in module.__dict__ for module in engine.module.modules())


# ---- refusals


def test_a_host_without_room_is_told_before_the_first_step_ends() -> None:
    setup = Setup("opt", "full")
    chosen, options = ON_HOST["patrickstar"]
    plain = setup.run(chosen, budget_of(setup, "above"), PatrickStarOptions(run_ahead=False))
    short = (plain.memory.host_peak_bytes or 0) + INPUTS * 4 - 4096
    engine = start(chosen, setup.build(), settings(recompute="full", host_memory=short), options)
    with pytest.raises(BudgetError, match=r"`options=dict\(activations='host'\)` needs .* raise `host_memory`") as refusal:
        one_step(engine, tokens(1, 1)[0])
    assert refusal.value.tier == "host" and refusal.value.need == short + 4096 and refusal.value.have == short
    engine.close()
    assert managed(engine).store.host.live == 0


@pytest.mark.parametrize("recompute", ["none", (1, 2)])
def test_only_what_is_recomputed_is_moved(recompute: Any) -> None:
    chosen, options = ON_HOST["elixir"]
    asked = settings(recompute=recompute)
    if recompute == "none":
        with pytest.raises(UnsupportedError, match="no block is recomputed: use `recompute='full'`"):
            start(chosen, Setup().build(), asked, options)
        return
    run = train(start(chosen, Setup().build(), asked, options), tokens(3, 1))
    assert_equal(train(start(RESIDENT, Setup().build(), asked), tokens(3, 1)), run)
    assert run.per_step[-1]["activation_offload_bytes"] == 2 * INPUTS // 4 * 4 * 2


class EditsItsInput(Block):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = super().forward(x.clone())
        x.mul_(0.5)
        return out


def test_an_input_edited_in_place_is_refused() -> None:
    """Recomputation cannot start from it, with its copy on the host or without."""
    for system, options in (ON_HOST["elixir"], (elixir(), ElixirOptions())):
        torch.manual_seed(0)
        engine = start(system, Stack(EditsItsInput), settings(recompute=(1, 2)), options)
        with pytest.raises(RuntimeError, match="edited in place|modified by an inplace operation"):
            one_step(engine, tokens(1, 1)[0], squared_error)
        engine.close()


class Pairs(Stack):
    """A checkpoint around two blocks at a time: the blocks inside are no outer level."""

    reentrant = False

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x)
        for first, second in zip(self.blocks[::2], self.blocks[1::2], strict=True):
            x = checkpoint(lambda v, a=first, b=second: b(a(v)), x, use_reentrant=self.reentrant)
        return self.head(x)


@pytest.mark.parametrize("reentrant", [False, True])
def test_inside_another_checkpoint_nothing_is_touched(reentrant: bool) -> None:
    runs = []
    for system, options in ((RESIDENT, None), ON_HOST["random"]):
        torch.manual_seed(0)
        model = Pairs()
        model.reentrant = reentrant
        runs.append(train(start(system, model, settings(recompute="full"), options), tokens(3, 1), squared_error))
    assert_equal(*runs)
