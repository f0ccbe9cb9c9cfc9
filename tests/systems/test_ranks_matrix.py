"""Every strategy on every family of models, on 2, 3 and 4 ranks as threads, in half of the device memory that resident takes.

The oracle is resident on one rank that accumulates the micro-batches of all, bit for bit. Each run is looked through on every
rank: no race, no wait that could not end, the same collectives in the same order, bytes and peaks as the plan has them.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping, Sequence
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from systems.recipe.model.blocks import find_blocks
from tests.planning.races import find_races
from tests.systems.every import STRATEGIES
from tests.systems.pairwise import covered, rows_of
from tests.systems.running import RESIDENT, Run, assert_equal, elixir, managed
from tests.systems.test_ordering import as_issued, assert_sound
from tests.systems.test_ranks import EXACT, STEPS, assert_is_one_rank, on_one_rank, on_ranks
from tests.systems.test_shards import COLLECTIVE, LANES, Last, assert_as_planned, assert_bytes_as_planned, plan_of

MODELS = ("opt-tiny", "gpt-tiny", "bert-tiny", "t5-tiny", "albert-tiny", "pr-moe-tiny", "t5-moe-tiny")
SIZES = (2, 3, 4)
CLIP = 0.5
PAGE = 32 << 10  # bytes, for models of some megabytes


def half(model: str) -> int:
    """Of what resident takes alone, without the buffers in which it accumulates, with a rank's batch."""
    return (on_one_rank(model, 1, CLIP, "fp32").memory.device_peak_bytes or 0) // 2


def options_of(strategy: str) -> dict[str, Any]:
    return {"page": PAGE} if "page" in STRATEGIES[strategy].Options.model_fields else {}


def collectives(run: Run) -> list[str]:
    lanes = {lane.value for lane in COLLECTIVE}
    return [o.label for o in managed(run.engine).log.operations if o.lane in lanes]


def assert_alike(found: Sequence[Run]) -> None:
    """All ranks issued the same collectives, as lanes are queues in which each waits for the one before."""
    first = collectives(found[0])
    assert first, "void: no collective"
    for other in found[1:]:
        assert collectives(other) == first


def assert_as_it_should_be(found: Sequence[Run], last: Last) -> None:
    for rank, run in enumerate(found):
        log = managed(run.engine).log
        assert not find_races(as_issued(log.operations))
        assert_sound(managed(run.engine))
        assert_as_planned(run, last.counters[rank], [o.what for o in log.operations[last.issued[rank] :]])
        assert_bytes_as_planned(plan_of(run), log.bytes[last.bytes[rank] - 1 :])
    assert_alike(found)


FACTORS: Mapping[str, Any] = {"strategy": tuple(STRATEGIES), "model": MODELS, "size": SIZES}


@pytest.mark.parametrize(("strategy", "model", "size"), covered(FACTORS))
@pytest.mark.one_in(20)
def test_half_of_resident_s_memory_holds_the_bits_of_one_rank(strategy: str, model: str, size: int) -> None:
    last, budget = Last(), half(model)
    found = on_ranks(
        STRATEGIES[strategy],
        model,
        size,
        1,
        options_of(strategy),
        before=last.note,
        clip=CLIP,
        device_memory=budget,
        log_events=True,
    )
    assert_is_one_rank(on_one_rank(model, size, CLIP, "fp32"), found)
    assert_as_it_should_be(found, last)
    for run in found:
        assert run.counters["fallbacks"] == run.counters["departures"] == 0
        assert (run.memory.device_peak_bytes or 0) <= (plan_of(run).predicted_device_peak_bytes or 0) <= budget
        if strategy in EXACT:
            assert plan_of(run).predicted_device_peak_bytes == run.memory.device_peak_bytes


def shares(cache: int) -> dict[str, dict[str, Any]]:
    """[S, O, C] of Elixir, by the name of what it is then. cache: bytes."""
    return {
        "ddp": {"scatter": False, "offload": False},
        "zero-2": {"offload": False, "cache": "inf"},
        "zero-3": {"offload": False, "cache": cache},
        "zero-3 with a host": {"cache": cache},
    }


