"""What units were given and what they made of it, call by call, as far as a gradient goes through it."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import torch
from torch import nn

from systems.planning.layout import ModelIndex
from systems.recipe.model.unit_tensors import Kept, SeenTensor, TooManyValuesError, too_many, wanted


class Given:
    """Given is what a unit's call in progress was given. since: autograd's count of nodes made, as the call began."""

    __slots__ = ("inputs", "since")

    def __init__(self, inputs: Sequence[torch.Tensor]) -> None:
        self.inputs = {id(t): SeenTensor(t) for t in inputs}
        self.since = torch.autograd._get_sequence_nr()

    def passed_through(self, tensor: torch.Tensor) -> bool:
        seen = self.inputs.get(id(tensor))
        return seen is not None and seen.still(tensor)


NOTHING = Given(())


class UnitOutputs:
    """UnitOutputs is what the last call of each unit has made that wants a gradient.

    last: by unit; a tensor that goes straight into the same unit again is found there.
    """

    def __init__(self, index: ModelIndex) -> None:
        self._index = index
        self.last: dict[int, list[SeenTensor]] = {}
        self._kept: dict[int, Kept] = {}

    def of_call(self, unit: int, module: nn.Module, given: Given, places: tuple[Any, ...]) -> list[torch.Tensor]:
        """Of the call that ends now: returned, left in what it was given, or kept on the unit."""
        kept = self._kept.get(unit)
        if kept is None:
            kept = self._kept[unit] = Kept(module)
        try:
            found = wanted(places) + kept.fresh()
        except TooManyValuesError:
            raise too_many(f"module {self._index.units[unit].name}", "returns, is given or keeps") from None
        made = [t for t in {id(t): t for t in found}.values() if not given.passed_through(t)]
        self.last[unit] = [SeenTensor(t) for t in made]
        return made
