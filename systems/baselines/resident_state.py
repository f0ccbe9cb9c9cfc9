"""The state of a resident engine between two steps, for checkpoints and exports."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import nn

from systems.checkpoint import Described, Part, SavedParameter
from systems.ranks.ranks import Ranks
from systems.recipe.model.parameters import data_of
from systems.recipe.step.control import StepControl


class ResidentState:
    """See systems.checkpoint.TrainingState."""

    def __init__(
        self,
        ranks: Ranks,
        control: StepControl,
        names: Sequence[str],
        weights: Sequence[nn.Parameter],
        *,
        masters: Sequence[torch.Tensor | None],
        moments: Sequence[tuple[torch.Tensor, ...] | None],
    ) -> None:
        self._ranks, self._weights, self.control = ranks, weights, control
        self._masters, self._moments = masters, moments
        self.optimizer, self.moments = control.groups.chosen.kept
        named = zip(names, weights, strict=True)
        self.parameters = [Described(name, tuple(p.shape), p.requires_grad) for name, p in named]

    def meet(self) -> None:
        return

    def updates(self, parameter: int) -> int:
        return self.control.updates[parameter]

    def of_expert_rank(self, which: int, parameter: int, part: Part, onto: int | None) -> torch.Tensor | None:
        """From the first rank that has it."""
        ranks, made = self._ranks, list[torch.Tensor]()

        def pieces() -> list[list[torch.Tensor]]:
            here = [self.read(parameter, part).reshape(-1)] if ranks.rank == which else []
            if onto in (None, ranks.rank):
                made.extend(here or [torch.empty(self._weights[parameter].numel())])
            return [(made or here) if rank == which else [] for rank in range(ranks.size)]

        ranks.bring(f"parameter {parameter} of expert rank {which}", pieces, onto)
        return made[0] if made else None

    def read(self, parameter: int, part: Part) -> torch.Tensor:
        shape, master, moments = self.parameters[parameter].shape, self._masters[parameter], self._moments[parameter]
        if part == "value":
            source = self._weights[parameter].detach() if master is None else master
        else:
            assert moments is not None
            source = moments[self.moments.index(part)]
        return source.to("cpu", torch.float32, copy=True).view(shape)

    def bring(self, parameter: int, part: Part, onto: int) -> torch.Tensor | None:
        return self.read(parameter, part) if self._ranks.rank == onto else None

    def write(self, parameter: int, state: SavedParameter, updates: int) -> None:
        master = self._masters[parameter]
        if master is not None and state.moments is not None:
            master.copy_(state.value.reshape(-1))
            self.write_moments(parameter, state.moments)
        data_of(self._weights[parameter]).copy_(state.value)
        self.control.updates[parameter] = updates

    def write_moments(self, parameter: int, moments: Sequence[torch.Tensor]) -> None:
        for moment, given in zip(self._moments[parameter] or (), moments, strict=True):
            moment.copy_(given.reshape(-1))
