"""Ranks that share experts, as threads: bits of resident on the same ranks, which is all experts on one rank to 1e-5."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import pytest
import torch

from models import registry
from systems import checkpoint
from systems.errors import UnsupportedError
from systems.planning.layout import space_of
from systems.ranks.group_names import EXPERTS as EXPERT_GROUP
from systems.ranks.group_names import REPLICA
from systems.ranks.link import RanksDifferError
from systems.ranks.loopback import as_threads
from systems.ranks.ranks import Ranks
from systems.settings import AdamSettings
from tests.systems.every import RESIDENT, STRATEGIES
from tests.systems.experts import EXPERTS, VOCABULARY, on_ranks, toy, toy_loss
from tests.systems.models_small import tokens
from tests.systems.pairwise import covered
from tests.systems.running import AMPLE, Run, assert_equal, elixir, managed, settings
from tests.systems.test_ranks import EXACT, objective_loss
from tests.systems.test_ranks_matrix import assert_as_it_should_be, options_of
from tests.systems.test_shards import Last, plan_of

SHARED = ((2, 2), (4, 2), (4, 4))  # ranks, and how many share one set
CLIP = 0.5
PAGE = 4096  # bytes, for models of some kilobytes
EVERY = {"resident": RESIDENT, **STRATEGIES}


@cache
def resident(size: int, expert_ranks: int, accumulate: int, dtype: str, recompute: str, fixed: int | None = None) -> list[Run]:
    given: dict[str, Any] = {"clip": CLIP, "dtype": dtype, "recompute": recompute, "build": partial(toy, fixed=fixed)}
    return on_ranks(RESIDENT, size, expert_ranks, accumulate=accumulate, **given)


def small(strategy: str) -> dict[str, Any]:
    return {"page": PAGE} if options_of(strategy) else {}


def merged(found: Sequence[Run]) -> dict[str, torch.Tensor]:
    """Of all ranks. What several have is the same on each."""
    values: dict[str, torch.Tensor] = {}
    for run in found:
        for name, value in run.parameters.items():
            assert torch.equal(values.setdefault(name, value), value), name
    return values


# ---- against all experts on one rank


@pytest.mark.parametrize("system", EVERY)
@pytest.mark.one_in(5)
def test_experts_that_all_ranks_have_are_as_everything_else(system: str) -> None:
    (one,) = on_ranks(RESIDENT, 1, 1, accumulate=2, clip=CLIP)
    for run in on_ranks(EVERY[system], 2, 1, clip=CLIP):
        run.losses = one.losses
        assert_equal(one, run)
        assert not run.counters.get("exchange_bytes")


@pytest.mark.parametrize("fixed", [None, 1])
@pytest.mark.parametrize(("size", "expert_ranks"), SHARED)
@pytest.mark.one_in(3)
def test_shared_experts_are_all_of_one_rank(size: int, expert_ranks: int, fixed: int | None) -> None:
    """Its clipping too: each element counts once in the norm. fixed: all tokens go to that expert, and none to any other."""
    given: dict[str, Any] = {"clip": CLIP, "adam": AdamSettings(lr=1e-2), "build": partial(toy, fixed=fixed)}
    (one,) = on_ranks(RESIDENT, 1, 1, accumulate=size, **given)
    found = on_ranks(RESIDENT, size, expert_ranks, **given)
    values = merged(found)
    assert values.keys() == one.parameters.keys()
    for name, value in one.parameters.items():
        torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-5)
    for run in found:
        assert run.norms == pytest.approx(one.norms, rel=1e-5)
        assert run.norms == found[0].norms
    assert sum(run.losses[-1] for run in found) == pytest.approx(one.losses[-1], rel=1e-5)


# ---- strategies against resident on the same ranks

FACTORS = {
    "strategy": tuple(STRATEGIES),
    "shared": SHARED,
    "dtype": ("fp32", "bf16"),
    "recompute": ("none", "full"),
    "accumulate": (1, 2),
    "share": (1.0, 0.7),
}


def assert_is_resident(
    strategy: str, shared: tuple[int, int], dtype: str, recompute: str, accumulate: int, share: float, fixed: int | None = None
) -> list[Run]:
    """share: of resident's device memory."""
    size, expert_ranks = shared
    expected, last = resident(size, expert_ranks, accumulate, dtype, recompute, fixed), Last()
    budget = int(share * max(run.memory.device_peak_bytes or 0 for run in expected))
    given: dict[str, Any] = {"clip": CLIP, "dtype": dtype, "recompute": recompute, "accumulate": accumulate}
    given |= {"device_memory": budget, "log_events": True, "build": partial(toy, fixed=fixed)}
    found = on_ranks(STRATEGIES[strategy], size, expert_ranks, small(strategy), before=last.note, jitter=True, **given)
    for one, other in zip(expected, found, strict=True):
        assert_equal(one, other)
        peak, predicted = other.memory.device_peak_bytes or 0, plan_of(other).predicted_device_peak_bytes or 0
        assert peak <= predicted <= budget
        assert strategy not in EXACT or peak == predicted
        assert other.counters["exchange_bytes"] > 0
    assert_as_it_should_be(found, last)
    return found


