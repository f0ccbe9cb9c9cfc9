"""The one clock, and the training loop it stands around.

Note [The timed region]
    The region is the last `steps - warmup` steps between two full drains of the engine, the optimizer work that an
    engine defers included; validation inside it is cut out by two more drains. Nothing is printed or waited for
    between the steps: single step times come from boundaries at which nothing was drained, and losses are read one
    step late, when the device has long computed them. So the region divided by its steps is the step time to quote,
    and the single times show its course.
"""

from __future__ import annotations

import gc
import math
import time
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch

from harness.spec import Schedule
from systems.ranks.ranks import Ranks, SingleRank
from systems.settings import StepOutcome
from systems.system import Engine

EVAL_BATCHES = 4
NO_LABELS = "no token of its batches has a label, all are -100: there is no loss to take; give data with labels"
CLOCK = "between-drains-2"  # the definition of the timed region above; changes when that does

Batch = dict[str, torch.Tensor]


@dataclass(frozen=True, kw_only=True)
class Workload:
    """What a step trains on.

    batch: (step, micro_step, split) to a batch on the compute device. loss: (call, batch, label_count) to a scalar,
    already divided by label_count. count_labels: label tokens of a batch.
    """

    batch: Callable[[int, int, str], Batch]
    loss: Callable[[Callable[..., Any], Batch, int], torch.Tensor]
    count_labels: Callable[[Batch], int]
    accumulate: int
    lr: float
    schedule: Schedule = "constant"


def schedule_factor(schedule: Schedule, done: int, steps: int) -> float:
    """Share of the full learning rate after `done` of `steps` useful steps: from 1 to near 0, unless constant."""
    if schedule == "linear":
        return 1.0 - done / steps
    if schedule == "cosine":
        return 0.5 * (1.0 + math.cos(math.pi * done / steps))
    return 1.0


