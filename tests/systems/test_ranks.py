"""Several ranks, as threads: the bits of one rank that accumulates all ranks' micro-batches (the oracle)."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from functools import cache, partial
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn

from models import registry as models_registry
from models.loss import token_loss
from models.objective import OBJECTIVES
from models.shape import ModelShape
from systems.device.emulated import EmulatedDevice
from systems.errors import UnsupportedError
from systems.ranks.loopback import as_threads
from systems.ranks.ranks import Ranks
from systems.settings import Settings
from tests.planning.races import find_races
from tests.systems import models_small
from tests.systems.every import STRATEGIES
from tests.systems.models_plain import CASES
from tests.systems.models_plain import build as build_plain
from tests.systems.models_small import next_token_loss, tokens
from tests.systems.running import AMPLE, RESIDENT, Run, assert_equal, elixir, finished, managed, one_step, settings, start
from tests.systems.test_ordering import as_issued, sleeps

STEPS = 3
REAL = {*models_registry.names()} - {"gpt2"}  # of the registry, with its first values; gpt2 is the tests' own small one
EXACT = ("angel-ptm", "elixir")  # whose predicted device peak is the measured one, on one rank too
Change = Callable[[Any, int, int], None]  # of a rank's model before a step


def make(model: str) -> Any:
    """By a name of the tests', or of the registry of models."""
    if model in REAL:
        return models_registry.build(models_registry.resolve(model))
    return build_plain(model) if model in CASES else models_small.build(model)


def loss_of(model: str) -> Any:
    if model in REAL:
        return partial(objective_loss, models_registry.resolve(model))
    return CASES[model].loss if model in CASES else next_token_loss


