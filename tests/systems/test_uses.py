"""`systems.uses`: a module is said to read what others own before there is an engine, be it that no operation would show it."""

from __future__ import annotations

import copy
import gc
import math
import random
from collections.abc import Sequence
from typing import Any

import hypothesis
import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

import systems
from systems.errors import UnsupportedError
from systems.planning.layout import ModelIndex
from systems.prediction.meta_step import observe
from systems.ranks.loopback import as_threads
from systems.ranks.ranks import Ranks
from systems.recipe.model.units import find_units
from tests.systems.every import MANAGED, STRATEGIES, SYSTEMS
from tests.systems.models_plain import DIM, Block, Stack, features, squared_error
from tests.systems.models_small import tokens
from tests.systems.running import RANDOM, RESIDENT, Run, assert_equal, evict_at_once, finished, settings, start, train
from tests.systems.test_reads import built, reference

STEPS = 4
AT_WORK = r"call systems\.uses before initialize, or after close\(\)"


class ByAddress(torch.autograd.Function):
    """x times one and a bit more for each element of the weight's first row, which is read as a user's kernel reads it."""

    @staticmethod
    def forward(ctx: Any, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:
        ctx.x, ctx.weight = x, weight
        return x * factor(weight)

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor | None]:
        (gradient,), of_weight = gradients, None
        if ctx.needs_input_grad[1]:
            of_weight = torch.zeros(ctx.weight.shape)
            of_weight.view(len(of_weight), -1)[0] = 0.01 * (gradient * ctx.x).sum()
        return gradient * factor(ctx.weight), of_weight


def factor(weight: torch.Tensor) -> float:
    return 1 + 0.01 * float(weight.detach().numpy().reshape(len(weight), -1)[0].sum())


class Reading(nn.Module):
    """Owns nothing, and takes the weights that it reads from where nobody looks for them."""

    def __init__(self) -> None:
        super().__init__()
        self.weights: tuple[nn.Parameter, ...] = ()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for weight in self.weights:
            x = ByAddress.apply(x, weight)
        return x


class ReadingBlock(Block):
    def __init__(self) -> None:
        super().__init__()
        self.reading = Reading()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.reading(super().forward(x))


class Around(nn.Module):
    """Owns nothing itself, is around what does, and reads for it."""

    def __init__(self) -> None:
        super().__init__()
        self.within, self.reading = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM)), Reading()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.reading.forward(self.within(x))


class Readers(Stack):
    def __init__(self) -> None:
        super().__init__(ReadingBlock)
        self.around, self.reading, self.own = Around(), Reading(), nn.Parameter(torch.ones(DIM))
        self.plain, self.mine = Reading(), Reading()
        self.blocks[1].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.plain(self.around(x.to(self.own.dtype) * self.own))
        return self.reading(Reading.forward(self.mine, super().forward(x)))


READERS = ("around", "blocks.0.reading", "blocks.2", "blocks.3.reading", "mine", "plain", "reading")
READ = ("around.within.0.weight", "blocks.0.up.weight", "blocks.1.down.weight", "blocks.3.norm.bias", "head.weight", "own")
Pairs = Sequence[tuple[str, str]]  # who reads what


def model_that_reads(pairs: Pairs, *, said: bool = True) -> Readers:
    """Said of the module whose forward it is: that of `mine` is the root's, that of `around` its own."""
    torch.manual_seed(0)
    model = Readers()
    for reader in dict.fromkeys(reader for reader, _ in pairs):
        module = model.get_submodule(reader)
        weights = tuple(model.get_parameter(name) for who, name in pairs if who == reader)
        reading: Any = module if isinstance(module, Reading) else module.reading
        reading.weights = (*reading.weights, *weights)
        if said:
            systems.uses(model if reader == "mine" else module, *weights)
    return model


def drawn(seed: object) -> Pairs:
    luck = random.Random(f"uses {seed}")
    return sorted({(luck.choice(READERS), luck.choice(READ)) for _ in range(luck.choice((1, 2, 4, 8)))})


def trained(system: Any, pairs: Pairs, *, evicting: bool = False, **given: Any) -> Run:
    accumulate = given.get("accumulate", 1)
    engine = start(system, model_that_reads(pairs), settings(**({"clip": 1.0} | given)))
    if evicting:
        evict_at_once(engine)
    return train(engine, tokens(STEPS, accumulate), squared_error)


@pytest.mark.parametrize("seed", range(3))
@pytest.mark.parametrize("system", MANAGED)
@pytest.mark.one_in(8)
def test_what_is_said_is_there_though_nothing_shows_it(system: str, seed: int) -> None:
    pairs = drawn((system, seed))
    given: dict[str, Any] = {"accumulate": 1 + seed % 2, "recompute": "full" if seed else "none"}
    expected = trained(RESIDENT, pairs, **given)
    assert_equal(expected, trained(MANAGED[system], pairs, **given))
    budget = int(0.8 * (expected.memory.device_peak_bytes or 0))
    tight = trained(MANAGED[system], pairs, evicting=system == "random", device_memory=budget, **given)
    assert_equal(expected, tight)
    assert all(math.isfinite(loss) for loss in expected.losses)


