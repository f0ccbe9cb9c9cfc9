"""Parameters that another module reads than the one that owns them: found when it does, and held for it from then on."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import pytest
import torch
import torch.nn.functional as F
import transformers
from torch import nn
from torch.utils.checkpoint import checkpoint

from systems.errors import HiddenUseError
from systems.system import Engine
from tests.systems.every import MANAGED, with_option
from tests.systems.models_plain import DIM, Block, Stack, features, squared_error
from tests.systems.models_small import tokens
from tests.systems.running import RANDOM, RESIDENT, Run, assert_equal, evict_at_once, finished, one_step, settings, start, train
from tests.systems.setups import SYSTEMS

STEPS = 3


class Rows(nn.Module):
    """What it returns is its own weight, or a view of it: who called it computes with that."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(0.1 * torch.randn(2 * DIM, DIM))

    def forward(self, count: int) -> torch.Tensor:
        return self.weight[:count]

    def multiply(self, x: torch.Tensor) -> torch.Tensor:
        """A method that is no forward."""
        return x @ self.weight[DIM:]


class Attended(Stack):
    """Attention outside of a list reads its projection's weight, and so does torch's own function of it."""

    def __init__(self) -> None:
        super().__init__()
        self.attention = nn.MultiheadAttention(DIM, 4, batch_first=True)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.head.weight.dtype).unsqueeze(1)
        return super().forward(self.attention(x, x, x)[0].squeeze(1))


