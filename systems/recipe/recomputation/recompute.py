"""Recomputation: which blocks throw their activations away in forward and run again in backward.

By torch.utils.checkpoint, non-reentrant, around a block's `forward`, so that the unit's hooks stay outside of it.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any, Literal

import torch
from torch import nn
from torch.utils.checkpoint import CheckpointError, checkpoint

from systems.errors import UnsupportedError
from systems.recipe.model.calls import forward_of_copy, put_back
from systems.recipe.model.units import FoundModel
from systems.recipe.recomputation.repeats import Repeats, RepeatsOfBlock
from systems.recipe.recomputation.replay import Replay, own_containers


def recomputed_units(found: FoundModel, choice: Literal["none", "full"] | tuple[int, ...]) -> frozenset[int]:
    """The units of the chosen blocks. Raises ValueError for a block number the model does not have."""
    blocks = {unit.block: unit.index for unit in found.index.units if unit.block is not None}
    chosen = {"none": (), "full": tuple(blocks)}[choice] if isinstance(choice, str) else choice
    unknown = [number for number in chosen if number not in blocks]
    if unknown:
        raise ValueError(f"recompute: there is no block {unknown[0]}: the model has blocks 0 to {len(blocks) - 1}")
    return frozenset(blocks[number] for number in chosen)


def apply_recompute(
    found: FoundModel, choice: Literal["none", "full"] | tuple[int, ...], repeats: Repeats | None = None
) -> Callable[[], None]:
    """Wrap the chosen blocks; returns what undoes it. Raises ValueError for a block number the model does not have.

    repeats: of an engine that asks it at each step.
    """
    repeats = Repeats(later=False) if repeats is None else repeats
    wrapped = [_wrap(found, unit, repeats) for unit in sorted(recomputed_units(found, choice))]

    def undo() -> None:
        for forward in wrapped:
            forward.undo()

    return undo


class Recomputation:
    """Blocks that a strategy may have recomputed: each is wrapped once, and `units` is looked up when it runs.

    units: those recomputed from now on. input_bytes: per unit the size of its hidden state, its first tensor argument.
    repeats: of all recomputed blocks.
    """

    def __init__(self, found: FoundModel, units: frozenset[int]) -> None:
        self.units, self.repeats = units, Repeats()
        self.input_bytes: dict[int, int] = {}
        self._wrapped = [_wrap(found, unit, self.repeats, functools.partial(self._recomputes, unit)) for unit in sorted(units)]

    def switch(self, units: frozenset[int]) -> None:
        """Recomputed from now on."""
        self.units = units

    def _recomputes(self, unit: int, args: tuple[Any, ...]) -> bool:
        hidden = next((a for a in args if isinstance(a, torch.Tensor)), None)
        self.input_bytes[unit] = 0 if hidden is None else hidden.nbytes
        return unit in self.units

    def undo(self) -> None:
        for forward in self._wrapped:
            forward.undo()


def switchable(
    found: FoundModel, may: frozenset[int] | None, choice: Literal["none", "full"] | tuple[int, ...]
) -> tuple[Recomputation, Callable[[], None]]:
    """may: units that the strategy may recompute; None has those of `choice` recomputed for good. With what undoes it."""
    if may is None:
        none = Recomputation(found, frozenset())
        return none, apply_recompute(found, choice, none.repeats)
    recomputation = Recomputation(found, may)
    return recomputation, recomputation.undo


def _always(args: tuple[Any, ...]) -> bool:
    return True


class _Wrapped:
    """A block's `forward` from now on. run: calls what was there before."""

    def __init__(self, module: nn.Module, run: Callable[..., Any]) -> None:
        functools.update_wrapper(self, module.forward)
        self._module, self._own, self._run = module, module.__dict__.get("forward"), run
        module.forward = self

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._run(*args, **kwargs)

    def __reduce__(self) -> Any:
        return forward_of_copy(self._module, self._own)

    def undo(self) -> None:
        put_back(self._module, self, self._own)


def _wrap(found: FoundModel, unit: int, repeats: Repeats, recomputes: Callable[[tuple[Any, ...]], bool] = _always) -> _Wrapped:
    module = found.modules[unit]
    forward, replay, of_block = module.forward, Replay(module), RepeatsOfBlock(repeats, found.index.units[unit].name, module)

    def recomputed(*args: Any, **kwargs: Any) -> Any:
        if not recomputes(args) or not torch.is_grad_enabled():
            return forward(*args, **kwargs)
        given, same, began, saves = [(args, kwargs)], _same_objects(args, kwargs), replay.take(), of_block.call()

        def run(*args: Any, **kwargs: Any) -> Any:
            if given:  # the forward itself, which may change what it was given
                mine, more = given.pop()
                with saves.forward():
                    output = forward(*mine, **more)
                replay.learn(began)
                return output
            values: dict[Any, Any] = own_containers(dict(enumerate(args)) | kwargs)
            values |= {again: values[first] for again, first in same.items()}
            mine = tuple(values.pop(i) for i in range(len(args)))
            with replay.again(began), saves.again():
                return began.context.copy().run(forward, *mine, **values)

        return checkpoint(run, *own_containers(args), use_reentrant=False, **own_containers(kwargs))

    return _Wrapped(module, recomputed)


@contextmanager
def recomputation_in_words() -> Iterator[None]:
    """Around a backward pass: what torch says of a block that did not repeat itself, in one line that tells what to do."""
    try:
        yield
    except CheckpointError as error:
        first = str(error).partition("\n")[0].removeprefix("torch.utils.checkpoint: ").rstrip(".")
        raise UnsupportedError(
            f"a recomputed block did not do again what it did in its forward ({first}): it depends on something that it "
            "changes, outside of the model and of what it is given: take that out, or recompute='none'"
        ) from error


def _same_objects(args: tuple[Any, ...], kwargs: dict[str, Any]) -> dict[int | str, int | str]:
    """Arguments that are a tensor given before, to that one: attention asks `query is key`, and checkpoint gives it copies."""
    first: dict[int, int | str] = {}
    places: list[tuple[int | str, Any]] = [*enumerate(args), *kwargs.items()]
    return {
        place: first[id(value)]
        for place, value in places
        if isinstance(value, torch.Tensor) and first.setdefault(id(value), place) != place
    }
