"""The step observed without arithmetic is the step that runs: same events, same gradients, same memory, same FLOPs."""

from __future__ import annotations

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from models import registry as models_registry
from models.flops import count, step_flops
from models.loss import token_loss
from models.shape import ModelShape
from systems import registry
from systems.errors import UnsupportedError
from systems.planning import hardware
from systems.planning.clock.work import Interval, MicroStepWork, interval_seconds, trace_of_work
from systems.planning.layout import Layout, ModelIndex
from systems.planning.trace import Trace
from systems.prediction.meta_step import observe
from systems.settings import TORCH_DTYPE, DType, Settings
from tests.systems import models_plain
from tests.systems.setups import in_turn

BATCH, LENGTH = 4, 32
TINY = ["opt-tiny", "gpt-tiny", "bert-tiny", "t5-tiny", "albert-tiny", "pr-moe-tiny", "t5-moe-tiny"]


def observed(shape: ModelShape, dtype: DType, recompute: Any, **more: int) -> tuple[ModelIndex, MicroStepWork]:
    given: dict[str, Any] = {"batch_size": BATCH, "seq_len": LENGTH} | more
    model = models_registry.build(shape)
    loss = partial(token_loss, objective=shape.objective)
    return observe(model, loss, dtype=TORCH_DTYPE[dtype], recompute=recompute, **given)


def traced(shape: ModelShape, dtype: DType, recompute: Any, accumulate: int) -> tuple[Layout, Trace]:
    """What the runtime records on the emulated device, once gradients come as expected."""
    system = registry.get("elixir")
    settings = Settings(
        device="cpu",
        dtype=dtype,
        device_memory=32 << 20,
        host_memory=8 << 30,
        recompute=recompute,
        accumulate=accumulate,
        initial_weights=models_registry.initial_weights(shape, 0),
    )
    ids = torch.randint(0, shape.vocab_size, (BATCH, LENGTH))
    engine: Any = system.initialize(models_registry.build(shape), settings, system.Options())
    with engine:
        for _ in range(2):
            for _ in range(accumulate):
                batch = {"input_ids": ids, "labels": ids.clone()}
                engine.backward(token_loss(engine, batch, accumulate * BATCH * LENGTH, objective=shape.objective))
            engine.step()
        trace, _ = list(engine.planner.plans.values())[-1]
        return engine.layout, trace


STEPS = [*in_turn(TINY, [("bf16", "full", 2), ("fp32", "none", 1)]), ("opt-tiny", "bf16", (1,), 1)]


@pytest.mark.parametrize(("name", "dtype", "recompute", "accumulate"), STEPS)
@pytest.mark.one_in(2)
def test_the_observed_step_is_the_traced_one(name: str, dtype: DType, recompute: Any, accumulate: int) -> None:
    shape = models_registry.resolve(name, {"num_layers": 3 if name == "albert-tiny" else 2})  # it has three groups
    layout, trace = traced(shape, dtype, recompute, accumulate)
    _, work = observed(shape, dtype, recompute)
    mine = trace_of_work(work, layout, accumulate=accumulate, seconds=lambda _: 0.0)
    assert mine.moments == trace.moments
    assert mine.flushes == trace.flushes
    assert mine.gradient_bytes == trace.gradient_bytes
    if shape.objective == "seq2seq":  # the CPU writes attention with a trained bias out: it has no fused kernel for that
        return
    for here, there in zip(mine.non_model_bytes, trace.non_model_bytes, strict=True):
        assert there <= here <= 1.05 * there + (64 << 10)
    assert max(mine.non_model_bytes) <= 1.01 * max(trace.non_model_bytes)
    assert max(mine.adopted_peak_bytes) == pytest.approx(max(trace.adopted_peak_bytes), rel=0.01)