@pytest.mark.slow
@pytest.mark.parametrize(("share", "model", "size"), list(product(shares(0), MODELS, SIZES)))
def test_payloads_of_every_way_to_share_states(share: str, model: str, size: int) -> None:
    """A steady step's, to the byte: what passes the links is (R - 1) / R of each bundle, and the host's link has the rest."""
    last, expected = Last(), on_one_rank(model, size, CLIP, "fp32")
    values = 4 * sum(value.numel() for value in expected.parameters.values())
    options = shares(values // 2)[share]
    found = on_ranks(elixir(), model, size, 1, options, before=last.note, clip=CLIP, log_events=True)
    assert_is_one_rank(expected, found)
    assert_as_it_should_be(found, last)
    for rank, run in enumerate(found):
        whole = managed(run.engine).layout.param_bytes * (size - 1) // size
        moved = {counter: run.counters[counter] - last.counters[rank][counter] for counter in LANES.values()}
        assert moved["reduce_bytes"] == whole
        assert moved["gather_bytes"] == whole if share in ("ddp", "zero-2") else whole <= moved["gather_bytes"] <= 2 * whole
        assert (moved["h2d_bytes"] + moved["d2h_bytes"] > 0) == (share == "zero-3 with a host")
        assert plan_of(run).predicted_device_peak_bytes == run.memory.device_peak_bytes


Odd = Callable[[Any, int, int], None]
AT = 2  # steps: there is a plan by then


def overflows(engine: Any, rank: int, step: int) -> None:
    """On one rank and in one step a gradient is not finite."""
    hook: Any = None

    def infinite(gradient: torch.Tensor) -> torch.Tensor:
        hook.remove()
        return torch.full_like(gradient, torch.inf)

    if (rank, step) == (1, 1):
        *_, last = find_blocks(engine.module).values()
        hook = next(last.parameters()).register_hook(infinite)


def idles(engine: Any, rank: int, step: int) -> None:
    """A product's weight gets no gradient on one rank."""
    if (rank, step) == (1, AT):
        block = list(find_blocks(engine.module).values())[1]
        modules: list[Any] = [m for m in block.modules() if getattr(m, "weight", None) is not None]
        layer = next(m for m in modules if m.weight.dim() == 2)
        turned = isinstance(layer, nn.Linear)

        def forward(x: torch.Tensor) -> torch.Tensor:
            weight = layer.weight.detach()
            y: torch.Tensor = x @ (weight.T if turned else weight)
            return y if layer.bias is None else y + layer.bias

        layer.forward = forward


def goes_through(model: nn.Module, order: Callable[[list[nn.Module]], list[nn.Module]]) -> None:
    """From now on a model's loop over its (first) blocks, which keep their places and names."""

    class Blocks(nn.ModuleList):
        def __iter__(self) -> Iterator[nn.Module]:
            return iter(order(list(self._modules.values())))

    name, _, _ = next(iter(find_blocks(model))).rpartition(".")
    model.get_submodule(name).__class__ = Blocks


def skips(engine: Any, rank: int, step: int) -> None:
    """A block is left out on one rank."""
    if (rank, step) == (1, AT):
        goes_through(engine.module, lambda blocks: [blocks[0], *blocks[2:]])


def swaps(engine: Any, rank: int, step: int) -> None:
    """Two blocks have changed places on one rank."""
    if (rank, step) == (1, AT):
        goes_through(engine.module, lambda blocks: [blocks[0], blocks[2], blocks[1], *blocks[3:]])


ODD: Mapping[str, Odd] = {"overflow": overflows, "idle": idles, "skipped": skips, "swapped": swaps}
FIXED = {"albert-tiny"}  # it calls its groups by number


def possible(row: Mapping[str, Any]) -> bool:
    return row["odd"] in ("overflow", "idle") or row["model"] not in FIXED


@pytest.mark.slow
@pytest.mark.parametrize(
    ("odd", "strategy", "model", "size"),
    [
        tuple(row.values())
        for row in rows_of({"odd": tuple(ODD), "strategy": tuple(STRATEGIES), "model": MODELS, "size": SIZES[:2]})
        if possible(row)
    ],
)
def test_what_one_rank_does_alone(odd: str, strategy: str, model: str, size: int) -> None:
    """The bits of resident on the same ranks; or, of units in another order, that is told with both ranks' names."""
    given: dict[str, Any] = {"before": ODD[odd], "clip": CLIP}
    expected = on_ranks(RESIDENT, model, size, **given)
    usual = on_one_rank(model, size, CLIP, "fp32").parameters
    assert any(not torch.equal(usual[name], value) for name, value in expected[0].parameters.items()), "void: nothing is odd"
    try:
        found = on_ranks(
            STRATEGIES[strategy], model, size, 1, options_of(strategy), device_memory=half(model), log_events=True, **given
        )
    except RuntimeError as error:
        if odd != "swapped" or "rank 0" not in str(error) or "rank 1" not in str(error):
            raise
        return
    for one, other in zip(expected, found, strict=True):
        assert_equal(one, other)
        assert not find_races(as_issued(managed(other.engine).log.operations))
        assert other.skipped == [False, odd == "overflow", False]
        assert odd != "skipped" or other.counters["departures"] == STEPS - AT
    assert_alike(found)
