"""Several ranks, as threads: the bits of one rank that accumulates all ranks' micro-batches (the oracle)."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest
import torch

from systems.ranks.loopback import as_threads
from systems.ranks.ranks import Ranks
from tests.systems import models_small
from tests.systems.models_plain import CASES
from tests.systems.models_plain import build as build_plain
from tests.systems.models_small import next_token_loss, tokens
from tests.systems.running import RESIDENT, Run, assert_equal, elixir, finished, one_step, settings, start

STEPS = 3
MODELS = ("opt", "gpt2", "stack")


def make(model: str) -> Any:
    return build_plain(model) if model in CASES else models_small.build(model)


def loss_of(model: str) -> Any:
    return CASES[model].loss if model in CASES else next_token_loss


@cache
def on_one_rank(model: str, micro_batches: int, clip: float, dtype: str) -> Run:
    engine = start(RESIDENT, make(model), settings(accumulate=micro_batches, clip=clip, dtype=dtype))
    batches = tokens(STEPS, micro_batches)
    return finished(engine, [one_step(engine, batch, loss_of(model)) for batch in batches])


def on_ranks(system: Any, model: str, size: int, accumulate: int, **given: Any) -> list[Run]:
    """Micro-batch m of rank r is the one-rank run's number m x size + r: gradients are added in that order."""
    batches = tokens(STEPS, size * accumulate)
    count = batches[0, :, :, 1:].numel()
    loss, models = loss_of(model), [make(model) for _ in range(size)]  # threads share torch's generator

    def work(ranks: Ranks) -> Run:
        asked = settings(ranks=size, accumulate=accumulate, **given)
        engine = system.initialize(models[ranks.rank], asked, system.Options(), ranks=ranks)
        losses = []
        for batch in batches:
            mine, total = batch[ranks.rank :: size], 0.0
            for micro in mine:
                value = loss(engine, micro, count)
                engine.backward(value)
                total += value.item()
            engine.step()
            losses.append(total)
        return finished(engine, losses)

    return as_threads(size, work)


def assert_is_one_rank(expected: Run, found: list[Run]) -> None:
    """Losses are each rank's part of the global one."""
    for mine in found:
        mine.losses = expected.losses
        assert_equal(expected, mine)


@pytest.mark.parametrize(("model", "size"), [("opt", 2), ("gpt2", 3), ("stack", 2), ("stack", 4)])
def test_resident_on_ranks_is_one_rank_that_accumulates(model: str, size: int) -> None:
    found = on_ranks(RESIDENT, model, size, 1, clip=0.5)
    assert_is_one_rank(on_one_rank(model, size, 0.5, "fp32"), found)


def test_micro_batches_are_summed_over_ranks_first() -> None:
    """Then the bits are not those of one rank, which adds all in one row, but close; and all ranks have the same."""
    expected, found = on_one_rank("stack", 4, 0.0, "fp32"), on_ranks(RESIDENT, "stack", 2, 2)
    for name, value in expected.parameters.items():
        torch.testing.assert_close(found[0].parameters[name], value, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(value, found[1].parameters[name]) for name, value in found[0].parameters.items())
    assert found[0].norms == found[1].norms


@pytest.mark.parametrize(("model", "size"), [("opt", 2), ("gpt2", 3), ("stack", 2)])
def test_elixir_on_ranks_is_one_rank_that_accumulates(model: str, size: int) -> None:
    budget = int(0.6 * (on_one_rank(model, size, 0.5, "fp32").memory.device_peak_bytes or 0))
    found = on_ranks(elixir(), model, size, 1, clip=0.5, device_memory=budget, log_events=True)
    assert_is_one_rank(on_one_rank(model, size, 0.5, "fp32"), found)
