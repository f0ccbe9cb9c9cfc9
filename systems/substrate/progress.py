"""How far an engine is in its step: what unit events are taken for, and what a caller may ask for now."""

from __future__ import annotations


class Progress:
    """Progress is the place of the present moment in a step of `accumulate` micro-batches.

    aside: within a pass without gradients. steps_begun: a loss is of the step in which its forward ran.
    pending: units to forward calls whose backward has not ended, in this micro-batch.
    doubtful: a gradient came that nobody was seen to have read the parameter for; until a whole step has ended.
    """

    def __init__(self, accumulate: int) -> None:
        self.accumulate = accumulate
        self.in_step = self.in_backward = self.aside = self.doubtful = False
        self.micro_step = self.steps_begun = 0
        self.pending: dict[int, int] = {}

    def is_observed(self) -> bool:
        """Forward events now belong to the step: not to a pass without gradients, nor to recomputation."""
        return self.in_step and not self.in_backward and not self.aside

    @property
    def wants_more(self) -> bool:
        """A step is in progress that takes another micro-batch."""
        return self.in_step and self.micro_step < self.accumulate

    def gradients_pending(self, in_place: bool) -> bool:
        """Between a backward pass and the step that uses it, and within one as soon as the engine has taken a gradient."""
        return self.in_step and (not in_place if self.in_backward else self.micro_step > 0)

    def begin_step(self) -> None:
        self.in_step, self.micro_step, self.steps_begun = True, 0, self.steps_begun + 1

    def begin_backward(self) -> None:
        self.in_backward = True

    def end_backward(self) -> None:
        """A micro-batch is done."""
        self.in_backward = False
        self.micro_step += 1

    def end_step(self) -> None:
        self.in_step = False

    def begin_aside(self) -> None:
        self.aside = True

    def end_aside(self) -> None:
        self.aside = False

    def doubt(self) -> None:
        self.doubtful = True

    def trust(self) -> None:
        self.doubtful = False

    def leave(self) -> None:
        """The step was given up, and whatever else was going on."""
        self.in_step = self.in_backward = self.aside = False
