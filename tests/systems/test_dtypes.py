"""What dtypes a model and its inputs may come in: nothing that its author keeps wide is computed narrow without a word."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from systems.errors import UnsupportedError
from systems.export import _sizes
from systems.registry import find, get
from systems.system import Engine
from tests.systems.running import RESIDENT, assert_equal, finished, settings, start
from tests.systems.setups import SYSTEMS

DIM = 16
ALL = {"resident": (RESIDENT, RESIDENT.Options()), **SYSTEMS}


class Base(nn.Module):
    """A quantized block with an adapter, as a library makes them: integers and a scale a row that nothing trains."""

    def __init__(self, *, narrow: torch.dtype = torch.int8) -> None:
        super().__init__()
        values = torch.randint(-99, 99, (DIM, DIM), generator=torch.Generator().manual_seed(2))
        self.codes = nn.Parameter(values.to(narrow), requires_grad=False)
        self.scale = nn.Parameter(torch.linspace(0.001, 0.01, DIM), requires_grad=False)
        self.adapter = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        weight = (self.codes.float() * self.scale.float().unsqueeze(1)).to(x.dtype)
        return x + torch.tanh(x @ weight.t() + self.adapter(x))


class Net(nn.Module):
    def __init__(self, **given: Any) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Base(**given) for _ in range(4))
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor, *, weights: Any = None) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


INPUT = torch.randn(4, DIM, generator=torch.Generator().manual_seed(3))


def steps(engine: Engine, x: torch.Tensor = INPUT) -> list[float]:
    losses = []
    for _ in range(3):
        loss = engine(x).float().pow(2).mean()
        engine.backward(loss)
        engine.step()
        losses.append(loss.item())
    return losses


QUANTIZED = [("fp32", torch.int8), ("bf16", torch.uint8), ("bf16", torch.float8_e4m3fn)]


@pytest.mark.parametrize(("system", "dtype", "narrow"), [(s, *QUANTIZED[i % 3]) for i, s in enumerate(SYSTEMS)])
def test_a_quantized_base_is_carried_along(system: str, dtype: str, narrow: torch.dtype) -> None:
    """In bf16 the scales stay as they came: what is trained is in bf16 already."""

    def model() -> Any:
        made = Net(narrow=narrow)
        if dtype == "bf16":
            made.head.bfloat16()
            for block in made.blocks:
                block.adapter.bfloat16()
        return made

    expected = start(RESIDENT, model(), settings(dtype=dtype))
    reference = finished(expected, steps(expected))
    chosen, options = SYSTEMS[system]
    net = model()
    engine = start(
        chosen, net, settings(dtype=dtype, device_memory=int(0.75 * (reference.memory.device_peak_bytes or 0))), options
    )
    run = finished(engine, steps(engine))
    assert_equal(reference, run)
    assert "blocks.0.codes" not in run.parameters and run.parameters.keys() == reference.parameters.keys()
    for block, fresh in zip(net.blocks, model().blocks, strict=True):
        assert torch.equal(block.codes.float(), fresh.codes.float()) and block.codes.dtype == narrow
        assert dtype == "fp32" or torch.equal(block.scale, fresh.scale)


@pytest.mark.parametrize("system", ALL)
def test_what_is_carried_along_is_reckoned_as_it_is_written(system: str) -> None:
    chosen, options = ALL[system]
    net = Net(narrow=torch.float8_e4m3fn).bfloat16()
    for block in net.blocks:
        block.codes.data = block.codes.data.to(torch.float8_e4m3fn)
        block.scale.data = block.scale.data.float()
    with start(chosen, net, settings(dtype="bf16"), options) as engine:
        for dtype in (torch.float32, torch.bfloat16):
            found = engine.state_dict(dtype=dtype)
            sizes = _sizes(engine, dtype)
            assert {name: value.nbytes for name, value in found.items()} == dict(sizes) and len(sizes) == len(found)
            assert found["blocks.0.codes"].dtype == torch.float8_e4m3fn and found["blocks.0.scale"].dtype == torch.float32


def half_wide() -> nn.Module:
    model = nn.Sequential(nn.Linear(DIM, DIM), nn.Linear(DIM, DIM))
    model[0].bfloat16()
    return model


MIXES: list[tuple[str, torch.dtype, torch.dtype, str | None]] = [
    ("bf16", torch.bfloat16, torch.float32, "1.weight is in torch.float32 beside others in torch.bfloat16"),
    ("bf16", torch.float16, torch.bfloat16, "0.weight is in torch.float16 beside others"),
    ("fp16", torch.float16, torch.bfloat16, "1.weight is in torch.bfloat16 beside others"),
    ("fp32", torch.float64, torch.float64, r"0.weight is in torch.float64.*call model.float\(\)"),
    ("fp32", torch.bfloat16, torch.float32, None),
    ("bf16", torch.float32, torch.float32, None),
    ("bf16", torch.float16, torch.float16, None),
]


@pytest.mark.parametrize(("dtype", "one", "other", "says"), MIXES)
@pytest.mark.parametrize("system", ["resident", "elixir"])
def test_a_part_kept_wider_than_the_engine_s_dtype(system: str, dtype: str, one: Any, other: Any, says: str | None) -> None:
    chosen, options = ALL[system]
    model = nn.Sequential(nn.Linear(DIM, DIM, dtype=one), nn.Linear(DIM, DIM, dtype=other))
    if says is not None:
        with pytest.raises(UnsupportedError, match=says):
            start(chosen, model, settings(dtype=dtype), options)
        model.to(torch.float32)  # it was not touched
    with start(chosen, model, settings(dtype=dtype), options) as engine:
        assert steps(engine)[0] > 0


@pytest.mark.parametrize("system", [name for name in find() if name != "dummy"])
def test_every_system_of_the_registry_refuses_a_part_kept_wider(system: str) -> None:
    chosen = get(system)
    with pytest.raises(UnsupportedError, match=r"is in torch\.float32 beside others|runs on CUDA only"):
        chosen.initialize(half_wide(), settings(dtype="bf16"), chosen.Options())


class Given(nn.Module):
    """Keeps what it is called with."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(DIM, DIM)
        self.seen: list[Any] = []

    def forward(self, x: torch.Tensor, **more: Any) -> torch.Tensor:
        self.seen.append((x.dtype, more))
        return self.layer(x)


