"""What would make a plan fit: each change is planned before it is named, so that it is known to help."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

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
    """The largest one below the question's that fits; 0 if not even 1 does. Looked for from below: small ones are quick."""
    low, high = 1, question.batch_size  # high does not fit
    if high == 1 or not helps(replace(question, batch_size=1)):
        return 0
    growing = True
    while high - low > 1:
        middle = min(2 * low, high - 1) if growing else (low + high) // 2
        if helps(replace(question, batch_size=middle)):
            low = middle
        else:
            high, growing = middle, False
    return low


def _ranks(question: Question, helps: Callable[[Question], bool]) -> Iterator[Remedy]:
    most = question.profile.devices
    if question.ranks < most and helps(replace(question, ranks=most)):
        yield Remedy("--ranks", most, f"use all {most} devices instead of {question.ranks}")


def _memory(found: Forecast) -> Iterator[Remedy]:
    """What is short, all at once: more of one memory alone does not help where both are."""
    device, host = found.least_device_bytes, found.tiers["host"]
    flags, whats, value = [], [], 0
    if device > found.question.device_memory:
        flags, whats, value = ["--device-memory"], [f"a device with {format_size(device)}"], device
    if not host.fits:
        flags = [*flags, *map(str, [device] * len(flags)), "--host-memory"]
        whats.append(f"{format_size(host.need_bytes)} of host memory a node")
        value = host.need_bytes
    if flags:
        yield Remedy(" ".join(flags), value, " and ".join(whats))
