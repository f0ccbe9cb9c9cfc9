"""Blocks whose forward is compiled: moved as all others are, and watched as on a CUDA device, where torch compiles them."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from models import registry as models_registry
from models.loss import token_loss
from systems import registry
from systems.device.cuda import CudaDevice
from systems.device.emulated import EmulatedDevice
from systems.errors import UnsupportedError
from systems.settings import DType, Settings
from systems.substrate import assembly
from tests.systems.every import STRATEGIES

STEPS, SHAPE = 6, models_registry.resolve("opt-tiny")
WIDE = SHAPE.with_overrides({"hidden_size": 1024, "num_heads": 16, "ffn_size": 4096})  # beside it a GPU's workspaces are little
BLOCKS = SHAPE.num_layers


class WatchedDevice(EmulatedDevice):
    """Operations are seen as on a CUDA device, while reads are watched alone: so nothing counts activations."""

    guard: Any = CudaDevice.guard
    metered: Any = CudaDevice.metered


class Counting:
    """A backend of torch's, and how often what it made was called."""

    def __init__(self, name: str) -> None:
        self._inner: Any = torch._dynamo.lookup_backend(name)
        self.calls = 0

    def __call__(self, graph: Any, inputs: Any) -> Callable[..., Any]:
        made = self._inner(graph, inputs)

        def counted(*given: Any) -> Any:
            self.calls += 1
            return made(*given)

        return counted


def compile_blocks(model: Any, backend: Counting) -> None:
    for block in model.model.decoder.layers:
        block.forward = torch.compile(block.forward, backend=backend, fullgraph=True, dynamic=False)


def losses(engine: Any, batches: torch.Tensor, device: str = "cpu") -> list[float]:
    found = []
    for ids in batches.to(device):
        loss = token_loss(engine, {"input_ids": ids, "labels": ids.clone()}, ids[:, 1:].numel(), objective=SHAPE.objective)
        engine.backward(loss)
        engine.step()
        found.append(loss.item())
    return found


def batches_of(steps: int) -> torch.Tensor:
    return torch.randint(0, SHAPE.vocab_size, (steps, 2, 32), generator=torch.Generator().manual_seed(1))


def started(strategy: str, recompute: Any, *, backend: Counting | None, budget: int, dtype: DType = "fp32") -> Any:
    model = models_registry.build(SHAPE)
    if backend is not None:
        compile_blocks(model, backend)
    settings = Settings(
        device="cpu",
        dtype=dtype,
        device_memory=budget,
        host_memory=1 << 30,
        recompute=recompute,
        initial_weights=models_registry.initial_weights(SHAPE, 0),
    )
    system: Any = registry.get(strategy)
    return system.initialize(model, settings, system.Options(), device=lambda log: WatchedDevice(budget, log))


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> None:
    """The emulated device of these tests is taken for one that can."""
    find = assembly.find_units
    monkeypatch.setattr(assembly, "find_units", lambda model, dtype, **_: find(model, dtype))
    torch._dynamo.reset()


@pytest.mark.usefixtures("compiles")
@pytest.mark.parametrize("recompute", ["none", "full", (0, 2)])
@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
@pytest.mark.one_in(3)
@pytest.mark.long
def test_compiled_blocks_train_where_states_do_not_fit(strategy: str, recompute: Any) -> None:
    """Of 16 bytes a parameter a fifth. One graph of a whole block does for all places at which weights lie."""
    budget, batches = 16 * models_registry.parameter_count(SHAPE) // 5, batches_of(STEPS)
    with started(strategy, recompute, backend=None, budget=budget) as engine:
        expected = losses(engine, batches)
    backend = Counting("aot_eager")
    with started(strategy, recompute, backend=backend, budget=budget) as engine:
        found = losses(engine, batches)
        assert engine.counters()["h2d_bytes"] > 0
    again = {"none": 0, "full": BLOCKS}[recompute] if isinstance(recompute, str) else len(recompute)
    whole = [(BLOCKS + again) * steps for steps in range(STEPS - 3, STEPS)]
    assert backend.calls >= BLOCKS * (STEPS - 3) if strategy == "h3t" else backend.calls in whole  # h3t chooses by itself
    assert found == pytest.approx(expected, rel=1e-6)


@pytest.mark.usefixtures("compiles")
def test_the_first_steps_are_seen_uncompiled() -> None:
    """Operations are told of while reads are watched; a compiled function under such a mode is refused by torch."""
    backend = Counting("aot_eager")
    with started("elixir", "none", backend=backend, budget=8 << 20) as engine:
        losses(engine, batches_of(1))
        assert not backend.calls
        losses(engine, batches_of(3))
    assert backend.calls


@pytest.mark.parametrize("system", ["resident", *sorted(STRATEGIES)])
def test_the_emulated_device_takes_none(system: str) -> None:
    model, found = models_registry.build(SHAPE), registry.get(system)
    compile_blocks(model, Counting("eager"))
    with pytest.raises(UnsupportedError, match="forward of module model.decoder.layers.0 is compiled, and the emulated device"):
        found.initialize(model, Settings(device="cpu", dtype="fp32", device_memory=8 << 20), found.Options())


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
@pytest.mark.parametrize("strategy", sorted(STRATEGIES))
def test_on_a_cuda_device_by_inductor_at_half_of_resident_s_peak(strategy: str) -> None:
    """Twenty steps in bf16 to 1e-3 of the uncompiled."""
    torch._dynamo.reset()
    batches, found, budget, inductor = batches_of(20), [], 16 << 30, Counting("inductor")
    for system, backend in (("resident", None), (strategy, None), (strategy, inductor)):
        model, of = models_registry.build(WIDE), registry.get(system)
        if backend is not None:
            compile_blocks(model, backend)
        weights = models_registry.initial_weights(WIDE, 0)
        settings = Settings(device="cuda", dtype="bf16", device_memory=budget, host_memory=8 << 30, initial_weights=weights)
        with of.initialize(model, settings, of.Options()) as engine:
            found.append(losses(engine, batches, "cuda"))
            budget = budget if system == strategy else (engine.memory().device_peak_bytes or budget) // 2
    assert inductor.calls >= 15 * BLOCKS
    assert found[2] == pytest.approx(found[1], rel=1e-3)
