"""A module that asks within forward for its weights in another dtype reads them in it, and trains: under every system alike."""

from __future__ import annotations

from collections.abc import Callable
from functools import cache
from itertools import groupby
from typing import Any

import pytest
import torch
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from systems.errors import UnsupportedError
from systems.system import Engine
from tests.systems.models_small import VOCABULARY, tokens
from tests.systems.running import RESIDENT, Run, assert_equal, finished, one_step, settings, start
from tests.systems.setups import SYSTEMS

DIM, STEPS = 16, 4
ALL = {"resident": (RESIDENT, RESIDENT.Options()), **SYSTEMS}


class Router(nn.Module):
    """how: "module" converts itself, "part" what it has, "back" for a while only, "data" without Module.to."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.gate = how, nn.Linear(DIM, 4, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        before = self.gate.weight.dtype
        if self.how == "module":
            self.float()
        elif self.how in ("part", "back"):
            self.gate = self.gate.to(torch.float32)
        else:
            self.gate.weight.data = self.gate.weight.data.float()
        assert self.gate.weight.dtype == torch.float32
        out = self.gate(x.float()).softmax(-1).amax(-1, keepdim=True).to(x.dtype)
        if self.how == "back":
            self.gate = self.gate.to(before)
        return out


class Block(nn.Module):
    def __init__(self, how: str, again: bool | None) -> None:
        super().__init__()
        self.router, self.body, self.again = Router(how), nn.Linear(DIM, DIM), again

    def _run(self, x: torch.Tensor) -> torch.Tensor:
        return x + self.body(x) * self.router(x)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return (
            self._run(x)
            if self.again is None or not torch.is_grad_enabled()
            else checkpoint(self._run, x, use_reentrant=self.again)
        )


class Net(nn.Module):
    """again: recomputes, reentrantly or not. calls: of each block, in a row."""

    def __init__(self, how: str = "part", again: bool | None = None, calls: int = 1) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.first, self.calls = nn.Linear(DIM, DIM), calls
        self.blocks = nn.ModuleList(Block(how, again) for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.first(x)
        for block in self.blocks:
            for _ in range(self.calls):
                x = block(x)
        return x.float().pow(2).mean()


def batches(accumulate: int) -> torch.Tensor:
    return torch.randn(STEPS, accumulate, 4, DIM, generator=torch.Generator().manual_seed(1))


def run_net(system: str, budget: int | None, accumulate: int, dtype: str, **given: Any) -> tuple[Run, list[torch.Tensor]]:
    """And the first router's weight, as each forward read it."""
    model, seen = Net(**given), []
    reads = model.blocks[0].router.gate.register_forward_pre_hook  # type: ignore[union-attr]
    reads(lambda module, args: seen.append(module.weight.detach().clone()))
    chosen, options = ALL[system]
    more = {} if budget is None else {"device_memory": budget}
    engine = start(chosen, model, settings(accumulate=accumulate, dtype=dtype, **more), options)
    return steps(engine, batches(accumulate), lambda called, batch: called(batch)), seen


def steps(engine: Engine, ids: torch.Tensor, loss: Callable[..., torch.Tensor]) -> Run:
    """With a pass without gradients in the middle."""
    losses, accumulate = [], ids.shape[1]
    for number, micro_batches in enumerate(ids):
        losses.append(one_step(engine, micro_batches, lambda called, batch, count: loss(called, batch) / accumulate))
        if number == 1:
            with torch.no_grad():
                losses.append(float(loss(engine, micro_batches[0])))
    return finished(engine, losses)


CASES: dict[str, dict[str, Any]] = {
    "module": {"how": "module"},
    "back": {"how": "back"},
    "data": {"how": "data"},
    "called twice": {"calls": 2},
    "recomputed": {"again": False},
    "recomputed reentrantly, twice": {"again": True, "calls": 2},
}


@cache
def expected_net(accumulate: int, dtype: str, case: str) -> tuple[Run, list[torch.Tensor]]:
    return run_net("resident", None, accumulate, dtype, **CASES[case])


PRODUCT = [(system, case, accumulate) for system in SYSTEMS for case in CASES for accumulate in (1, 2)]
SAMPLE = PRODUCT[::7]  # 7 and the 12 of a system have no divisor in common: each case with each number of micro-batches


@pytest.mark.parametrize(("system", "case", "accumulate"), SAMPLE)
@pytest.mark.one_in(3)
def test_a_module_that_casts_itself_trains(system: str, case: str, accumulate: int) -> None:
    check_net(system, case, accumulate, "bf16")


@pytest.mark.slow
@pytest.mark.parametrize("dtype", ["bf16", "fp16"])
@pytest.mark.parametrize(("system", "case", "accumulate"), PRODUCT)
def test_every_system_and_way_to_cast(system: str, case: str, accumulate: int, dtype: str) -> None:
    check_net(system, case, accumulate, dtype)