class LateReader:
    """Takes small tensors off the device without waiting, and gives their values a step later."""

    def __init__(self) -> None:
        self._pending: tuple[torch.Tensor, torch.cuda.Event | None] | None = None

    def put(self, values: torch.Tensor) -> None:
        assert self._pending is None, "the last values were never read"
        if values.is_cuda:
            host = torch.empty(values.shape, dtype=values.dtype, pin_memory=True).copy_(values, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
            self._pending = host, event
        else:
            self._pending = values.clone(), None

    def take(self) -> list[float] | None:
        """The values of the last `put`, or None if they were taken already."""
        if self._pending is None:
            return None
        (values, event), self._pending = self._pending, None
        if event is not None:
            event.synchronize()  # work queued after the copy goes on meanwhile
        return [float(value) for value in values.tolist()]


@dataclass
class RawResults:
    """Raw results, filled as the run goes, so that a failed one keeps what it had. One entry per finished step."""

    step_time_s: list[float] = field(default_factory=list)
    micro_batch_loss: list[list[float]] = field(default_factory=list)
    learning_rate: list[float] = field(default_factory=list)
    outcomes: list[StepOutcome] = field(default_factory=list)
    eval_step: list[int] = field(default_factory=list)
    eval_loss: list[float] = field(default_factory=list)
    timed_s: float | None = None
    timed_counters: Counter[str] = field(default_factory=Counter)
    timed_joules: float | None = None
    warmup_s: float | None = None
    eval_s: float = 0.0
    save_s: float = 0.0
    complete: bool = False


class Measurement:
    """Runs an engine up to step `steps` and times all but the first `warmup` of what it runs.

    taken: steps that a resumed run had taken; skipped: those of them that changed nothing. save: writes a checkpoint, every
    save_every steps. enter: told the phase (warm-up, step, eval, save). on_step: told (steps done, the last loss that is
    known). energy: joules the device has used so far, None if not known. ranks: this one and the others, each of which measures
    its own batches: losses are everybody's, and known a step later.
    """

    def __init__(
        self,
        engine: Engine,
        work: Workload,
        *,
        steps: int,
        warmup: int,
        taken: int = 0,
        skipped: int = 0,
        eval_every: int | None = None,
        save_every: int | None = None,
        save: Callable[[], None] = lambda: None,
        clock: Callable[[], float] = time.perf_counter,
        energy: Callable[[], float | None] = lambda: None,
        enter: Callable[[str], None] = lambda phase: None,
        on_step: Callable[[int, float | None], None] = lambda done, loss: None,
        ranks: Ranks | None = None,
    ) -> None:
        if warmup >= steps - taken:
            raise ValueError(f"a warm-up of {warmup} leaves nothing to time in {steps - taken} steps")
        self.engine, self.work, self.steps, self.warmup, self.eval_every = engine, work, steps, warmup, eval_every
        self.taken, self._skipped, self._save_every, self._save = taken, skipped, save_every, save
        self.measured = RawResults()
        self._clock, self._energy, self._enter, self._on_step = clock, energy, enter, on_step
        self._late = LateReader()
        self._ranks = SingleRank() if ranks is None else ranks
        self._untold: list[list[float]] = []  # losses of this rank's micro-batches, a list a step
        self._boundary_s = self._span_start_s = 0.0
        self._span_counters: Mapping[str, int] = {}
        self._span_joules: float | None = None

    def run(self) -> RawResults:
        self._enter("warm-up" if self.warmup else "step")
        started_s = self._boundary_s = self._clock()
        for step in range(self.taken, self.steps):
            if step == self.taken + self.warmup:
                gc.collect()
                gc.freeze()
                self._start_span()
                self.measured.warmup_s = self._span_start_s - started_s - self.measured.eval_s - self.measured.save_s
                self._enter("step")
            self._train(step)
            if self.eval_every and (step + 1) % self.eval_every == 0:
                self._pause(step, "eval", self._validate)
            if self._save_every and (step + 1) % self._save_every == 0 and step + 1 < self.steps:
                self._pause(step, "save", lambda step: self._save())
        if self.measured.eval_step[-1:] != [self.steps]:
            self._stop_span()
        self._read_losses()
        self._tell(0)
        self.measured.outcomes = list(self.engine.outcomes)
        self.measured.complete = True
        return self.measured

    def extra_step(self) -> None:
        """One more optimizer step and a full drain, which nothing measured takes in. Call after `run`."""
        self._forward_backward(self.steps)
        self.engine.step()
        self.engine.drain()

    def _start_span(self) -> None:
        """A full drain, then the clock: nothing queued before is paid for after."""
        self.engine.drain()
        self._read_losses()
        self._span_counters, self._span_joules = self.engine.counters(), self._energy()
        self._span_start_s = self._boundary_s = self._clock()

    def _stop_span(self) -> None:
        """A full drain inside the clock: what the steps left to do is paid for by them."""
        self.engine.drain()
        measured = self.measured
        measured.timed_s = (measured.timed_s or 0.0) + self._clock() - self._span_start_s
        joules = self._energy()
        if joules is not None and self._span_joules is not None:
            measured.timed_joules = (measured.timed_joules or 0.0) + joules - self._span_joules
        for key, total in self.engine.counters().items():
            measured.timed_counters[key] += total - self._span_counters.get(key, 0)

    def _train(self, step: int) -> None:
        """One optimizer step up to its undrained boundary; then the loss of the step before is read."""
        rate = self._set_learning_rate(step)  # before backward, which may update weights already
        losses = self._forward_backward(step)
        self.engine.step()
        self._read_losses()
        self._late.put(torch.stack(losses).float())
        now = self._clock()
        self.measured.step_time_s.append(now - self._boundary_s)
        self.measured.learning_rate.append(rate)
        self._boundary_s = now
        known = self.measured.micro_batch_loss
        self._on_step(step + 1, sum(known[-1]) if known else None)

    def _forward_backward(self, step: int) -> list[torch.Tensor]:
        """Every micro-batch of the step; the loss of each, on the device. One without a label token adds nothing. ValueError
        where none has any: what would be divided by is 0, and the step would only decay weights.
        """
        batches = [self.work.batch(step, micro, "train") for micro in range(self.work.accumulate)]
        label_count = self._tell(sum(self.work.count_labels(batch) for batch in batches))
        if label_count == 0:
            raise ValueError(f"step {step + 1}: {NO_LABELS}")
        return [self.engine.forward_backward(self.work.loss, batch, label_count) for batch in batches]

    def _set_learning_rate(self, step: int) -> float:
        """The rate of this step. Skipped steps, as far as the engine has told of them, do not advance the schedule."""
        useful = step - self._skipped - sum(outcome.skipped for outcome in self.engine.outcomes)
        rate = self.work.lr * schedule_factor(self.work.schedule, useful, self.steps)
        if self.work.schedule != "constant":
            self.engine.set_lr(rate)
        return rate

    def _read_losses(self) -> None:
        values = self._late.take()
        if values is None:
            return
        if self._ranks.size == 1:
            self.measured.micro_batch_loss.append(values)
        else:
            self._untold.append(values)

    def _tell(self, labels: int) -> int:
        """Label tokens of all ranks. Losses not told yet are, the ranks' by turns, as one rank would have its micro-batches."""
        if self._ranks.size == 1:
            return labels
        told = self._ranks.exchange("label tokens and losses", (labels, self._untold))
        self._untold = []
        for of_ranks in zip(*(losses for _, losses in told), strict=True):
            self.measured.micro_batch_loss.append([loss for micro in zip(*of_ranks, strict=True) for loss in micro])
        return sum(count for count, _ in told)

    def _pause(self, step: int, phase: str, act: Callable[[int], None]) -> None:
        """Do something outside the region: its time and traffic are no training step's."""
        timed = step >= self.taken + self.warmup
        if timed:
            self._stop_span()
        else:
            self.engine.drain()
        self._read_losses()
        self._enter(phase)
        started_s = self._clock()
        act(step)
        seconds = self._clock() - started_s
        if phase == "eval":
            self.measured.eval_s += seconds
        else:
            self.measured.save_s += seconds
        self._enter("step" if timed else "warm-up")
        if timed and step + 1 < self.steps:
            self._start_span()
        self._boundary_s = self._clock()

    def _validate(self, step: int) -> None:
        """A pass over the validation split."""
        self.measured.eval_loss.append(self._validation_loss(step))
        self.measured.eval_step.append(step + 1)

    def _validation_loss(self, step: int) -> float:
        """Mean over the label tokens of a few fixed batches, of which ranks take turns. All take as many, and what is too many
        does not count. ValueError where there is no such token.
        """
        self.engine.eval()
        found = []
        with torch.no_grad():
            for index in range(self._ranks.rank, EVAL_BATCHES + -EVAL_BATCHES % self._ranks.size, self._ranks.size):
                batch = self.work.batch(index % EVAL_BATCHES, 0, "validation")
                count = self.work.count_labels(batch)
                found.append((float(self.work.loss(self.engine, batch, count)), count))
        self.engine.train()
        turns = zip(*self._ranks.exchange("validation", found), strict=True)
        counted = [each for turn in turns for each in turn][:EVAL_BATCHES]
        if not (labels := sum(count for _, count in counted)):
            raise ValueError(f"validation after step {step + 1}: {NO_LABELS}")
        return sum(loss * count for loss, count in counted) / labels
