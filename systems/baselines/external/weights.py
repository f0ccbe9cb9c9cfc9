"""What another package takes over: a model that it can train, with initial values as every other system's, to the bit."""

from __future__ import annotations

from collections.abc import Iterable

import torch
from torch import nn

from systems.errors import UnsupportedError
from systems.ranks.beginnings import FirstValuesAlike
from systems.ranks.ranks import Ranks
from systems.recipe.model.adoption import initial_values, refuse_mixed_dtypes
from systems.recipe.model.units import FoundModel, find_units
from systems.settings import Settings


def find_weights(model: nn.Module, settings: Settings, system: str) -> FoundModel:
    """UnsupportedError for a model that a package would train otherwise than it says, or not at all."""
    found = find_units(model)
    if not found.trains:
        raise UnsupportedError(f"no parameter of the model requires a gradient: {system} has nothing to train")
    for name, parameter in found.carried.items():
        raise UnsupportedError(
            f"parameter {name} is frozen in {parameter.dtype}, which {system} has no place for: take one of this project's own "
            "strategies, or resident"
        )
    refuse_mixed_dtypes(found, settings.dtype)
    return found


class Masters:
    """The first fp32 value of every parameter, by number.

    A model that comes with values of its own is about to lose them to the package's 16-bit copies, so they are kept
    until they have been read a second time; values that a generator makes are made again.
    """

    def __init__(self, found: FoundModel, settings: Settings, ranks: Ranks) -> None:
        self._fill = initial_values(found, settings)
        self._alike = FirstValuesAlike(ranks, found.index.parameters, self._first)
        self._shapes = [tuple(p.shape) for p in found.parameters]
        self._kept: dict[int, torch.Tensor] = {}
        if settings.initial_weights is None:
            self._kept = {number: p.detach() for number, p in enumerate(found.parameters)}

    def value(self, number: int, device: torch.device | None = None) -> torch.Tensor:
        """fp32, contiguous, a tensor of its own."""
        out = torch.empty(self._shapes[number], dtype=torch.float32, device=device)
        self._alike.fill(number, out)
        return out

    def _first(self, number: int, out: torch.Tensor) -> None:
        if number in self._kept:
            out.copy_(self._kept[number])
        else:
            self._fill(number, out)

    def check_alike(self) -> None:
        """UnsupportedError on all ranks where they do not have the same values: see FirstValuesAlike."""
        self._alike.check()

    def forget(self, number: int) -> None:
        """Its value is not needed any more."""
        self._kept.pop(number, None)


def materialise(
    found: FoundModel,
    masters: Masters,
    dtype: torch.dtype,
    *,
    device: torch.device | None = None,
    drawn_on: torch.device | None = None,
    numbers: Iterable[int] | None = None,
) -> list[nn.Parameter]:
    """Give every parameter its first value, rounded to dtype. Those on the meta device are replaced by new objects.

    device: where they are left, by default the CPU. drawn_on: where values are made, one at a time; a GPU is faster.
    numbers: of the parameters, by default all.
    """
    parameters: list[nn.Parameter] = []
    for number in range(len(found.parameters)) if numbers is None else numbers:
        old = found.parameters[number]
        value = masters.value(number, drawn_on or device).to(device=device or torch.device("cpu"), dtype=dtype)
        if old.is_meta:
            old = nn.Parameter(value, requires_grad=old.requires_grad)
            for module, attribute in found.owners[number]:
                module._parameters[attribute] = old
        else:
            old.data, old.grad = value, None
        parameters.append(old)
    return parameters