@pytest.mark.parametrize("system", ALL)
def test_floating_inputs_come_in_the_engine_s_dtype(system: str) -> None:
    """As FSDP2's mixed precision hands them on; numbers and complex tensors are as they were."""
    chosen, options = ALL[system]
    model = Given()
    integers, mask, waves = torch.arange(3), torch.ones(2, dtype=torch.bool), torch.ones(2, dtype=torch.complex64)
    more = {"deep": [{"x": INPUT.double()}, 1.5, "text"], "integers": integers, "mask": mask, "waves": waves}
    with start(chosen, model, settings(dtype="bf16"), options) as engine:
        engine.backward(engine(INPUT, **more).sum())
        engine.step()
        with torch.no_grad():
            engine(INPUT, **more)
    for dtype, kept in model.seen:
        assert dtype == kept["deep"][0]["x"].dtype == torch.bfloat16 and kept["deep"][1:] == [1.5, "text"]
        assert kept["integers"] is integers and kept["mask"] is mask and kept["waves"] is waves
    assert more["deep"][0]["x"].dtype == torch.float64, "the caller's own are as they were"  # type: ignore[index]


@pytest.mark.parametrize("system", ALL)
def test_a_model_that_is_all_frozen_only_answers(system: str) -> None:
    """A teacher: under no_grad or not, and moved in and out like any other."""
    chosen, options = ALL[system]
    expected = Net()(INPUT)
    budget = {} if system == "resident" else {"device_memory": 12 << 10}
    with start(chosen, Net().requires_grad_(False), settings(**budget), options) as engine:
        with torch.no_grad():
            assert torch.equal(engine(INPUT), expected)
        answer = engine(INPUT)
        assert torch.equal(answer, expected) and not answer.requires_grad
        with pytest.raises(ValueError, match="backward: no parameter of the model requires a gradient"):
            engine.backward(torch.zeros((), requires_grad=True))
        with pytest.raises(ValueError, match="step: no parameter of the model requires a gradient"):
            engine.step()
        with pytest.raises(UnsupportedError, match="gives none to its inputs: detach them"):
            engine(INPUT.clone().requires_grad_())
        with engine.summon() as values:
            assert "head.weight" in values


class Added(nn.Module):
    """A parametrization: what it is given and a low rank product, as an adapter on fused experts adds it."""

    def __init__(self, delta: torch.Tensor) -> None:
        super().__init__()
        self.delta = delta

    def forward(self, weight: torch.Tensor) -> torch.Tensor:
        return weight + self.delta


class Experts(nn.Module):
    """A frozen stack of weights; the adapter puts its product on it for the forward and takes it off again."""

    def __init__(self) -> None:
        super().__init__()
        self.stack = nn.Parameter(torch.randn(2, DIM, DIM) / 8, requires_grad=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return torch.tanh(x @ self.stack[0]) + torch.tanh(x @ self.stack[1])


class Adapter(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.base: Any = Experts()
        self.down, self.up = nn.Parameter(torch.randn(2, DIM, 3) / 8), nn.Parameter(torch.randn(2, 3, DIM) / 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        nn.utils.parametrize.register_parametrization(self.base, "stack", Added(self.down @ self.up))
        self.base.parametrizations.stack.original.requires_grad_(False)
        try:
            with nn.utils.parametrize.cached():
                return x + self.base(x)
        finally:
            nn.utils.parametrize.remove_parametrizations(self.base, "stack", leave_parametrized=False)


class Adapted(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.blocks = nn.ModuleList(Adapter() for _ in range(4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_frozen_weight_that_is_parametrized_within_forward(system: str) -> None:
    expected = start(RESIDENT, Adapted(), settings())
    reference = finished(expected, steps(expected))
    chosen, options = SYSTEMS[system]
    budget = int(0.8 * (reference.memory.device_peak_bytes or 0))
    engine = start(chosen, Adapted(), settings(device_memory=budget), options)
    assert_equal(reference, finished(engine, steps(engine)))