def objective_loss(shape: ModelShape, model: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
    """ids: windows of text, out of which the shape's objective makes its examples."""
    examples = OBJECTIVES[shape.objective].examples(ids, keys=range(len(ids)), vocab_size=shape.vocab_size)
    return token_loss(model, examples, count, objective=shape.objective)


def asked_of(model: str, **given: Any) -> Settings:
    """Settings, with the first values of a model that is built without memory."""
    if model in REAL:
        given["initial_weights"] = models_registry.initial_weights(models_registry.resolve(model), 0)
    return settings(**given)


@cache
def on_one_rank(model: str, micro_batches: int, clip: float, dtype: str) -> Run:
    engine = start(RESIDENT, make(model), asked_of(model, accumulate=micro_batches, clip=clip, dtype=dtype))
    batches = tokens(STEPS, micro_batches)
    return finished(engine, [one_step(engine, batch, loss_of(model)) for batch in batches])


def on_ranks(
    system: Any,
    model: str,
    size: int,
    accumulate: int = 1,
    options: dict[str, Any] | None = None,
    *,
    jitter: bool = False,
    before: Change | None = None,
    **given: Any,
) -> list[Run]:
    """Micro-batch m of rank r is the one-rank run's number m x size + r: gradients are added in that order.

    before: called with a rank's engine, its number and a step's before that step.
    """
    models = [make(model) for _ in range(size)]  # threads share torch's generator
    asked = asked_of(model, ranks=size, accumulate=accumulate, **given)
    batches = tokens(STEPS, size * accumulate)
    return trained_together(system, models, asked, options, batches, loss_of(model), jitter=jitter, before=before)


def trained_together(
    system: Any,
    models: Sequence[nn.Module],
    asked: Settings,
    options: dict[str, Any] | None,
    batches: torch.Tensor,
    loss: Callable[..., torch.Tensor],
    *,
    jitter: bool = False,
    before: Change | None = None,
) -> list[Run]:
    """As many ranks as models, each with its share of the micro-batches of a step. before: as in `on_ranks`."""
    size, count = len(models), batches[0, :, :, 1:].numel()

    def work(ranks: Ranks) -> Run:
        torch.set_num_threads(1)  # of this thread: how many there are decides bits
        more: dict[str, Any] = {}
        if jitter:
            sleep = sleeps(ranks.rank)
            more["device"] = lambda log: EmulatedDevice(asked.device_memory or AMPLE, log, jitter=sleep)
        engine = system.initialize(models[ranks.rank], asked, system.Options(**(options or {})), ranks=ranks, **more)
        losses = []
        for step, batch in enumerate(batches):
            if before is not None:
                before(engine, ranks.rank, step)
            total = 0.0
            for micro in batch[ranks.rank :: size]:
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


def tight(model: str, size: int, share: float = 0.6) -> int:
    """A device's budget, of what the model takes that is on it whole."""
    return int(share * (on_one_rank(model, size, 0.5, "fp32").memory.device_peak_bytes or 0))


@cache
def trained(strategy: str, model: str, size: int) -> list[Run]:
    return on_ranks(
        STRATEGIES[strategy], model, size, clip=0.5, device_memory=tight(model, size), log_events=True, host_memory=AMPLE
    )


@cache
def resident(model: str, size: int, accumulate: int, dtype: str, clip: float, recompute: str) -> list[Run]:
    return on_ranks(RESIDENT, model, size, accumulate, dtype=dtype, clip=clip, recompute=recompute)


@pytest.mark.parametrize(("model", "size"), [("opt", 2), ("gpt2", 3), ("stack", 2), ("stack", 4)])
@pytest.mark.one_in(2)
def test_resident_on_ranks_is_one_rank_that_accumulates(model: str, size: int) -> None:
    found = on_ranks(RESIDENT, model, size, clip=0.5)
    assert_is_one_rank(on_one_rank(model, size, 0.5, "fp32"), found)


def test_micro_batches_are_summed_over_ranks_first() -> None:
    """Then the bits are not those of one rank, which adds all in one row, but close; and all ranks have the same."""
    expected, found = on_one_rank("stack", 4, 0.0, "fp32"), on_ranks(RESIDENT, "stack", 2, 2)
    for name, value in expected.parameters.items():
        torch.testing.assert_close(found[0].parameters[name], value, rtol=1e-5, atol=1e-6)
    assert all(torch.equal(value, found[1].parameters[name]) for name, value in found[0].parameters.items())
    assert found[0].norms == found[1].norms


PAIRS = [(name, model, size) for name in STRATEGIES for model, size in (("stack", 3), ("adapters", 2))]
PAIRS += list(zip(STRATEGIES, ("opt", "gpt2", "opt", "gpt2"), (3, 2, 2, 3), strict=False))


@pytest.mark.parametrize(("strategy", "model", "size"), PAIRS)
@pytest.mark.one_in(10)
def test_strategy_on_ranks_is_one_rank_that_accumulates(strategy: str, model: str, size: int) -> None:
    found = trained(strategy, model, size)
    assert_is_one_rank(on_one_rank(model, size, 0.5, "fp32"), found)
    for mine in found:
        engine = managed(mine.engine)
        assert not find_races(as_issued(engine.log.operations))
        if strategy in EXACT:
            assert engine.cursor.plan.predicted_device_peak_bytes == mine.memory.device_peak_bytes


@pytest.mark.parametrize(("strategy", "model", "size"), [pair for pair in PAIRS if pair[1] == "stack"])
def test_all_of_a_bundle_but_the_own_shard_passes_the_link(strategy: str, model: str, size: int) -> None:
    """Each trained bundle is reduced once a step. What is gathered are the fetches, and updates on the device."""
    for mine in trained(strategy, model, size):
        engine = managed(mine.engine)
        layout, operations = engine.layout, engine.log.operations
        reduced = sum(layout.bundle_bytes(b.index) for b in layout.bundles if b.trainable)
        assert mine.counters["reduce_bytes"] == STEPS * reduced * (size - 1) // size
        gathered = [int(o.label.split()[2]) for o in operations if o.label.startswith("gather bundle")]
        assert gathered
        assert mine.counters["gather_bytes"] == sum(map(layout.bundle_bytes, gathered)) * (size - 1) // size


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_closing_gives_every_rank_the_whole_values(strategy: str) -> None:
    for mine in trained(strategy, "stack", 3):
        for name, parameter in mine.engine.module.named_parameters():
            assert torch.equal(parameter.detach(), mine.parameters[name])


class Asked(NamedTuple):
    """Of a run that is compared with the reference on the same ranks."""

    model: str
    size: int
    accumulate: int = 1
    dtype: str = "fp32"
    clip: float = 0.0
    recompute: str = "none"
    share: float = 0.6


ASKED = {
    "two micro-batches": Asked("stack", 2, 2, clip=0.5),
    "bf16, recomputed": Asked("gpt2", 2, 1, "bf16", recompute="full"),
    "bf16": Asked("stack", 3, dtype="bf16", clip=0.5),
    "fp16, two micro-batches": Asked("stack", 3, 2, "fp16"),
    "half frozen": Asked("frozen-middle", 2, 2, "bf16"),
    "called twice": Asked("called-twice", 3, clip=0.5),
    "a parameter without a gradient": Asked("never-called", 2, 2),
}


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("case", ASKED)
@pytest.mark.one_in(19)
def test_ranks_have_the_reference_s_bits(strategy: str, case: str) -> None:
    assert_the_reference_s_bits(strategy, ASKED[case], {})


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("asked", [Asked("stack", 3), Asked("frozen-middle", 2, 2, "bf16")])
@pytest.mark.one_in(3)
def test_updates_need_not_wait_for_the_norm(strategy: str, asked: Asked) -> None:
    assert_the_reference_s_bits(strategy, asked, {"nonfinite": "stop"})


@pytest.mark.parametrize(
    ("strategy", "options"),
    [
        ("elixir", {"variant": "write-back"}),
        ("elixir", {"activations": "host"}),
        ("angel-ptm", {"activations": "host"}),
        ("patrickstar", {"activations": "host"}),
    ],
)
@pytest.mark.one_in(4)
def test_options_on_ranks(strategy: str, options: dict[str, Any]) -> None:
    assert_the_reference_s_bits(strategy, Asked("gpt2", 2, 2, "bf16", recompute="full"), options)


def assert_the_reference_s_bits(strategy: str, asked: Asked, options: dict[str, Any]) -> None:
    """Of `resident` on the same ranks, and no races, with sleeps thrown in."""
    model, size, accumulate, dtype, clip, recompute, share = asked
    expected = resident(model, size, accumulate, dtype, clip, recompute)
    budget = int(share * (expected[0].memory.device_peak_bytes or 0))
    found = on_ranks(
        STRATEGIES[strategy],
        model,
        size,
        accumulate,
        options,
        jitter=True,
        dtype=dtype,
        clip=clip,
        recompute=recompute,
        device_memory=budget,
        log_events=True,
    )
    for one, other in zip(expected, found, strict=True):
        assert_equal(one, other)
        assert not find_races(as_issued(managed(other.engine).log.operations))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(4)
def test_an_overflow_on_one_rank_skips_the_step_on_all(strategy: str) -> None:
    """And what follows is as if all had overflowed."""

    def overflow(engine: Any, rank: int, step: int) -> None:
        def infinite(gradient: torch.Tensor) -> torch.Tensor:
            hook.remove()
            return torch.full_like(gradient, torch.inf)

        if (rank, step) == (1, 1):
            hook = engine.module.head.weight.register_hook(infinite)

    expected = on_ranks(RESIDENT, "stack", 3, clip=0.5, before=overflow)
    found = on_ranks(STRATEGIES[strategy], "stack", 3, clip=0.5, before=overflow, device_memory=tight("stack", 3))
    for one, other in zip(expected, found, strict=True):
        assert other.skipped == [False, True, False]
        assert_equal(one, other)


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(2)
def test_evaluation_between_steps(strategy: str) -> None:
    seen: list[torch.Tensor] = []

    def evaluate(engine: Any, rank: int, step: int) -> None:
        with torch.no_grad():
            seen.append(loss_of("stack")(engine, tokens(1, 1, seed=9)[0, 0], 1))

    found = on_ranks(STRATEGIES[strategy], "stack", 2, clip=0.5, before=evaluate, device_memory=tight("stack", 2))
    assert_is_one_rank(on_one_rank("stack", 2, 0.5, "fp32"), found)
    assert len(seen) == 2 * STEPS
    assert len({value.item() for value in seen}) == STEPS


def leave_out(module: Any) -> None:
    """From now on one block is not run."""

    def forward(x: torch.Tensor) -> torch.Tensor:
        for block in (module.blocks[0], *module.blocks[2:]):
            x = block(x)
        return module.head(x)

    module.forward = forward


def idle(module: Any) -> None:
    """From now on one block is run, and reads none of its parameters."""
    module.blocks[1].forward = lambda x: x


def idle_in_part(module: Any, block: int = 1) -> None:
    """From now on one parameter of a block gets no gradient."""
    up = module.blocks[block].up
    up.forward = lambda x: nn.functional.linear(x, up.weight)


@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
@pytest.mark.parametrize("change", [leave_out, idle])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(3)
def test_ranks_whose_first_steps_differ_are_told_so(strategy: str, change: Callable[[Any], None], nonfinite: str) -> None:
    """There is no plan that could be kept to."""

    def differ(engine: Any, rank: int, step: int) -> None:
        if (rank, step) == (1, 0):
            change(engine.module)

    told = "rank 0 and rank 1 summed the gradients of different bundles|ranks are at different collectives"
    with pytest.raises(RuntimeError, match=told):
        on_ranks(STRATEGIES[strategy], "stack", 2, 1, {"nonfinite": nonfinite}, before=differ, device_memory=tight("stack", 2))


@pytest.mark.parametrize(("nonfinite", "at"), [("skip", 0), ("skip", 1), ("stop", 2)])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(10)
def test_a_parameter_idle_on_one_rank_gets_the_others_gradients(strategy: str, nonfinite: str, at: int) -> None:
    """Where updates do not wait for the norm, they wait to hear of it."""

    def differ(engine: Any, rank: int, step: int) -> None:
        if (rank, step) == (1, at):
            idle_in_part(engine.module)

    clip, options = 0.0 if nonfinite == "stop" else 0.5, {"nonfinite": nonfinite}
    expected = on_ranks(RESIDENT, "stack", 2, clip=clip, before=differ)
    given: dict[str, Any] = {"before": differ, "device_memory": tight("stack", 2), "log_events": True}
    found = on_ranks(STRATEGIES[strategy], "stack", 2, 1, options, clip=clip, **given)
    for one, other in zip(expected, found, strict=True):
        assert_equal(one, other)
        assert not find_races(as_issued(managed(other.engine).log.operations))


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(3)
def test_a_phased_step_tells_of_collectives(strategy: str) -> None:
    """Its last step; the bits are those of any other."""
    asked = settings(ranks=2, clip=0.5, device_memory=tight("stack", 2))
    batches, models, system = tokens(STEPS, 2), [make("stack"), make("stack")], STRATEGIES[strategy]

    def work(ranks: Ranks) -> tuple[dict[str, float], Run]:
        engine = system.initialize(models[ranks.rank], asked, system.Options(), ranks=ranks)
        losses: list[float] = []

        def step(batch: torch.Tensor) -> None:
            value = loss_of("stack")(engine, batch[ranks.rank], batches[0, :, :, 1:].numel())
            engine.backward(value)
            engine.step()
            losses.append(value.item())

        for batch in batches[:-1]:
            step(batch)
        return engine.phases_s(lambda: step(batches[-1])), finished(engine, losses)

    found = as_threads(2, work)
    assert all(phases["gather"] > 0 and phases["reduce"] > 0 for phases, _ in found)
    assert_is_one_rank(on_one_rank("stack", 2, 0.5, "fp32"), [mine for _, mine in found])


@pytest.mark.parametrize("system", [RESIDENT, *STRATEGIES.values()], ids=lambda system: system.name)
@pytest.mark.parametrize(
    ("differs", "told"),
    [
        ({"seed": 1}, "seed is 0 on rank 0 and 1 on rank 1"),
        ({"clip": 1.0}, "clip is 0.5 on rank 0 and 1.0 on rank 1"),
        ({"weight": 1.0}, r"the first values of blocks.1.up.weight are not the same on ranks 0 and 1"),
        ({"frozen": True}, r"blocks.1.up.weight is trained on rank 0 and frozen on rank 1"),
    ],
)
def test_ranks_that_begin_differently_are_told_so(system: Any, differs: dict[str, Any], told: str) -> None:
    models, change = [make("stack"), make("stack")], dict(differs)
    models[1].blocks[1].up.weight.requires_grad_(not change.pop("frozen", False))
    weight = change.pop("weight", None)
    if weight is not None:
        nn.init.constant_(models[1].blocks[1].up.weight, weight)
    asked = [settings(ranks=2, **{"clip": 0.5, **more}) for more in ({}, change)]

    def work(ranks: Ranks) -> None:
        system.initialize(models[ranks.rank], asked[ranks.rank], system.Options(), ranks=ranks)

    with pytest.raises(UnsupportedError, match=told):
        as_threads(2, work)
    values = [dict(model.named_parameters()) for model in models]
    assert all(value.numel() and torch.isfinite(value).all() for each in values for value in each.values()), "left as they were"


@pytest.mark.parametrize("strategy", STRATEGIES)
def test_ranks_with_other_budgets_are_told_so(strategy: str) -> None:
    system, models = STRATEGIES[strategy], [make("stack"), make("stack")]

    def work(ranks: Ranks) -> None:
        asked = settings(ranks=2, device_memory=(1 + ranks.rank) << 20)
        system.initialize(models[ranks.rank], asked, system.Options(), ranks=ranks)

    with pytest.raises(UnsupportedError, match="device_memory is 1048576 on rank 0 and 2097152 on rank 1"):
        as_threads(2, work)


def test_all_ranks_plan_with_the_smallest_share_of_a_host() -> None:
    """Three on one host have less than the one on the other, and what three cannot share evenly is no difference."""
    system, models = STRATEGIES["elixir"], [make("stack") for _ in range(2)]

    def work(ranks: Ranks) -> int | None:
        asked = settings(ranks=2, local_ranks=(1, 3)[ranks.rank], host_memory=(1 << 30) - ranks.rank, device_memory=8 << 20)
        with system.initialize(models[ranks.rank], asked, system.Options(), ranks=ranks) as engine:
            return engine.memory().host_budget_bytes

    assert as_threads(2, work) == [((1 << 30) - 1) // 3] * 2


def test_what_ranks_cannot_do_so_far_is_refused() -> None:
    with pytest.raises(UnsupportedError, match="reduction: native is NCCL's own sum"):
        on_ranks(elixir(), "stack", 2, options={"reduction": "native"})
    with pytest.raises(UnsupportedError, match="no link between cuda devices"):
        on_ranks(RESIDENT, "stack", 2, device="cuda")
    with pytest.raises(UnsupportedError, match="`ranks` is 2, and no other ranks are here"):
        elixir().initialize(make("stack"), settings(ranks=2), elixir().Options())


def test_summon_gives_every_rank_the_whole_values() -> None:
    found: list[dict[str, torch.Tensor]] = []

    def look(engine: Any, rank: int, step: int) -> None:
        if step == 0:
            with engine.summon() as values:
                found.append({name: value.clone() for name, value in values.items()})

    on_ranks(elixir(), "stack", 3, before=look)
    for mine in found:
        for name, value in make("stack").named_parameters():
            assert torch.equal(mine[name], value.detach())