@pytest.mark.parametrize("name", ["opt-tiny", "gpt-tiny", "bert-tiny", "t5-tiny"])
@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.one_in(2)
def test_flops_are_those_of_the_one_count(name: str, recompute: Any) -> None:
    """A fused attention's backward makes the scores once more: half a forward of them, which the count leaves out."""
    shape = models_registry.resolve(name)
    counted = count(shape, batch_size=BATCH, seq_len=LENGTH)
    _, work = observed(shape, "fp32", recompute)
    causal = shape.objective == "causal"  # elsewhere masks are tensors, and all pairs are multiplied
    again = (counted.forward.causal_scores if causal else counted.forward.scores) // 2
    expected = step_flops(counted, recompute=recompute, causal=causal) + again
    products = sum(interval.matmul_flops + sum(flops for _, flops in interval.attention) for interval in work.intervals)
    assert products == pytest.approx(expected, rel=0.01 if recompute == "none" else 0.1)
    assert products <= expected * 1.001  # torch stops recomputing a block before its last product


def test_memory_grows_with_the_batch_and_shrinks_by_recomputation() -> None:
    shape = models_registry.resolve("opt-tiny")
    peaks = {}
    for recompute in ("none", "full"):
        for batch_size in (1, 2, 3):
            _, work = observed(shape, "bf16", recompute, batch_size=batch_size)
            peaks[recompute, batch_size] = max(interval.peak_bytes for interval in work.intervals)
    for batch_size in (1, 2, 3):
        assert peaks["full", batch_size] < peaks["none", batch_size]
    assert peaks["none", 3] - peaks["none", 2] == pytest.approx(peaks["none", 2] - peaks["none", 1], rel=0.05)


def test_no_buffer_of_queries_by_keys() -> None:
    """Attention memory grows with the length, not with its square."""
    shape = models_registry.resolve("opt-tiny", {"max_positions": "4096", "vocab_size": "64"})
    peaks = [
        max(i.peak_bytes for i in observed(shape, "bf16", "none", batch_size=1, seq_len=length)[1].intervals)
        for length in (1024, 2048, 4096)
    ]
    assert peaks[2] - peaks[1] == pytest.approx(2 * (peaks[1] - peaks[0]), rel=0.02)


def test_the_model_is_left_as_it_was() -> None:
    model = models_plain.build(next(iter(models_plain.CASES)))
    before = {name: (p, p.dtype, p.device) for name, p in model.named_parameters()}
    hooks = sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules())
    with pytest.raises(UnsupportedError):
        observe(model, token_loss, batch_size=1, seq_len=4, dtype=torch.bfloat16)
    assert {name: (p, p.dtype, p.device) for name, p in model.named_parameters()} == before
    assert sum(len(m._forward_hooks) + len(m._forward_pre_hooks) for m in model.modules()) == hooks


class Asks(nn.Module):
    """Depends on what it computes, which nobody knows without computing it."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(8, 4)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        hidden: torch.Tensor = self.embedding(input_ids)
        return hidden * float(hidden.detach().sum())


def test_a_model_that_depends_on_values_is_refused_in_one_line() -> None:
    with pytest.raises(UnsupportedError, match="Asks cannot be planned: it does not run on the meta device") as refused:
        observe(Asks(), token_loss, batch_size=1, seq_len=4, dtype=torch.float32)
    assert "\n" not in str(refused.value)


def test_compute_takes_the_slower_of_products_and_memory_and_the_rest() -> None:
    seconds = interval_seconds(hardware.load("h100-80g-x1"), "bf16")
    rate, dram, other = 784e12 * 0.8, 3.35e12, 3.35e12 * 0.625
    assert seconds(Interval(matmul_flops=10**12, matmul_bytes=10)) == pytest.approx(10**12 / rate)
    assert seconds(Interval(matmul_flops=10, kernels=1000)) == pytest.approx(6e-3)
    assert seconds(Interval(matmul_flops=10, matmul_bytes=10**9)) == pytest.approx(10**9 / dram)
    assert seconds(Interval(matmul_flops=10**12, other_bytes=10**9)) == pytest.approx(10**12 / rate + 10**9 / other)
