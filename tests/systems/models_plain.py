"""Plain PyTorch models that a user might bring, each with a feature that managing a model could get wrong.

Their input is made from token numbers, so that the loops for language models serve them too: `Case.loss` has the signature
of `models_small.next_token_loss`.
"""

from __future__ import annotations

import random
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Any

import numpy
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint

DIM = 48
LENGTH = 16  # of a row of token numbers
Model = Callable[..., Any]


def features(ids: torch.Tensor) -> torch.Tensor:
    """Token numbers [batch, LENGTH] as [batch, DIM] floats."""
    spread = ids.float().div(128.0).sub(1.0)
    return torch.cat([spread, spread.square(), spread.sin()], dim=-1)


def squared_error(model: Model, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Distance of the output, a tensor [batch, DIM], from a fixed function of the input; summed, over the count."""
    output = model(features(ids))
    return (output.float() - features(ids).roll(1, -1)).square().sum() / count


class Block(nn.Module):
    """Residual block with a norm: x + W2 relu(W1 norm(x))."""

    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(DIM)
        self.up = nn.Linear(DIM, 2 * DIM)
        self.down = nn.Linear(2 * DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.up.weight.dtype)
        return x + self.down(torch.relu(self.up(self.norm(x))))


class Stack(nn.Module):
    """Blocks in a ModuleList, a linear head."""

    def __init__(self, block: Callable[[], nn.Module] = Block, count: int = 4) -> None:
        super().__init__()
        self.blocks: Any = nn.ModuleList([block() for _ in range(count)])
        self.head = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x)


class KeywordBlock(nn.Module):
    """Takes keywords only and returns a dict in a list."""

    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, *, state: Mapping[str, torch.Tensor]) -> list[dict[str, torch.Tensor]]:
        return [{"hidden": self.inner(state["hidden"])}]


class KeywordStack(Stack):
    def __init__(self) -> None:
        super().__init__(KeywordBlock)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            (out,) = block(state={"hidden": x})
            x = out["hidden"]
        return self.head(x)


@dataclass
class BlockOutput:
    hidden: torch.Tensor
    bias: torch.Tensor  # handed on untouched, as T5's position bias is


class DataclassBlock(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.inner = Block()

    def forward(self, hidden: torch.Tensor, bias: torch.Tensor) -> BlockOutput:
        return BlockOutput(self.inner(hidden + bias), bias)


class DataclassStack(Stack):
    """The bias is made once by a module of its own and goes through every block."""

    def __init__(self) -> None:
        super().__init__(DataclassBlock)
        self.make_bias = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out = BlockOutput(x.to(self.head.weight.dtype), self.make_bias(x.to(self.head.weight.dtype)))
        for block in self.blocks:
            out = block(out.hidden, out.bias)
        return self.head(out.hidden)


class RootOwner(Stack):
    """The root owns a matrix, a scalar (zero-dim) and a single element, used before, between and after the blocks."""

    def __init__(self) -> None:
        super().__init__()
        self.mix = nn.Parameter(torch.eye(DIM) + 0.01 * torch.randn(DIM, DIM))
        self.gain = nn.Parameter(torch.tensor(0.7))
        self.shift = nn.Parameter(torch.tensor([0.1]))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.mix.dtype) @ self.mix
        for block in self.blocks:
            x = block(x) * self.gain + self.shift
        return self.head(x @ self.mix.t())


class UnusedOutput(Stack):
    """A module runs and its output goes nowhere; another is never called."""

    def __init__(self) -> None:
        super().__init__()
        self.side = nn.Linear(DIM, DIM)
        self.idle = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
            self.side(x)
        return self.head(x)


class NeverCalled(Stack):
    """A module that no step uses, beside one that every step does."""

    def __init__(self) -> None:
        super().__init__()
        self.idle = nn.Linear(DIM, DIM)


class FrozenTrunk(Stack):
    """Only the head trains, so that backward passes no frozen block."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in self.blocks.parameters():
            parameter.requires_grad_(False)


class FrozenMiddle(Stack):
    """Backward goes through frozen blocks to reach a trainable one, and one block has half its parameters frozen."""

    def __init__(self) -> None:
        super().__init__()
        for parameter in (*self.blocks[1].parameters(), *self.blocks[2].parameters(), *self.blocks[3].up.parameters()):
            parameter.requires_grad_(False)


class SharedWeight(Stack):
    """Two modules, far apart, are given one weight; a third block is one of the list's under another name."""

    def __init__(self) -> None:
        super().__init__()
        self.stem = nn.Linear(DIM, DIM, bias=False)
        self.head.weight = self.stem.weight
        self.again = self.blocks[1]

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.again(self.stem(x.to(self.stem.weight.dtype))))