@hypothesis.settings(max_examples=12, deadline=None)
@given(seed=st.integers(0, 10_000))
def test_nothing_said_is_used_after_its_release(seed: int) -> None:
    pairs = drawn(seed)
    assert_equal(trained(RESIDENT, pairs), trained(RANDOM, pairs, evicting=True))


def test_what_is_not_said_and_does_not_show_is_not_there() -> None:
    """So the tests above would fail without it."""
    engine = start(RANDOM, model_that_reads([("plain", "head.weight")], said=False), settings())
    evict_at_once(engine)
    with engine:
        assert math.isnan(squared_error(engine, tokens(1, 1)[0, 0], 1).item())


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(3)
def test_it_is_planned_from_the_first_step_on(strategy: str) -> None:
    pairs = [("plain", "head.weight"), ("mine", "blocks.0.up.weight"), ("around", "own")]
    expected = trained(RESIDENT, pairs)
    run = trained(STRATEGIES[strategy], pairs, device_memory=int(0.8 * (expected.memory.device_peak_bytes or 0)))
    assert_equal(expected, run)
    assert run.counters["fallbacks"] == 0
    alone = trained(STRATEGIES[strategy], [], device_memory=int(0.8 * (expected.memory.device_peak_bytes or 0)))
    assert run.counters["steps_without_plan"] == alone.counters["steps_without_plan"] < STEPS
    assert all(step["on_demand_fetches"] == 0 for step in run.per_step[run.counters["steps_without_plan"] :])


class Penalty(nn.Module):
    def forward(self, weights: Sequence[torch.Tensor]) -> torch.Tensor:
        return torch.stack([weight.square().sum() for weight in weights]).sum()


class Penalised(Stack):
    """All its weights are penalised, by a module that owns none, or by the root, which owns none either."""

    def __init__(self, by: str) -> None:
        super().__init__()
        self.penalty = Penalty()
        systems.uses(self.penalty if by == "a module" else self, *self.parameters())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(x) + 0.001 * self.penalty(list(self.parameters()))


@pytest.mark.parametrize("by", ["a module", "the root"])
@pytest.mark.parametrize("system", MANAGED)
@pytest.mark.one_in(2)
def test_all_weights_may_be_another_module_s(system: str, by: str) -> None:
    """So that none is a block's alone."""

    def run(chosen: Any, **given: Any) -> Run:
        torch.manual_seed(0)
        return train(start(chosen, Penalised(by), settings(clip=1.0, **given)), tokens(STEPS, 1), squared_error)

    expected = run(RESIDENT)
    found = run(MANAGED[system], device_memory=int(0.8 * (expected.memory.device_peak_bytes or 0)))
    assert_equal(expected, found)
    if system != "random":
        assert found.counters["fallbacks"] == 0


@pytest.mark.parametrize("system", MANAGED)
def test_what_is_said_need_not_be_found(system: str) -> None:
    """Of a root that owns nothing; unsaid it takes a step more: test_reads.py."""
    model = built("tied-by-hand")
    systems.uses(model, model.stem.weight, model.blocks[0].up.weight)  # type: ignore[union-attr,arg-type,index]
    expected = reference("tied-by-hand")
    budget = int(0.8 * (expected.memory.device_peak_bytes or 0))
    engine = start(MANAGED[system], model, settings(clip=1.0, device_memory=budget))
    before = engine.layout.bundles  # type: ignore[attr-defined]
    assert_equal(expected, train(engine, tokens(3, 1), squared_error))
    assert engine.layout.bundles == before  # type: ignore[attr-defined]


# ---- several ranks


def on_two_ranks(system: Any, said: Sequence[Pairs], expected: Run | None = None) -> list[Run]:
    models, batches = [model_that_reads(pairs) for pairs in said], tokens(STEPS, 2)

    def work(ranks: Ranks) -> Run:
        torch.set_num_threads(1)
        engine = system.initialize(models[ranks.rank], settings(ranks=2, clip=1.0), system.Options(), ranks=ranks)
        for batch in batches:
            engine.backward(squared_error(engine, batch[ranks.rank], batch[:, :, 1:].numel()))
            engine.step()
        return finished(engine, [] if expected is None else expected.losses)

    return as_threads(2, work)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(2)
def test_two_ranks_that_say_the_same_have_the_bits_of_one(strategy: str) -> None:
    pairs = drawn(("ranks", strategy))
    expected = trained(RESIDENT, pairs, accumulate=2)
    for run in on_two_ranks(STRATEGIES[strategy], [pairs, pairs], expected):
        assert_equal(expected, run)


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_one_rank_alone_says_is_refused_in_words(system: str) -> None:
    with pytest.raises(UnsupportedError, match=r"uses is \[\] on rank 0 and \['plain uses own'\] on rank 1: give all ranks"):
        on_two_ranks(SYSTEMS[system], [[], [("plain", "own")]])


