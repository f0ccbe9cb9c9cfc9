"""The reference recipe's decisions: gradient norm, clipping factor, loss scale, what is skipped, whose turn which step is.

Both the resident baseline and the managed engine use this, so that equality between them can be exact.

Note [The recipe]
    loss = sum over label tokens / global label count. Weights and gradients in the compute dtype, master weights and moments
    in fp32. norm = square root of the sum, in parameter order, of one fp64 sum of squares a parameter, rounded once to fp32.
    Gradients are multiplied by min(1, clip / (norm + 1e-6)), in fp32. A step whose norm is not finite changes nothing. A
    parameter without a gradient is skipped: no decay, no moments, no step count.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import replace
from itertools import zip_longest
from typing import Any

import numpy as np
import torch

from systems.checkpoint import LoopState
from systems.errors import DivergedError, UnsupportedError
from systems.messages import one_line
from systems.planning.layout import ModelIndex
from systems.ranks.ranks import Ranks
from systems.recipe.step import loss_scale
from systems.recipe.step.parameter_groups import ParameterGroups
from systems.settings import Settings, StepOutcome

HALF_UPDATED = (
    "the last step broke off after some of its updates had begun, so that parameters belong to two steps: initialize anew "
    "from a checkpoint"
)
MAX_SKIPS_IN_A_ROW = 20


class StepControl:
    """Turns a step's partial sums into a decision and keeps what outlives a step: outcomes, step counts, scale, skips in a row.

    updates: optimizer steps that each parameter took. second: of what an engine keeps in two places, the numbers of those whose
    second place counts. begun: the number of its update, for each that the step in progress
    updates. loop: where the run stands, that before a restored checkpoint included. ruined: why no step may follow, for a
    message; None as long as one may. told: what the engine's caller has been told went wrong, in words.
    to_wait: what to change for updates that wait for the norm, in words; empty where they always do.

    Note [When a step is done]
        Counts, scale, outcome and the places that count change together, in one statement that calls nothing, once the step
        was carried out. Whatever breaks off before has changed none of them, and what breaks off after it finds the step done.
    """

    def __init__(
        self, settings: Settings, index: ModelIndex, parameters: Sequence[torch.nn.Parameter], to_wait: str = ""
    ) -> None:
        self.clip, self.to_wait = settings.clip, to_wait
        self.updates = [0] * len(index.parameters)
        self.second: frozenset[int] = frozenset()
        self.outcomes: list[StepOutcome] = []
        self._dynamic = settings.dtype == "fp16"
        self._loop = LoopState(0, 0, loss_scale.FP16_FIRST_SCALE if self._dynamic else 1.0, 0, 0)
        self.begun: dict[int, int] = {}
        self._for_good = False  # what the updates that began used cannot be changed any more
        self.ruined: str | None = None
        self.told: set[str] = set()
        self.groups = ParameterGroups(settings, index, parameters)
        self._range = self.groups.chosen.rule.range

    def decide(self, partials: Mapping[int, float]) -> StepOutcome:
        """partials: parameter index to fp64 sum of squares of its (scaled) gradient, for parameters that have one."""
        total, scale = 0.0, self._loop.loss_scale
        for parameter in sorted(partials):
            total += partials[parameter]
        norm = float(np.float32(math.sqrt(total) / scale)) if math.isfinite(total) else math.nan
        skipped = not math.isfinite(norm)
        factor = 1.0
        if self.clip > 0 and not skipped:
            factor = min(1.0, float(np.float32(self.clip) / (np.float32(norm) + np.float32(1e-6))))
        return StepOutcome(self._loop.steps + 1, norm, factor, scale, skipped)

    @property
    def loop(self) -> LoopState:
        """For a checkpoint."""
        return self._loop

    @loop.setter
    def loop(self, state: LoopState) -> None:
        mine = self._loop
        scale = state if self._dynamic else mine
        self._loop = replace(state, loss_scale=scale.loss_scale, good_steps=scale.good_steps)

    def record(self, outcome: StepOutcome, *, exchanged: frozenset[int] = frozenset()) -> None:
        """The step's decision was carried out; see Note [When a step is done]. DivergedError after that.

        exchanged: of what has two places, those whose other one counts from now on.
        """
        self._done(outcome, self.updates if outcome.skipped else self.advanced(), {}, self.second ^ exchanged)

    def record_late(self, outcome: StepOutcome) -> None:
        """The decision of a step whose updates were counted before; those of another may have begun."""
        self._done(outcome, self.updates, self.begun, self.second)

    def _done(self, outcome: StepOutcome, updates: list[int], begun: dict[int, int], second: frozenset[int]) -> None:
        end, after = len(self.outcomes), loss_scale.after(self._loop, outcome, moves=self._dynamic)
        self.outcomes[end:], self._loop, self.updates, self.begun, self.second = [outcome], after, updates, begun, second
        if after.skips_in_a_row >= MAX_SKIPS_IN_A_ROW:
            raise DivergedError(
                f"{after.skips_in_a_row} steps in a row were skipped for a non-finite gradient, the last at step "
                f"{outcome.step}: lower the learning rate, set `clip`, or check the data"
            )

    def check_whole(self) -> None:
        """RuntimeError where parameters or moments belong to no step that there was."""
        if self.ruined is not None:
            self.told.add(one_line(self.ruined))
            raise RuntimeError(self.ruined)

    def check(self) -> None:
        """Before a step ends. UnsupportedError, and nothing changed, where the optimizer's groups cannot be followed: they
        have what no group may have, or updates that began during backward used other values.
        """
        changed = self.groups.changed()
        if self.begun and self._for_good and changed is not None:
            raise UnsupportedError(
                f"step: {changed} changed after backward, which updates weights already where nonfinite=stop: set it back, "
                f"step, and change it before the next backward, or use {self.to_wait}"
            )

    def ruin(self, why: str | None) -> None:
        """No step may follow. None: one may."""
        self.ruined = why

    def forget_updates(self) -> None:
        """The step in progress is none: what it began to count does not."""
        self.begun = {}

    def begin_updates(self, fired: Sequence[int], *, for_good: bool = True) -> None:
        """Of every parameter about to be updated, the count for this step; the groups' hyperparameters are read once a step.

        for_good: else what these updates write can still be dropped.
        """
        if not self.begun:
            self.groups.refresh()
            self._for_good = False
        self._for_good |= for_good
        self.begun = self.begun | {parameter: self.updates[parameter] + 1 for parameter in fired}

    def count_first(self, number: int) -> None:
        """The first place of that one counts."""
        self.second = self.second - {number}

    def advanced(self) -> list[int]:
        """The counts once the updates that were begun are carried out."""
        return [self.begun.get(parameter, count) for parameter, count in enumerate(self.updates)]

    def update_range(self, parameter: int, offset: int, numel: int) -> Any:
        """As the optimizer's kernel takes it; see OptimizerRule.range."""
        inside = self.groups.inside
        return self._range(inside.hyper[inside.group_of[parameter]], offset, numel, self.begun[parameter])


def count_updates(control: StepControl, updates: list[int]) -> None:
    """Where fewer were made than there were steps: one of several gradients."""
    control.updates = updates


def check_together(control: StepControl, ranks: Ranks) -> None:
    """`StepControl.check` of several ranks: raised by all where one does, or where their groups say different things."""

    def mine() -> list[dict[str, Any]]:
        control.check()
        return control.groups.described()

    first, *_ = told = ranks.together("hyperparameters", mine)
    for rank, theirs in enumerate(told):
        both: Iterable[tuple[dict[str, Any], dict[str, Any]]] = zip_longest(first, theirs, fillvalue={})
        for number, (one, other) in enumerate(both):
            for name in sorted({*one, *other}):
                if one.get(name) != other.get(name):
                    what = f"{name} of parameter group {number}" if len(first) > 1 else name
                    raise UnsupportedError(
                        f"step: {what} is {one.get(name)!r} on rank 0 and {other.get(name)!r} on rank {rank}: give all "
                        "ranks the same, and call step() again"
                    )