class TiedByHand(Stack):
    """The root, which owns nothing, multiplies by a weight of the first module's and of a block's."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(self.stem(x.to(self.head.weight.dtype)))
        return F.linear(x, self.stem.weight.t()) * self.blocks[0].up.weight[0]


class Forwards(Stack):
    """Blocks, and the head, are run by their forward itself (SqueezeBERT's encoder does so)."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.head.weight.dtype)
        for block in self.blocks:
            x = block.forward(x)
        return self.head.forward(x)


class Handed(Stack):
    """A weight is handed on, as it is and as a view, to blocks, one of which is a module's output."""

    def __init__(self) -> None:
        super().__init__(GivenBlock)
        self.rows = Rows()

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for number, block in enumerate(self.blocks):
            x = block(x.to(self.head.weight.dtype), self.rows(DIM) if number % 2 else self.rows.weight.t()[:, :DIM])
        return self.head(self.rows.multiply(x))


class GivenBlock(Block):
    def forward(self, x: torch.Tensor, weight: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return super().forward(x @ weight.to(x.dtype) + x)


class FrozenRead(TiedByHand):
    """What is borrowed is frozen, and needed on the way to what trains below it; the root has a frozen matrix of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(DIM) + 0.1 * torch.randn(DIM, DIM), requires_grad=False)
        self.gain = nn.Parameter(torch.ones(()))
        self.blocks[0].requires_grad_(False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.to(self.head.weight.dtype)) @ self.mix
        for block in self.blocks:
            x = block(x) * self.blocks[0].up.weight[0]
        return self.head(x) * self.gain


class Reentrant(Stack):
    """Read in checkpoints of the old kind, whose backward runs the root's own code again and again."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x.to(self.head.weight.dtype))
        for block in self.blocks:
            x = checkpoint(lambda v, block=block: F.linear(block(v), self.head.weight), x, use_reentrant=True)
        return x


class Later(Stack):
    """From the third step on the head's weight is used by the root too."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = super().forward(x)
        return x @ self.head.weight if self.calls > 2 else x


READERS: Mapping[str, Callable[[], nn.Module]] = MappingProxyType(
    {
        "attended": Attended,
        "tied-by-hand": TiedByHand,
        "forwards": Forwards,
        "handed": Handed,
        "frozen-read": FrozenRead,
        "reentrant": Reentrant,
        "later": Later,
    }
)


def built(name: str) -> nn.Module:
    torch.manual_seed(0)
    return READERS[name]()


@cache
def reference(name: str, accumulate: int = 1, dtype: str = "fp32", steps: int = STEPS) -> Run:
    asked = settings(accumulate=accumulate, dtype=dtype, clip=1.0)
    return train(start(RESIDENT, built(name), asked), tokens(steps, accumulate), squared_error)


def budget_of(run: Run, share: float) -> int:
    return int(share * (run.memory.device_peak_bytes or 0))


@pytest.mark.parametrize(("accumulate", "dtype"), [(1, "fp32"), (2, "bf16")])
@pytest.mark.parametrize("name", READERS)
@pytest.mark.one_in(4)
def test_nothing_that_another_reads_is_used_after_its_release(name: str, accumulate: int, dtype: str) -> None:
    asked = settings(accumulate=accumulate, dtype=dtype, clip=1.0)
    engine = start(RANDOM, built(name), asked)
    evict_at_once(engine)
    assert_equal(reference(name, accumulate, dtype), train(engine, tokens(STEPS, accumulate), squared_error))


@pytest.mark.parametrize("name", ["tied-by-hand", "handed"])
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.one_in(3)
def test_every_system_equals_resident(system: str, name: str) -> None:
    """In little room; and with room for all the same is found: that does not depend on what happens to be there."""
    chosen, options = SYSTEMS[system]
    expected = reference(name)
    budget = budget_of(expected, 0.7)
    run = train(start(chosen, built(name), settings(clip=1.0, device_memory=budget), options), tokens(STEPS, 1), squared_error)
    assert_equal(expected, run)
    assert 0 < (run.memory.device_peak_bytes or 0) <= budget
    with start(chosen, built(name), settings(), options) as ample:
        squared_error(ample, tokens(1, 1)[0, 0], 1)
        assert users(ample) == users(run.engine)


def users(engine: Engine) -> dict[str, set[str]]:
    """Of each parameter, the units that are held to read its bundle."""
    units, layout = engine.index.units, engine.layout  # type: ignore[attr-defined]
    bundles = {p.name: layout.bundles[layout.bundle_of_parameter[p.index]] for p in engine.index.parameters}  # type: ignore[attr-defined]
    return {name: {units[u].name for u in bundle.units} for name, bundle in bundles.items()}


def test_it_is_planned_from_then_on() -> None:
    """One step, or one more where the root's moments change, is without a plan; then nothing is fetched on demand."""
    expected = reference("tied-by-hand", steps=4)
    chosen, options = SYSTEMS["elixir"]
    engine = start(chosen, built("tied-by-hand"), settings(clip=1.0, device_memory=budget_of(expected, 0.7)), options)
    run = train(engine, tokens(4, 1), squared_error)
    assert "<root>" in users(engine)["stem.weight"] and "<root>" in users(engine)["blocks.0.up.weight"]
    assert run.counters["steps_without_plan"] == 2 and run.counters["fallbacks"] == 0
    assert run.per_step[-1]["on_demand_fetches"] == 0 < run.per_step[-1]["h2d_bytes"]


@pytest.mark.parametrize("system", MANAGED)
def test_an_evaluation_may_be_the_first_to_read(system: str) -> None:
    chosen, options = SYSTEMS[system]
    expected, micro = reference("tied-by-hand", steps=4), tokens(1, 1)[0, 0]
    with start(RESIDENT, built("tied-by-hand"), settings(clip=1.0)) as resident, torch.no_grad():
        before = squared_error(resident, micro, 1).item()
    engine = start(chosen, built("tied-by-hand"), settings(clip=1.0, device_memory=budget_of(expected, 0.7)), options)
    with torch.inference_mode():
        assert squared_error(engine, micro, 1).item() == before
    assert_equal(expected, train(engine, tokens(4, 1), squared_error))


class Around(nn.Module):
    """A module that owns nothing and reads what its child owns, called through the model and by itself."""

    def __init__(self) -> None:
        super().__init__()
        self.within = nn.Sequential(TiedByHand())
        self.tail = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.tail(self.within(x))


@pytest.mark.parametrize("system", MANAGED)
@pytest.mark.one_in(2)
def test_a_module_around_units_reads_for_the_model(system: str) -> None:
    def run(chosen: Any, options: Any, budget: int) -> tuple[Run, list[torch.Tensor]]:
        torch.manual_seed(0)
        model, seen = Around(), []
        engine = start(chosen, model, settings(device_memory=budget), options)
        losses = []
        for batch in tokens(STEPS, 1):
            with torch.no_grad():
                seen.append(model.within(features(batch[0])))
            losses.append(one_step(engine, batch, squared_error))
        return finished(engine, losses), seen

    (expected, outputs), (got, same) = run(RESIDENT, None, 1 << 30), run(*SYSTEMS[system], 300_000)
    assert_equal(expected, got)
    assert all(map(torch.equal, outputs, same))


class Editor(Stack):
    def forward(self, x: torch.Tensor) -> torch.Tensor:
        with torch.no_grad():
            self.blocks[1].up.weight.mul_(0.5)
        return super().forward(x)


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_edit_of_what_another_owns_is_refused_and_names_both(system: str) -> None:
    torch.manual_seed(0)
    chosen, options = SYSTEMS[system]
    with (
        start(chosen, Editor(), settings(), options) as engine,
        pytest.raises(HiddenUseError, match=r"blocks\.1\.up\.weight outside the unit that owns it, in module <root>, and edi"),
    ):
        one_step(engine, tokens(1, 1)[0], squared_error)


def test_what_does_not_fit_beside_it_names_both() -> None:
    class Greedy(Stack):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            x = super().forward(x)
            return x * sum(block.up.weight[0] for block in self.blocks)

    torch.manual_seed(0)
    with (
        start(RANDOM, Greedy(), settings(device_memory=60_000)) as engine,
        pytest.raises(RuntimeError, match=r"reads parameter blocks\.\d\.up\.weight .* in module <root>, for which there is"),
    ):
        one_step(engine, tokens(1, 1, batch=1)[0], squared_error)


def tiny(name: str) -> Any:
    torch.manual_seed(0)
    same: dict[str, Any] = dict(vocab_size=64, hidden_size=32, num_attention_heads=4, intermediate_size=64)
    still = dict(hidden_dropout_prob=0.0, attention_probs_dropout_prob=0.0, num_hidden_layers=3)
    if name == "squeezebert":
        return transformers.SqueezeBertForMaskedLM(transformers.SqueezeBertConfig(**same, **still, embedding_size=32))
    if name == "mobilebert":
        config = transformers.MobileBertConfig(**same, **still, embedding_size=16, intra_bottleneck_size=32)
        return transformers.MobileBertForMaskedLM(config)
    more = dict(pronunciation_vocab_size=64, shape_vocab_size=64)
    return transformers.RoCBertForMaskedLM(transformers.RoCBertConfig(**same, **still, **more))


@pytest.mark.slow
@pytest.mark.parametrize("name", ["squeezebert", "mobilebert", "roc_bert"])
def test_architectures_that_do_so(name: str) -> None:
    def loss(model: Any, micro: torch.Tensor, count: int) -> torch.Tensor:
        found: torch.Tensor = model(input_ids=micro % 64, labels=micro % 64).loss
        return found

    expected = train(start(RESIDENT, tiny(name).train(), settings()), tokens(5, 1), loss)
    for chosen, options in SYSTEMS.values():
        for share in (0.65, 1.2):
            engine = start(chosen, tiny(name).train(), settings(device_memory=budget_of(expected, share)), options)
            assert_equal(expected, train(engine, tokens(5, 1), loss))


class ReadsAhead(nn.Module):
    """Multiplies by a weight of the block behind it, which autograd is not told of."""

    def __init__(self, owner: nn.Linear) -> None:
        super().__init__()
        self.own, self._owner = nn.Parameter(0.3 * torch.randn(DIM, DIM)), (owner,)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return F.linear(x, self.own) + F.linear(x, self._owner[0].weight.detach())


class Ahead(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        owner = nn.Linear(DIM, DIM)
        self.stem, self.blocks, self.head = nn.Linear(DIM, DIM), nn.ModuleList([ReadsAhead(owner), owner]), nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.stem(x.to(self.stem.weight.dtype))
        for block in self.blocks:
            x = block(x).tanh()
        return self.head(x)


@pytest.mark.parametrize("nonfinite", ["skip", "stop"])
@pytest.mark.parametrize("system", with_option("nonfinite", "stop"))
def test_a_weight_that_an_earlier_block_read_stays_until_that_block_s_backward_is_over(system: str, nonfinite: str) -> None:
    """Also in a bundle that the reader has weights of its own in: nothing is written over it, and no update runs ahead."""

    def trained(chosen: Any, options: Any = None) -> Run:
        torch.manual_seed(0)
        return train(start(chosen, Ahead(), settings(), options), tokens(STEPS + 1, 1), squared_error)

    chosen, options = with_option("nonfinite", nonfinite)[system]
    assert_equal(trained(RESIDENT), trained(chosen, options))