@pytest.mark.parametrize(("strategy", "shared", "dtype", "recompute", "accumulate", "share"), covered(FACTORS))
@pytest.mark.one_in(16)
def test_every_strategy_has_resident_s_bits(
    strategy: str, shared: tuple[int, int], dtype: str, recompute: str, accumulate: int, share: float
) -> None:
    assert_is_resident(strategy, shared, dtype, recompute, accumulate, share)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("strategy", "shared", "dtype", "recompute"), list(product(STRATEGIES, SHARED, ("fp32", "bf16"), ("none", "full")))
)
def test_every_strategy_in_every_way(strategy: str, shared: tuple[int, int], dtype: str, recompute: str) -> None:
    assert_is_resident(strategy, shared, dtype, recompute, 1, 0.7)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(4)
def test_nobody_waits_where_all_tokens_go_to_one_expert(strategy: str) -> None:
    assert_is_resident(strategy, (4, 2), "fp32", "full", 1, 0.7, fixed=EXPERTS - 1)


def idling(expert_ranks: int, expert_rank: int, fixed: int) -> Any:
    model = toy(expert_ranks, expert_rank, fixed=fixed)
    for block in model.blocks:
        block.layer.idle = True  # type: ignore[union-attr]
    return model


@pytest.mark.parametrize("fixed", [0, EXPERTS - 1])
@pytest.mark.parametrize("shared", SHARED)
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(24)
def test_experts_that_never_run_stay_as_they_are(strategy: str, shared: tuple[int, int], fixed: int) -> None:
    """Where those of the same number on other ranks are trained, too: no update, no decay, no count."""
    build = partial(idling, fixed=fixed)
    expected = on_ranks(RESIDENT, *shared, build=build, clip=CLIP)
    found = on_ranks(STRATEGIES[strategy], *shared, small(strategy), build=build, clip=CLIP)
    for one, other in zip(expected, found, strict=True):
        assert_equal(one, other)
    values = merged(expected)
    for name, first in toy().named_parameters():
        number = name.partition(".experts.")[2].partition(".")[0]
        assert torch.equal(values[name], first) == (number not in ("", str(fixed))), name


def spoil(engine: Any, rank: int, step: int) -> None:
    """The second step's output of one expert that rank 1 has."""
    if (rank, step) == (1, 1):
        expert = engine.module.blocks[1].layer.experts["2"]
        forward = expert.forward

        def once(x: torch.Tensor) -> torch.Tensor:
            expert.forward = forward
            return forward(x) * torch.inf

        expert.forward = once


@pytest.mark.parametrize("dtype", ["fp32", "fp16"])
@pytest.mark.parametrize("system", EVERY)
@pytest.mark.one_in(10)
def test_all_ranks_skip_what_one_expert_of_one_rank_spoils(system: str, dtype: str) -> None:
    options = small(system) if system in STRATEGIES else {}
    found = on_ranks(EVERY[system], 4, 2, options, clip=CLIP, dtype=dtype, before=spoil)
    expected = on_ranks(RESIDENT, 4, 2, clip=CLIP, dtype=dtype, before=spoil)
    for one, other in zip(expected, found, strict=True):
        assert other.skipped[1] and other.skipped == found[0].skipped
        one.losses = other.losses
        assert_equal(one, other)
    merged(found)


