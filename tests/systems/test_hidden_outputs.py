"""Blocks whose outputs a backward hook could miss: trained as resident trains them, or refused with the true reason."""

from __future__ import annotations

from collections import OrderedDict, UserDict, deque
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from types import MappingProxyType, SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from torch import nn
from transformers.modeling_outputs import BaseModelOutput

from systems.errors import HiddenUseError
from tests.systems.every import MANAGED
from tests.systems.models_plain import DIM, Block, Stack, squared_error
from tests.systems.models_small import tokens
from tests.systems.running import (
    RANDOM,
    RESIDENT,
    Run,
    assert_equal,
    evict_at_once,
    one_step,
    parameters_of,
    settings,
    start,
    train,
)
from tests.systems.setups import SYSTEMS

STEPS = 3
Give = Callable[[torch.Tensor, torch.Tensor], Any]  # of a block's input and what it made of it
Take = Callable[[Any], torch.Tensor]


class Slots:
    __slots__ = ("__private", "t")

    def __init__(self, t: torch.Tensor) -> None:
        self.t = t


class MoreSlots(Slots):
    __slots__ = ("more",)


class Pair(NamedTuple):
    first: None
    t: torch.Tensor


@dataclass(slots=True)
class Record:
    t: torch.Tensor


class Shown:
    """The tensor is behind a property, and the object can be called."""

    def __init__(self, t: torch.Tensor) -> None:
        self._t = t

    @property
    def t(self) -> torch.Tensor:
        return self._t

    def __call__(self) -> torch.Tensor:
        return self._t


def deep(t: Any) -> Any:
    for _ in range(40):
        t = [t]
    around = {"deep": t}
    around["itself"] = around
    return around


def shallow(given: Any) -> Any:
    given = given["deep"]
    while isinstance(given, list):
        (given,) = given
    return given


def edited(x: torch.Tensor, y: torch.Tensor) -> torch.Tensor:
    x += y
    return x


KINDS: Mapping[str, tuple[Give, Take]] = MappingProxyType(
    {
        "view": (lambda x, y: y.view(-1), lambda out: out.mul_(1.1).view(-1, DIM)),
        "views": (lambda x, y: (y.t(), y.view(1, -1)), lambda out: out[0].mul_(0.9).t() + out[1].add_(0.1).view(-1, DIM)),
        "view-of-input": (lambda x, y: (x.view(-1), y), lambda out: out[0].mul_(1.1).view(-1, DIM) + out[1]),
        "edited-input": (edited, lambda out: out.mul_(1.1)),
        "edited-view": (lambda x, y: edited(x.view(-1), y.view(-1)), lambda out: out.mul_(1.1).view(-1, DIM)),
        "edited-output": (lambda x, y: y, lambda out: out.mul_(1.1).add_(0.1)),
        "detached-too": (lambda x, y: (y.detach(), y), lambda out: out[0] + out[1]),
        "slots": (lambda x, y: Slots(y), lambda out: out.t),
        "more-slots": (lambda x, y: MoreSlots(y), lambda out: out.t),
        "record": (lambda x, y: Record(y), lambda out: out.t),
        "deep": (lambda x, y: deep(y), shallow),
        "pair": (lambda x, y: Pair(None, y), lambda out: out.t),
        "model-output": (lambda x, y: BaseModelOutput(last_hidden_state=y), lambda out: out[0]),
        "ordered": (lambda x, y: OrderedDict(t=y), lambda out: out["t"]),
        "user-dict": (lambda x, y: UserDict(t=y), lambda out: out["t"]),
        "deque": (lambda x, y: deque([y]), lambda out: out[0]),
        "values": (lambda x, y: {"t": y}.values(), lambda out: next(iter(out))),
        "namespace": (lambda x, y: SimpleNamespace(t=y), lambda out: out.t),
        "property": (lambda x, y: Shown(y), lambda out: out.t),
    }
)


EDITED = {"view-of-input", "edited-input", "edited-view"}  # inputs of blocks are: H3T, which recomputes them, refuses that


class HidingBlock(Block):
    kind = ""

    def forward(self, x: torch.Tensor) -> Any:
        return KINDS[self.kind][0](x, super().forward(x.clone() if "input" in self.kind or "edited" in self.kind else x))


class Hiding(Stack):
    """kinds: of its blocks, one behind the other."""

    def __init__(self, *kinds: str) -> None:
        super().__init__(HidingBlock, len(kinds))
        for block, kind in zip(self.blocks, kinds, strict=True):
            block.kind = kind

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x.to(self.head.weight.dtype)) * 1.0
        for block in self.blocks:
            x = KINDS[block.kind][1](block(x)) * 1.0
        return x


class KeepingBlock(Block):
    """Leaves a penalty on itself, on a module of its and in a list, but not at its first calls."""

    def __init__(self) -> None:
        super().__init__()
        self.calls, self.losses = 0, list[torch.Tensor]()
        self.penalty: torch.Tensor | None = None

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        x = super().forward(x)
        self.losses.clear()
        if self.calls > 1:
            self.penalty = torch.tanh(self.up(x)).square().mean()
            self.losses.append(torch.tanh(self.up(x.sin())).square().mean())
            self.down.late = torch.tanh(self.up(x.cos())).square().mean()
        return x