def check_net(system: str, case: str, accumulate: int, dtype: str) -> None:
    expected, moved = expected_net(accumulate, dtype, case)
    run, seen = run_net(system, int(0.7 * (expected.memory.device_peak_bytes or 0)), accumulate, dtype, **CASES[case])
    assert_equal(expected, run)
    assert [w for w, _ in groupby(seen, torch.Tensor.tolist)] == [w for w, _ in groupby(moved, torch.Tensor.tolist)]
    assert not torch.equal(seen[0], seen[-1]), "what forward reads never moves"
    name = "blocks.0.router.gate.weight"
    assert not torch.equal(run.parameters[name], Net().get_parameter(name))


def test_the_weight_that_is_read_is_the_rounded_one_in_the_dtype_asked_for() -> None:
    """The oracle of the oracle: masters in fp32, a copy in bf16 that is widened, the gradient rounded, torch's AdamW."""
    run, _ = expected_net(1, "bf16", "module")
    masters = {name: p.detach().clone() for name, p in Net().named_parameters()}
    adam = torch.optim.AdamW(masters.values(), lr=1e-4, weight_decay=0.01)
    losses = []
    for batch in batches(1):
        model = Net("module").bfloat16()
        with torch.no_grad():
            for name, p in model.named_parameters():
                p.copy_(masters[name])
        loss = model(batch[0].bfloat16())
        loss.backward()
        losses.append(loss.item())
        for name, p in model.named_parameters():
            assert p.grad is not None
            masters[name].grad = p.grad.bfloat16().float()
        adam.step()
    taken = run.losses[:2] + run.losses[3:]
    assert taken[0] == losses[0] and taken == pytest.approx(losses, rel=2**-8), "a rounded weight differs by one bit of bf16"


def test_a_weight_is_not_cast_where_it_is_not() -> None:
    """By the model, before the block that has it is called: on the emulated device and on CUDA it would read NaN."""

    class Early(Net):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            self.blocks[3].router.float()
            return super().forward(x)

    for system, (chosen, options) in SYSTEMS.items():
        model = Early()
        with start(chosen, model, settings(dtype="bf16"), options) as engine:
            for managed in engine.residency.bundles:  # type: ignore[attr-defined]
                if managed.movable:
                    engine.residency.drop(managed.index)  # type: ignore[attr-defined]
            with pytest.raises(UnsupportedError, match=r"blocks\.3\.router\.gate\.weight is converted outside the unit"):
                engine(batches(1)[0, 0])
            assert {p.dtype for p in model.parameters()} == {torch.bfloat16}, system


def switch(**given: Any) -> nn.Module:
    torch.manual_seed(0)
    config = transformers.SwitchTransformersConfig(
        vocab_size=VOCABULARY,
        d_model=16,
        d_kv=8,
        d_ff=24,
        num_layers=2,
        num_decoder_layers=2,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        num_heads=2,
        num_experts=3,
        dropout_rate=0.0,
        decoder_start_token_id=0,
        use_cache=False,
        **given,
    )
    return transformers.SwitchTransformersForConditionalGeneration(config).train()


def run_switch(system: str, budget: int | None, accumulate: int, count: int) -> Run:
    chosen, options = ALL[system]
    more = {} if budget is None else {"device_memory": budget}
    engine = start(chosen, switch(), settings(accumulate=accumulate, dtype="bf16", **more), options)
    return steps(engine, tokens(count, accumulate), lambda called, ids: called(input_ids=ids, labels=ids).loss)


@cache
def expected_switch(accumulate: int, count: int) -> Run:
    return run_switch("resident", None, accumulate, count)


def check_switch(system: str, accumulate: int, count: int, share: float) -> None:
    expected = expected_switch(accumulate, count)
    run = run_switch(system, int(share * (expected.memory.device_peak_bytes or 0)), accumulate, count)
    assert_equal(expected, run)
    before = dict(switch().named_parameters())
    routers = [name for name in run.parameters if "router.classifier" in name]
    assert len(routers) == 2
    assert not any(torch.equal(run.parameters[name], before[name]) for name in routers)


@pytest.mark.parametrize(("system", "accumulate"), [(system, 1 + number % 2) for number, system in enumerate(SYSTEMS)])
@pytest.mark.one_in(4)
def test_a_switch_model_trains_in_bf16(system: str, accumulate: int) -> None:
    check_switch(system, accumulate, 3, 0.7)


@pytest.mark.slow
@pytest.mark.parametrize("share", [1.0, 0.7, 0.55])
@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("system", SYSTEMS)
def test_ten_steps_of_a_switch_model(system: str, accumulate: int, share: float) -> None:
    check_switch(system, accumulate, 10, share)
