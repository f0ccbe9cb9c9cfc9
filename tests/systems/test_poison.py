"""A released parameter reads NaN, and a use of it where nobody put it is refused by name (invariant 3, case C01)."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from functools import cache
from typing import Any

import pytest
import torch
from torch import nn

from systems.errors import HiddenUseError
from systems.system import Engine
from tests.systems.every import MANAGED
from tests.systems.models_plain import Stack, squared_error
from tests.systems.models_small import build, tokens
from tests.systems.running import (
    RANDOM,
    RESIDENT,
    Run,
    assert_equal,
    managed,
    one_step,
    parameters_of,
    settings,
    start,
    train,
)
from tests.systems.setups import in_turn

TIGHT = 180_000  # bytes: half of what Borrower needs
LITTLE_AT_ONCE = ("elixir", "random")  # is all that they bring; a whole block does not fit into that half


class Borrower(Stack):
    """A module outside the first block uses the block's weights: in a sum, whose backward does not read them, or a product."""

    def __init__(self, use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> None:
        super().__init__()
        self.use = use

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(self.use(x, self.blocks[0].up.weight[0]))


def add(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return x + row


def multiply(x: torch.Tensor, row: torch.Tensor) -> torch.Tensor:
    return x * row


def borrower(use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Borrower:
    torch.manual_seed(0)
    return Borrower(use)


def drop_everything(engine: Engine) -> None:
    residency = managed(engine).residency
    for index in residency.room.evictable():
        residency.drop(index)


@pytest.mark.parametrize(("system", "dtype"), in_turn(MANAGED, [("fp32",), ("bf16",), ("fp16",)]))
def test_a_released_parameter_is_nan_everywhere(system: str, dtype: str) -> None:
    model = build("gpt2")
    with start(MANAGED[system], model, settings(dtype=dtype)) as engine:
        inside: list[bool] = []
        model.transformer.h[1].register_forward_pre_hook(
            lambda module, args: inside.append(any(p.isnan().any().item() for p in module.parameters()))
        )
        one_step(engine, tokens(1, 1)[0])
        drop_everything(engine)
        pinned = {b.index for b in managed(engine).layout.bundles if managed(engine).residency.bundles[b.index].block}
        bundle_of = managed(engine).layout.bundle_of_parameter
        released = [p for i, p in enumerate(model.parameters()) if bundle_of[i] not in pinned]
        assert inside == [False], "a unit's own parameters are there while it runs"
        if system == "random":
            assert len(released) == len(list(model.parameters()))
        assert all(p.isnan().all() for p in released)


@cache
def borrowing_resident(use: Callable[[torch.Tensor, torch.Tensor], torch.Tensor]) -> Run:
    return train(start(RESIDENT, borrower(use), settings()), tokens(4, 1), squared_error)


@pytest.mark.parametrize(("system", "use"), in_turn(MANAGED, [(add,), (multiply,)]))
def test_a_borrowed_weight_is_held_for_who_borrows_it(system: str, use: Any) -> None:
    for budget in (*([TIGHT] if system in LITTLE_AT_ONCE else []), 250_000, 1 << 30):
        run = train(start(MANAGED[system], borrower(use), settings(device_memory=budget)), tokens(4, 1), squared_error)
        assert_equal(borrowing_resident(use), run)
        assert run.engine.layout.bundles_of_unit[run.engine.index.units[-1].index]  # type: ignore[attr-defined]


@pytest.mark.parametrize(("use", "where"), [(add, "forward"), (multiply, "forward"), (multiply, "backward")])
def test_a_borrowed_weight_stays_though_everything_else_goes(use: Any, where: str) -> None:
    ids = tokens(3, 1)
    expected = train(start(RESIDENT, borrower(use), settings()), ids, squared_error)
    model = borrower(use)
    engine = start(RANDOM, model, settings())
    point = model.blocks[3] if where == "forward" else model.head
    point.register_forward_hook(lambda *_: drop_everything(engine))
    assert_equal(expected, train(engine, ids, squared_error))


def test_a_sum_with_a_stale_weight_needs_no_value_in_backward() -> None:
    """The gradient reaches the borrowed weight outside of its unit's backward and is counted all the same."""
    ids = tokens(3, 2)
    expected = train(start(RESIDENT, borrower(add), settings(accumulate=2)), ids, squared_error)
    model = borrower(add)
    engine = start(RANDOM, model, settings(accumulate=2))
    model.head.register_forward_hook(lambda *_: drop_everything(engine))
    assert_equal(expected, train(engine, ids, squared_error))


def total(model: nn.Module) -> float:
    return sum(p.detach().float().abs().sum().item() for p in model.parameters())


@pytest.mark.parametrize(  # the hook keeps copies
    ("system", "budget"), in_turn(MANAGED, [(2 * TIGHT,), (300_000,), (1 << 30,)], each=2)
)
@pytest.mark.one_in(2)
def test_reads_between_steps_are_true_or_nan(system: str, budget: int) -> None:
    """Or refused; never zero, empty or old: between steps, after step() and in a user's hook, parameter by parameter."""
    torch.manual_seed(0)
    model = Stack()
    names = dict(model.named_parameters())
    seen: list[dict[str, torch.Tensor]] = []

    def look(*_: Any) -> None:
        seen.append({})
        for name, p in names.items():
            with contextlib.suppress(HiddenUseError):  # an error is an answer too
                seen[-1][name] = p.detach().clone()

    with start(MANAGED[system], model, settings(device_memory=budget)) as engine:
        handle = model.blocks[2].register_forward_hook(look)
        for batch in tokens(4, 1):
            before = parameters_of(engine)
            look()
            one_step(engine, batch, squared_error)
            check_reads(seen, before)
            assert len(seen) == 2 and len(seen[0]) == len(names), "nothing is refused outside of forward"
            assert seen[1] or system not in LITTLE_AT_ONCE, "void: nothing was there to read"
            seen.clear()
            look()
            check_reads(seen, parameters_of(engine))
            assert len(seen[0]) == len(names)
            seen.clear()
        handle.remove()


def check_reads(seen: list[dict[str, torch.Tensor]], truth: dict[str, torch.Tensor]) -> None:
    assert seen
    for reads in seen:
        for name, value in reads.items():
            assert value.isnan().all() or torch.equal(value, truth[name]), f"{name} is neither true nor NaN"


def test_a_write_to_a_released_parameter_is_said_and_undone() -> None:
    torch.manual_seed(0)
    model = Stack()
    with start(RANDOM, model, settings()) as engine:
        drop_everything(engine)
        model.head.weight.detach().numpy().fill(1.0)  # numpy hides the edit from autograd's version counter
        with pytest.raises(RuntimeError, match="a released parameter was written"):
            one_step(engine, tokens(1, 1)[0], squared_error)
        drop_everything(engine)
        assert model.head.weight.isnan().all()
        expected = train(start(RESIDENT, fresh_stack(), settings()), tokens(2, 1), squared_error)
        assert_equal(expected, train(engine, tokens(2, 1), squared_error))


def fresh_stack() -> nn.Module:
    torch.manual_seed(0)
    return Stack()