class Keeping(Stack):
    def __init__(self) -> None:
        super().__init__(KeepingBlock)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = super().forward(x)
        if self.blocks[0].calls > 1:
            x = x + sum(block.penalty + block.losses[0] + block.down.late for block in self.blocks)
        return x


def keeping() -> nn.Module:
    torch.manual_seed(0)
    return Keeping()


def hiding(*kinds: str) -> nn.Module:
    torch.manual_seed(0)
    return Hiding(*kinds)


@cache
def reference(*kinds: str) -> Run:
    return train(start(RESIDENT, hiding(*kinds) if kinds else keeping(), settings()), tokens(STEPS, 1), squared_error)


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.one_in(2)
def test_nothing_is_used_after_its_release(kind: str) -> None:
    kinds = (kind, "edited-output", kind)
    engine = start(RANDOM, hiding(*kinds), settings())
    evict_at_once(engine)
    assert_equal(reference(*kinds), train(engine, tokens(STEPS, 1), squared_error))


def test_what_is_kept_at_a_later_call_is_found() -> None:
    engine = start(RANDOM, keeping(), settings())
    evict_at_once(engine)
    assert_equal(reference(), train(engine, tokens(STEPS, 1), squared_error))


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.one_in(4)
def test_every_system_equals_resident(system: str) -> None:
    chosen, options = SYSTEMS[system]
    kinds = tuple(kind for kind in KINDS if system != "h3t" or kind not in EDITED)
    for expected, model in ((reference(*kinds), hiding(*kinds)), (reference(), keeping())):
        budget = int(0.6 * (expected.memory.device_peak_bytes or 0))
        run = train(start(chosen, model, settings(device_memory=budget), options), tokens(STEPS, 1), squared_error)
        assert_equal(expected, run)


TAKES: Mapping[str, Callable[[Any, list[torch.Tensor]], torch.Tensor]] = MappingProxyType(
    {
        "generator": lambda out, made: next(out),
        "function": lambda out, made: out(),
        "list": lambda out, made: made[0],
        "too much": lambda out, made: out[0],
    }
)


class Unseen(nn.Module):
    """A block of a generator, a function, a shared list, or of too much."""

    def __init__(self, how: str) -> None:
        super().__init__()
        self.how, self.inner = how, Block()
        self.shared: Any = None

    def forward(self, x: torch.Tensor) -> Any:
        y = self.inner(x)
        if self.how == "generator":
            return (each for each in [y])
        if self.how == "function":
            return lambda: y
        if self.how == "seen":
            return y
        if self.how == "too much":
            return [y, list(range(200_000))]
        self.shared(y)
        return None


class UnseenStack(Stack):
    def __init__(self, how: str) -> None:
        super().__init__(lambda: Unseen(how))
        self.how = how

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = x.to(self.head.weight.dtype)
        for block in self.blocks:
            made: list[torch.Tensor] = []
            block.shared = made.append
            out = block(x)
            x = out if self.how == "seen" else TAKES[self.how](out, made)
        return self.head(x)


@pytest.mark.parametrize("how", TAKES)
@pytest.mark.parametrize("system", MANAGED)
@pytest.mark.one_in(3)
def test_what_cannot_be_seen_is_refused_with_the_reason(system: str, how: str) -> None:
    """In little room and in ample: in the forward where that shows it, else in the backward; and the next step is right."""
    chosen, options = SYSTEMS[system]
    ids = tokens(1, 1)[0]
    for budget in (180_000, 1 << 30):
        with start(chosen, UnseenStack(how), settings(device_memory=budget), options) as engine:
            for _ in range(2):
                with pytest.raises(HiddenUseError, match=r"module blocks\.\d .*return it in tensors, lists, dicts or"):
                    one_step(engine, ids, squared_error)
            assert not engine.outcomes


@pytest.mark.parametrize("how", ["generator", "function", "list"])
@pytest.mark.parametrize("system", MANAGED)
def test_a_gradient_that_nobody_began_says_so_where_no_operation_is_seen(system: str, how: str) -> None:
    """As in a planned step on CUDA: what was read too late is NaN, and never reaches a parameter."""
    chosen, options = SYSTEMS[system]
    with start(chosen, UnseenStack(how), settings(), options) as engine:
        engine.device.meter._check = None  # type: ignore[attr-defined]
        evict_at_once(engine)
        before = parameters_of(engine)
        for _ in range(2):
            with pytest.raises(HiddenUseError, match=r"gradient.*module blocks\.\d makes hides from the engine"):
                one_step(engine, tokens(1, 1)[0], squared_error)
        assert all(map(torch.equal, parameters_of(engine).values(), before.values()))


@pytest.mark.parametrize("system", SYSTEMS)
def test_after_a_hidden_gradient_one_whole_step_is_watched(system: str) -> None:
    """And not all that follow: on CUDA that takes time."""
    chosen, options = SYSTEMS[system]
    model = UnseenStack("function")
    with start(chosen, model, settings(), options) as engine:
        progress = engine.progress  # type: ignore[attr-defined]
        engine.device.meter._check = None  # type: ignore[attr-defined]
        with pytest.raises(HiddenUseError):
            one_step(engine, tokens(1, 1)[0], squared_error)
        assert progress.doubtful
        for part in (model, *model.blocks):
            part.how = "seen"
        squared_error(engine, tokens(1, 1)[0, 0], 1)
        engine.discard()
        assert progress.doubtful
        one_step(engine, tokens(1, 1)[0], squared_error)
        assert not progress.doubtful