class CalledTwice(Stack):
    """Every block is called twice in a row: what leaves the first call is what enters the second."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(block(x))
        return self.head(x)


class Rounds(Stack):
    """The whole tower is gone through twice, as ALBERT's groups are."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in (*self.blocks, *self.blocks):
            x = block(x)
        return self.head(x)


class Siamese(Stack):
    """One tower on two inputs whose backward passes interleave."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        left, right = x, x.flip(-1)
        for block in self.blocks:
            left, right = block(left), block(right)
        return self.head(left * right)


class NoList(nn.Module):
    """No ModuleList: every Linear is a unit. One parameter has no elements."""

    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(DIM, 2 * DIM), nn.GELU(), nn.Linear(2 * DIM, DIM), nn.LayerNorm(DIM))
        self.tail = nn.Linear(DIM, DIM)
        self.nothing = nn.Parameter(torch.empty(0, DIM))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.body(x.to(self.tail.weight.dtype))
        return self.tail(x) + self.nothing.sum()


class InPlaceBlock(Block):
    """Edits its input and returns that very object."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x += self.down(torch.relu(self.up(self.norm(x.clone()))))
        return x


class InPlace(Stack):
    def __init__(self) -> None:
        super().__init__(InPlaceBlock)
        self.stem = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return super().forward(self.stem(x.to(self.stem.weight.dtype)))


class LateLeafBlock(Block):
    """Its first argument is used last and its weights come out of other parameters: backward has work left after it."""

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(DIM, 1))

    def forward(self, late: torch.Tensor, x: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        weight = self.scale * torch.tanh(self.up.weight[:DIM])
        x = x.to(weight.dtype)
        return x + self.down(torch.relu(self.up(self.norm(x @ weight)))) + late.to(weight.dtype)


class LateLeaf(Stack):
    """The blocks' first argument is a leaf that wants a gradient, as in adversarial training."""

    def __init__(self) -> None:
        super().__init__(LateLeafBlock)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(torch.full((1, DIM), 0.1, requires_grad=True), x)
        return self.head(x)


class Reentrant(Stack):
    """Checkpoints of the old kind around two modules at a time, one of them shared by all pairs."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x.to(self.head.weight.dtype))
        for block in self.blocks:
            x = checkpoint(lambda v, block=block: self.head(block(v)), x, use_reentrant=True)
        return x


class ReentrantRounds(Stack):
    """A reentrant checkpoint a block, and every block twice: its gradients fire twice in one backward pass."""

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x.to(self.head.weight.dtype))
        for block in (*self.blocks, *self.blocks):
            x = checkpoint(block, x, use_reentrant=True)
        return self.head(x)


class Parametrized(Stack):
    """Weights computed from other parameters by torch's own parametrization, outside a list and inside one."""

    def __init__(self) -> None:
        super().__init__()
        weight_norm: Any = nn.utils.parametrizations.weight_norm
        weight_norm(self.head)
        for block in self.blocks:
            weight_norm(block.up)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x.to(self.blocks[0].down.weight.dtype))
        return self.head(x)


