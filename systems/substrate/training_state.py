"""The state of a managed engine, parameter by parameter, for checkpoints; see systems.checkpoint."""

from __future__ import annotations

from collections.abc import Sequence

import torch

from systems.checkpoint import Described, Part, SavedParameter
from systems.planning.layout import ModelIndex
from systems.recipe.step.control import StepControl
from systems.substrate.bundle.values import StoredValues


class ManagedState:
    """Call only when drained, outside a step. Reading is the same work on all ranks, writing each rank's own."""

    def __init__(self, index: ModelIndex, *, values: StoredValues, control: StepControl) -> None:
        self._values, self.control = values, control
        self.optimizer, self.moments = control.groups.chosen.kept
        self.parameters = [Described(p.name, tuple(p.shape), p.trainable) for p in index.parameters]

    def meet(self) -> None:
        return

    def updates(self, parameter: int) -> int:
        return self.control.updates[parameter]

    def of_expert_rank(self, which: int, parameter: int, part: Part, onto: int | None) -> torch.Tensor | None:
        return self._values.of_expert_rank(which, parameter, part, onto)

    def read(self, parameter: int, part: Part) -> torch.Tensor:
        values, shape = self._values, self.parameters[parameter].shape
        return values.parameter(parameter, shape) if part == "value" else values.moment(parameter, part).view(shape)

    def bring(self, parameter: int, part: Part, onto: int) -> torch.Tensor | None:
        found = self._values.bring(parameter, part, onto)
        return None if found is None else found.view(self.parameters[parameter].shape)

    def write(self, parameter: int, state: SavedParameter, updates: int) -> None:
        self._values.overwrite_parameter(parameter, state.value)
        if state.moments is not None:
            self.write_moments(parameter, state.moments)
        self.control.updates[parameter] = updates

    def write_moments(self, parameter: int, moments: Sequence[torch.Tensor]) -> None:
        self._values.overwrite_moments(parameter, [each.reshape(-1) for each in moments])