@cache
def mixtures(strategy: str | None, size: int, expert_ranks: int, budget: int | None = None) -> list[Run]:
    """Of pr-moe-tiny, with the first values of the registry. strategy: None is resident."""
    given: dict[str, Any] = {"clip": CLIP, "dtype": "fp32", "loss": partial(objective_loss, mixture(1, 0))}
    given |= {"build": lambda shared, which: registry.build(mixture(shared, which)), "device_memory": budget or AMPLE}
    given["initial_weights"] = registry.initial_weights(mixture(1, 0), 0)
    if strategy is None:
        return on_ranks(RESIDENT, size, expert_ranks, **given)
    return on_ranks(STRATEGIES[strategy], size, expert_ranks, options_of(strategy), **given)


def mixture(expert_ranks: int, expert_rank: int) -> Any:
    return replace(registry.resolve("pr-moe-tiny"), expert_ranks=expert_ranks, expert_rank=expert_rank)  # type: ignore[call-arg]


@pytest.mark.slow
@pytest.mark.parametrize(("size", "expert_ranks"), [(2, 1), (2, 2), (4, 2), (4, 4)])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_pr_moe_in_half_of_resident_s_memory(strategy: str, size: int, expert_ranks: int) -> None:
    """Of one rank's that has all experts."""
    expected = mixtures(None, size, expert_ranks)
    budget = (mixtures(None, size, 1)[0].memory.device_peak_bytes or 0) // 2
    for one, other in zip(expected, mixtures(strategy, size, expert_ranks, budget), strict=True):
        assert_equal(one, other)
        assert (other.memory.device_peak_bytes or 0) <= (plan_of(other).predicted_device_peak_bytes or 0) <= budget


@pytest.mark.slow
@pytest.mark.parametrize(("size", "expert_ranks"), [(2, 2), (4, 2)])
def test_pr_moe_is_that_of_one_rank(size: int, expert_ranks: int) -> None:
    whole, shared = mixtures(None, size, 1), mixtures(None, size, expert_ranks)
    assert shared[0].norms == pytest.approx(whole[0].norms, rel=1e-5)
    values = merged(shared)
    for name, value in whole[0].parameters.items():
        torch.testing.assert_close(values[name], value, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    "options",
    [{"scatter": False, "offload": False}, {"offload": False, "cache": "inf"}, {"nonfinite": "stop"}, {"run_ahead": False}],
)
@pytest.mark.one_in(4)
def test_elixir_s_ways_to_share_states(options: dict[str, Any]) -> None:
    clip = 0.0 if "nonfinite" in options else CLIP
    expected = on_ranks(RESIDENT, 4, 2, clip=clip)
    for one, other in zip(expected, on_ranks(elixir(), 4, 2, options, clip=clip), strict=True):
        assert_equal(one, other)


def test_only_a_part_of_the_ranks_holds_an_expert() -> None:
    """So its segments are cut for them, and what passes the link is its group's part."""
    for run in on_ranks(elixir(), 4, 2, log_events=True):
        layout, index = managed(run.engine).layout, managed(run.engine).index
        for bundle in layout.bundles:
            space = space_of(layout, bundle.index)
            held = {p.parameter for s in bundle.segments for p in layout.segments[s].placements}
            experts = {index.parameters[number].group == REPLICA for number in held}
            assert experts == {space.group == REPLICA}
            assert space.ranks == (2 if space.group == REPLICA else 4)


# ---- values by name


def states(engine: Any) -> dict[str, list[torch.Tensor]]:
    state = engine.training_state()
    return {
        each.name: [state.read(number, part) for part in ("value", *state.moments)]
        for number, each in enumerate(state.parameters)
    }


