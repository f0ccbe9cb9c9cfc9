"""What would make a plan fit: each change is planned before it is named, so that it is known to help."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from systems.errors import UnsupportedError
from systems.prediction.forecast import Forecast, Observations, Question, fits
from systems.sizes import format_size
from systems.system import System


@dataclass(frozen=True)
class Remedy:
    """flag and value as they would be given; what: the change in words, with what it costs."""

    flag: str
    value: int | str
    what: str


def remedies(system: System, options: BaseModel, found: Forecast, observations: Observations) -> list[Remedy]:
    """For a forecast that does not fit, the changes that alone make it fit, and those of memory. Empty if it fits."""
    if found.fits:
        return []
    question = found.question
    helps = _judge(system, options, observations)
    return [*_work(question, helps), *_ranks(question, helps), *_memory(found)]


def _judge(system: System, options: BaseModel, observations: Observations) -> Callable[[Question], bool]:
    def helps(question: Question) -> bool:
        try:
            return fits(system, options, question, observations)
        except UnsupportedError:
            return False

    return helps


def _work(question: Question, helps: Callable[[Question], bool]) -> Iterator[Remedy]:
    """Less at once on a device: recomputation, and the largest batch that fits, with recomputation if not without."""
    recomputed = replace(question, recompute="full")
    recomputation_helps = question.recompute != "full" and helps(recomputed)
    if recomputation_helps:
        yield Remedy("--recompute", "full", "recompute all activations")
    batch = _largest_batch(question, helps)
    if batch:
        yield Remedy("--batch-size", batch, f"lower the batch from {question.batch_size} to {batch}")
    elif question.recompute != "full" and not recomputation_helps:
        batch = _largest_batch(recomputed, helps)
        if batch:
            what = f"recompute all activations and lower the batch from {question.batch_size} to {batch}"
            yield Remedy("--recompute full --batch-size", batch, what)


def _largest_batch(question: Question, helps: Callable[[Question], bool]) -> int:
    """The largest one below the question's that fits; 0 if not even 1 does."""
    low, high = 0, question.batch_size  # low fits (0: nothing tried), high does not
    if high == 1 or not helps(replace(question, batch_size=1)):
        return 0
    low = 1
    while high - low > 1:
        middle = (low + high) // 2
        if helps(replace(question, batch_size=middle)):
            low = middle
        else:
            high = middle
    return low


def _ranks(question: Question, helps: Callable[[Question], bool]) -> Iterator[Remedy]:
    most = question.profile.devices
    if question.ranks < most and helps(replace(question, ranks=most)):
        yield Remedy("--ranks", most, f"use all {most} devices instead of {question.ranks}")


def _memory(found: Forecast) -> Iterator[Remedy]:
    if found.least_device_bytes > found.question.device_memory:
        need = found.least_device_bytes
        yield Remedy("--device-memory", need, f"a device with {format_size(need)}")
    host: Any = found.tiers["host"]
    if not host.fits:
        yield Remedy("--host-memory", host.need_bytes, f"{format_size(host.need_bytes)} of host memory a node")