# ---- what is said


def users(index: ModelIndex, name: str) -> tuple[str, ...]:
    return next(parameter.users for parameter in index.parameters if parameter.name == name)


def test_a_module_in_a_block_reads_for_the_block_and_others_for_themselves() -> None:
    model = model_that_reads([(reader, "head.weight") for reader in READERS])
    blocks = {f"blocks.{number}" for number in (0, 2, 3)}
    assert set(users(find_units(model).index, "head.weight")) == {"<root>", "around", "plain", "reading", "head", *blocks}


def test_a_second_call_says_it_anew_and_a_copy_of_the_model_says_it_too() -> None:
    model = model_that_reads([("plain", "head.weight"), ("plain", "own")])
    assert users(find_units(model).index, "own") == ("<root>", "plain")
    copied = copy.deepcopy(model)
    systems.uses(model.plain, model.head.bias)
    assert users(find_units(model).index, "own") == ("<root>",) and users(find_units(model).index, "head.bias")[-1] == "plain"
    systems.uses(model.plain)
    assert users(find_units(model).index, "head.bias") == ("head",)
    assert users(find_units(copied).index, "own") == ("<root>", "plain")


def test_a_forecast_knows_of_it() -> None:
    class Penalty(nn.Module):
        def forward(self, weight: torch.Tensor) -> torch.Tensor:
            return weight.square().sum()

    class Penalised(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.table, self.head, self.penalty = nn.Embedding(9, 4), nn.Linear(4, 9), Penalty()

        def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
            return self.head(self.table(input_ids)).sum() + self.penalty(self.table.weight)

    model = Penalised()
    systems.uses(model.penalty, model.table.weight)
    index, work = observe(
        model, lambda call, batch, count: call(**batch), batch_size=1, seq_len=4, dtype=torch.float32, recompute="none"
    )
    assert users(index, "table.weight") == ("table", "penalty")
    assert {unit.name for unit in index.units if unit.index in {number for _, number in work.events}} >= {"table", "penalty"}


def test_what_cannot_be_said_is_refused_in_words() -> None:
    model = Readers()
    with pytest.raises(ValueError, match=r"^str has no forward: give the torch.nn.Module whose forward reads"):
        systems.uses("plain", model.own)  # type: ignore[arg-type]
    with pytest.raises(ValueError, match=r"^module ModuleList has no forward"):
        systems.uses(model.blocks, model.own)
    with pytest.raises(ValueError, match=r"^module Reading is to use Tensor: give the Parameters themselves"):
        systems.uses(model.plain, model.own.detach())


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_parameter_or_a_module_of_another_model_is_refused_in_words(system: str) -> None:
    model, other, loss = Readers(), nn.Linear(3, 5), Reading()
    systems.uses(model.plain, model.own, other.weight)
    with pytest.raises(UnsupportedError, match=r"module plain is said to use a parameter of shape \(5, 3\) that this"):
        start(SYSTEMS[system], model, settings())
    systems.uses(model.plain, model.own)
    systems.uses(loss, model.head.weight)
    with pytest.raises(UnsupportedError, match=r"module Reading is said to use parameter head\.weight, and is no module"):
        start(SYSTEMS[system], model, settings())
    systems.uses(loss)
    start(SYSTEMS[system], model, settings()).close()


def test_what_is_gone_says_nothing() -> None:
    model = Readers()
    systems.uses(Reading(), model.head.weight)
    gc.collect()
    assert find_units(model)


def test_parameters_that_were_made_anew_are_to_be_said_anew() -> None:
    with torch.device("meta"):
        model = Readers()
    systems.uses(model.plain, model.own)
    model.to_empty(device="cpu")
    with pytest.raises(UnsupportedError, match=r"module plain .* not any more: call systems\.uses anew once"):
        find_units(model)
    systems.uses(model.plain, model.own)
    assert users(find_units(model).index, "own") == ("<root>", "plain")


@pytest.mark.parametrize("system", SYSTEMS)
def test_it_is_too_late_while_an_engine_has_the_model(system: str) -> None:
    model = model_that_reads([("plain", "own")])
    with start(SYSTEMS[system], model, settings()) as engine:
        with pytest.raises(UnsupportedError, match=AT_WORK):
            systems.uses(model.reading, model.head.weight)
        with pytest.raises(UnsupportedError, match=AT_WORK):
            systems.uses(model.head)
        squared_error(engine, tokens(1, 1)[0, 0], 1)
    systems.uses(model.reading, model.head.weight)
    with start(SYSTEMS[system], model, settings()) as engine:
        assert users(engine.index, "own")[-1] == "plain" if system != "resident" else True  # type: ignore[attr-defined]
        assert model(features(tokens(1, 1)[0, 0])).isfinite().all()