def with_engines(system: Any, size: int, expert_ranks: int, work: Callable[[Any, int], Any], **given: Any) -> list[Any]:
    models = [toy(expert_ranks, rank % expert_ranks) for rank in range(size)]
    asked = settings(ranks=size, expert_ranks=expert_ranks, clip=CLIP, accumulate=4 // size, **given)

    def run(ranks: Ranks) -> Any:
        torch.set_num_threads(1)
        engine = system.initialize(models[ranks.rank], asked, system.Options(), ranks=ranks)
        found = work(engine, ranks.rank)
        engine.drain()
        engine.close()
        return found

    return as_threads(size, run)


def steps(engine: Any, rank: int, size: int, first: int, last: int) -> None:
    for batch in (tokens(last, 4) % VOCABULARY)[first:]:
        for micro in batch[rank::size]:
            engine.backward(toy_loss(engine, micro, 4 * micro[:, 1:].numel()))
        engine.step()


def assert_same(one: dict[str, list[torch.Tensor]], other: dict[str, list[torch.Tensor]]) -> None:
    assert one.keys() == other.keys()
    assert all(torch.equal(a, b) for name in one for a, b in zip(one[name], other[name], strict=True))


@pytest.mark.filterwarnings("ignore:the checkpoint in")
@pytest.mark.parametrize(("saved_by", "loaded_by"), [("elixir", "resident"), ("resident", "patrickstar"), ("h3t", "angel-ptm")])
@pytest.mark.one_in(3)
def test_checkpoints_move_between_degrees(saved_by: str, loaded_by: str, tmp_path: Path) -> None:
    """Bit for bit; and a run goes on from one as if there had been none."""

    def save(engine: Any, rank: int) -> Any:
        steps(engine, rank, 2, 0, 2)
        checkpoint.save(engine, tmp_path / "kept")
        kept = states(engine)
        steps(engine, rank, 2, 2, 3)
        return kept, states(engine)

    def go_on(engine: Any, rank: int) -> Any:
        checkpoint.load(engine, tmp_path / "kept")
        steps(engine, rank, 2, 2, 3)
        return states(engine)

    def load(engine: Any, rank: int) -> Any:
        checkpoint.load(engine, tmp_path / "kept")
        checkpoint.save(engine, tmp_path / f"again-{engine.ranks.size}-{engine.ranks.expert_ranks}")
        state = engine.training_state()
        state.meet()
        return states(engine), [state.updates(number) for number in range(len(state.parameters))]

    (kept, later), (other, _) = with_engines(EVERY[saved_by], 2, 2, save)
    assert_same(kept, other)
    assert_same(with_engines(EVERY[loaded_by], 2, 2, go_on)[0], later)
    for size, expert_ranks in ((1, 1), (4, 2), (4, 4)):
        for found, updates in with_engines(EVERY[loaded_by], size, expert_ranks, load):
            assert_same(found, kept)
            assert set(updates) == {2}
        again = checkpoint.manifest.read_manifest(tmp_path / f"again-{size}-{expert_ranks}")
        assert again.parameters.keys() == kept.keys()
        assert {entry.updates for entry in again.parameters.values()} == {2}


@pytest.mark.parametrize("system", ["resident", "elixir"])
def test_what_leaves_an_engine_is_whole(system: str) -> None:
    """A state dict has all experts; summon, as close, a rank's own. What is edited of one is its first owner's."""

    def work(engine: Any, rank: int) -> Any:
        steps(engine, rank, 4, 0, 1)
        exported = engine.state_dict(dtype="fp32")
        with engine.summon() as values:
            assert all(torch.equal(values[name], exported[name]) for name in values)
        with engine.summon(write=True) as values:
            for value in values.values():
                value.fill_(rank)
        with pytest.raises(UnsupportedError, match="save_pretrained: with `expert_ranks=2` no rank has all experts"):
            engine.save_pretrained("nowhere")
        return exported, engine.state_dict(dtype="fp32")

    names = toy().state_dict().keys()
    for exported, edited in with_engines(EVERY[system], 4, 2, work):
        assert exported.keys() == names
        for name, value in edited.items():
            of_second = any(f".experts.{number}." in name for number in range(EXPERTS // 2, EXPERTS))
            assert torch.equal(value, torch.full_like(value, 1.0 if of_second else 0.0)), name


# ---- what is refused


def begun(build: Callable[[int], Any], expert_ranks: int = 2, size: int = 2) -> None:
    asked = settings(ranks=size, expert_ranks=expert_ranks)
    models = [build(rank) for rank in range(size)]

    def work(ranks: Ranks) -> None:
        elixir().initialize(models[ranks.rank], asked, elixir().Options(), ranks=ranks).close()

    as_threads(size, work)


def other_values(rank: int) -> Any:
    """Of an expert of rank 3, whose copy rank 1 has."""
    model = toy(2, rank % 2)
    if rank == 3:
        with torch.no_grad():
            model.get_parameter("blocks.1.layer.experts.2.up.bias")[0] += 1
    return model


def without_exchange(rank: int) -> Any:
    """One layer of one rank, whose exchange has another name."""
    model = toy(2, rank % 2)
    if rank == 1:
        layer: Any = model.blocks[1].layer
        layer.swap = layer.__dict__.pop("exchange")
    return model


def other_names(rank: int) -> Any:
    """Of rank 3's experts, which rank 1 has too."""
    model = toy(2, rank % 2)
    if rank == 3:
        layer: Any = model.blocks[0].layer
        layer.experts = torch.nn.ModuleDict({f"1{number}": expert for number, expert in layer.experts.items()})
    return model


def tied_to_dense(rank: int) -> Any:
    model: Any = toy(2, rank)
    model.blocks[1].dense.bias = model.blocks[0].layer.experts[str(2 * rank)].down.bias
    return model


@pytest.mark.parametrize(
    ("build", "size", "told"),
    [
        (lambda rank: toy(2, 0), 2, r"both have an expert's parameter blocks\.0\.layer\.experts\.0\.up\.weight"),
        (lambda rank: toy(1, 0), 2, r"both have an expert's parameter blocks\.0\.layer\.experts\.0\.up\.weight"),
        (lambda rank: toy(4, 0) if rank else toy(2, 0), 2, "ranks 0 and 1 do not plan alike: layout is"),
        (other_values, 4, r"first values of blocks\.1\.layer\.experts\.2\.up\.bias are not the same on ranks 1 and 3"),
        (lambda rank: torch.nn.Linear(2, 2), 2, "no module of the model says data_parallel = 'replica'"),
        (other_names, 4, r"parameter blocks\.0\..*\.2\.up\.weight of rank 1 is .*\.12\.up\.weight on rank 3: give both"),
        (tied_to_dense, 2, r"module blocks\.1\.dense has a parameter of an expert's .* and is no expert"),
        (
            without_exchange,
            2,
            r"rank 1: blocks\.1\.layer\.experts\.2\.up\.weight is an expert's .* no module around it has",
        ),
        (lambda rank: toy(2, rank % 2), 3, "`expert_ranks` is 2, which does not divide the number of ranks, 3"),
    ],
)
def test_models_that_do_not_fit_are_refused(build: Callable[[int], Any], size: int, told: str) -> None:
    with pytest.raises(UnsupportedError, match=told):
        begun(build, size=size)


def test_a_rank_that_leaves_a_layer_out_is_told() -> None:
    def before(engine: Any, rank: int, step: int) -> None:
        if (rank, step) == (1, 2):
            engine.module.blocks[1].layer.forward = lambda hidden: hidden * 1.0

    with pytest.raises(RanksDifferError, match=r"rank 0 at 'dispatch of blocks\.1\.layer, .*; rank 1 at 'backward of combine"):
        on_ranks(RESIDENT, 2, 2, before=before)


@pytest.mark.parametrize("system", ["resident", "elixir"])
def test_what_ranks_swap_is_compared_once_a_step(system: str) -> None:
    """By those that share experts: NCCL itself compares nothing."""

    def before(engine: Any, rank: int, step: int) -> None:
        if (rank, step) == (3, 1):
            engine.ranks.group(EXPERT_GROUP).link.issue("a layer that is only here")

    with pytest.raises(
        RuntimeError, match="rank 2 and rank 3, which share experts, did not send each other the same layers' tok"
    ):
        on_ranks(EVERY[system], 4, 2, before=before)