class Recurrent(nn.Module):
    """torch's LSTM keeps a second list of its weights; its encoder layers make a ModuleList."""

    def __init__(self) -> None:
        super().__init__()
        self.lstm = nn.LSTM(DIM, DIM, num_layers=2, batch_first=True)
        layer = nn.TransformerEncoderLayer(DIM, 4, 2 * DIM, dropout=0.0, batch_first=True)
        self.encoder = nn.TransformerEncoder(layer, 2, enable_nested_tensor=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        out, _ = self.lstm(x.to(next(self.parameters()).dtype).unsqueeze(1))
        return self.encoder(out).squeeze(1)


class Adapted(nn.Module):
    """A frozen linear layer with a trainable correction of low rank."""

    def __init__(self, base: nn.Linear) -> None:
        super().__init__()
        self.base = base.requires_grad_(False)
        self.a = nn.Parameter(0.1 * torch.randn(4, base.in_features))
        self.b = nn.Parameter(0.1 * torch.randn(base.out_features, 4))
        self.weight = base.weight  # its dtype is asked for

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.base(x) + x @ self.a.t() @ self.b.t()


class Adapters(Stack):
    """Fine-tuning by adapters: frozen weights are needed after a block's last gradient, on the way to its input."""

    def __init__(self) -> None:
        super().__init__()
        for block in self.blocks:
            block.norm.requires_grad_(False)
            block.up, block.down = Adapted(block.up), Adapted(block.down)


class ListsOfLists(Stack):
    """Stages of blocks, and a list of one block and one norm a stage: only the inner lists have what is called."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.ModuleList([Block(), Block()]), 2)
        self.joints: Any = nn.ModuleList([nn.ModuleList([Block(), nn.LayerNorm(DIM)]) for _ in self.blocks])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for stage, joint in zip(self.blocks, self.joints, strict=True):
            for each in (*stage, *joint):
                x = each(x)
        return self.head(x)


class Containers(Stack):
    """Parameters in a list, in a dict and in a bare module, none of which is ever called: their owner uses them."""

    def __init__(self) -> None:
        super().__init__()
        self.shifts = nn.ParameterList([nn.Parameter(0.1 * torch.randn(DIM)) for _ in self.blocks])
        self.kinds = nn.ModuleDict({"a": nn.ParameterDict({"gain": nn.Parameter(torch.ones(DIM))})})
        self.bag = nn.Module()
        self.bag.mix = nn.Parameter(torch.eye(DIM))
        self.bag.joint = nn.Linear(DIM, DIM)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        bag, kinds = self.bag, self.kinds
        x = bag.joint(x.to(self.head.weight.dtype) @ bag.mix)  # type: ignore[operator]
        for block, shift in zip(self.blocks, self.shifts, strict=True):
            x = block(x) * kinds["a"].gain + shift
        return self.head(x)


class SilentBlock(Block):
    """Returns nothing: its output is in the dict that it was given, and a penalty on itself."""

    def forward(self, state: dict[str, torch.Tensor]) -> None:  # type: ignore[override]
        state["hidden"] = super().forward(state["hidden"])
        self.penalty = torch.tanh(self.up(state["hidden"])).square().mean()


class Silent(Stack):
    def __init__(self) -> None:
        super().__init__(SilentBlock)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        state = {"hidden": x.to(self.head.weight.dtype)}
        for block in self.blocks:
            block(state)
        return self.head(state["hidden"]) + sum(block.penalty for block in self.blocks)


class StatefulBlock(Block):
    """Averages in a buffer, counts in an attribute, draws from three generators, edits its list: run again, it must not."""

    mean: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        random.seed(0)
        numpy.random.seed(0)
        self.register_buffer("mean", torch.zeros(DIM))
        self.batch_norm = nn.BatchNorm1d(DIM, affine=False)
        self.calls, self.own = 0, torch.Generator().manual_seed(0)

    def forward(self, states: list[torch.Tensor]) -> list[torch.Tensor]:  # type: ignore[override]
        self.calls += 1
        x = super().forward(states.pop())
        self.mean.lerp_(x.detach().float().mean(0), 0.1)
        drawn = random.random() + numpy.random.rand() + torch.rand(DIM, generator=self.own) + self.calls
        x = x + self.down(torch.relu(self.up(x + (self.mean + 0.1 * drawn).to(x.dtype))))
        states.append(self.batch_norm(x.float()).to(x.dtype))
        return states


class Stateful(Stack):
    def __init__(self) -> None:
        super().__init__(StatefulBlock)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        states = [x.to(self.head.weight.dtype)]
        for block in self.blocks:
            states = block(states)
        return self.head(states[0])


class Attention(Stack):
    """Attention computes in another order where its three arguments are one object."""

    def __init__(self) -> None:
        super().__init__(lambda: nn.MultiheadAttention(DIM, 4))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.head.weight.dtype)
        for block in self.blocks:
            x = x + block(x, x, value=x, need_weights=False)[0]
        return self.head(x)


@dataclass(frozen=True)
class Case:
    build: Callable[[], nn.Module]
    loss: Callable[[Model, torch.Tensor, int], torch.Tensor] = squared_error


CASES: Mapping[str, Case] = MappingProxyType(
    {
        "stack": Case(Stack),
        "keywords": Case(KeywordStack),
        "dataclass": Case(DataclassStack),
        "root-owner": Case(RootOwner),
        "unused-output": Case(UnusedOutput),
        "never-called": Case(NeverCalled),
        "frozen-trunk": Case(FrozenTrunk),
        "frozen-middle": Case(FrozenMiddle),
        "shared-weight": Case(SharedWeight),
        "called-twice": Case(CalledTwice),
        "rounds": Case(Rounds),
        "siamese": Case(Siamese),
        "no-list": Case(NoList),
        "in-place": Case(InPlace),
        "late-leaf": Case(LateLeaf),
        "reentrant": Case(Reentrant),
        "reentrant-rounds": Case(ReentrantRounds),
        "parametrized": Case(Parametrized),
        "recurrent": Case(Recurrent),
        "adapters": Case(Adapters),
        "lists-of-lists": Case(ListsOfLists),
        "containers": Case(Containers),
        "silent": Case(Silent),
        "stateful": Case(Stateful),
        "attention": Case(Attention),
    }
)


def build(name: str, seed: int = 0) -> Any:
    """In training mode. Any: tests reach into models by attribute."""
    torch.manual_seed(seed)
    return CASES[name].build().train()
