"""What would make a plan fit: each change is planned before it is named, so that it is known to help."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace

from pydantic import BaseModel

from systems.errors import BudgetError, UnsupportedError
from systems.prediction.forecast import Forecast, Observations, Question, fits
from systems.sizes import format_size
from systems.system import System

LAYERS = "num_layers"
Helps = Callable[[Question], bool]


@dataclass(frozen=True)
class Remedy:
    """changes: what is asked instead, by name; sizes in bytes. what: the change in words, with what it costs."""

    changes: Mapping[str, int | str]
    what: str


@dataclass(frozen=True)
class Depths:
    """The same model with fewer layers. layers: that it has. at: with so many; ValueError for a number it cannot have."""

    layers: int
    at: Callable[[int], Observations]


@dataclass(frozen=True)
class DiskRoom:
    """A folder on a disk, and the bytes that may lie there."""

    folder: str
    nbytes: int


def remedies(
    system: System,
    options: BaseModel,
    found: Forecast,
    observations: Observations,
    *,
    depths: Depths | None = None,
    disk: DiskRoom | None = None,
) -> Iterator[Remedy]:
    """For a forecast that does not fit, the changes that alone make it fit, and those of memory. None if it fits.

    depths, disk: also ask for fewer layers, and for a disk where none is used yet.
    """
    if found.fits:
        return
    question = found.question

    def helps_at(layers: int | None) -> Helps:
        try:
            seen = observations if depths is None or layers is None else depths.at(layers)
        except ValueError:
            return lambda question: False
        return _judge(system, options, seen)

    helps = helps_at(None)
    work = list(_work(question, helps))
    yield from work
    if disk is not None:
        yield from _disk(question, helps, disk)
    if depths is not None and not isinstance(question.recompute, tuple):
        yield from _fewer_layers(question, helps_at, depths.layers, least=not work)
    yield from _ranks(question, helps)
    yield from _memory(found)


def _judge(system: System, options: BaseModel, observations: Observations) -> Helps:
    def helps(question: Question) -> bool:
        try:
            return fits(system, options, question, observations)
        except (UnsupportedError, BudgetError):
            return False

    return helps


def _work(question: Question, helps: Helps) -> Iterator[Remedy]:
    """Less at once on a device: recomputation, and the largest batch that fits, with recomputation if not without."""
    recomputed = replace(question, recompute="full")
    recomputation_helps = question.recompute != "full" and helps(recomputed)
    if recomputation_helps:
        yield Remedy({"recompute": "full"}, "recompute all activations")
    batch = _largest_batch(question, helps)
    if batch:
        yield Remedy({"batch_size": batch}, f"lower the batch from {question.batch_size} to {batch}")
    elif question.recompute != "full" and not recomputation_helps:
        batch = _largest_batch(recomputed, helps)
        if batch:
            what = f"recompute all activations and lower the batch from {question.batch_size} to {batch}"
            yield Remedy({"recompute": "full", "batch_size": batch}, what)


def _largest_batch(question: Question, helps: Helps) -> int:
    return _largest(question.batch_size, lambda batch: helps(replace(question, batch_size=batch)))


def _largest(below: int, helps: Callable[[int], bool]) -> int:
    """The largest number from 1 that helps; 0 if not even 1 does. Looked for from below: small ones are quick."""
    low, high = 1, below  # high does not help
    if high <= 1 or not helps(1):
        return 0
    growing = True
    while high - low > 1:
        middle = min(2 * low, high - 1) if growing else (low + high) // 2
        if helps(middle):
            low = middle
        else:
            high, growing = middle, False
    return low


def _fewer_layers(question: Question, helps_at: Callable[[int], Helps], layers: int, *, least: bool) -> Iterator[Remedy]:
    """As many as fit; where not even one does and `least`, with the least work."""
    found = _largest(layers, lambda number: helps_at(number)(question))
    if found:
        yield Remedy({LAYERS: found}, f"lower the layers from {layers} to {found}")
    elif least:
        smallest = replace(question, recompute="full", batch_size=1)
        found = _largest(layers, lambda number: helps_at(number)(smallest))
        if found:
            what = f"lower the layers from {layers} to {found}, recompute all activations and lower the batch to 1"
            yield Remedy({LAYERS: found, "recompute": "full", "batch_size": 1}, what)


def _disk(question: Question, helps: Helps, disk: DiskRoom) -> Iterator[Remedy]:
    if not question.disk_memory and helps(replace(question, disk_memory=disk.nbytes)):
        yield Remedy({"disk": disk.folder}, "keep optimizer states that the host has no room for on a disk")


def _ranks(question: Question, helps: Helps) -> Iterator[Remedy]:
    most = question.profile.devices
    if question.ranks < most and helps(replace(question, ranks=most)):
        yield Remedy({"ranks": most}, f"use all {most} devices instead of {question.ranks}")


def _memory(found: Forecast) -> Iterator[Remedy]:
    """What is short, all at once: more of one memory alone does not help where both are."""
    device, host = found.least_device_bytes, found.tiers["host"]
    changes: dict[str, int | str] = {}
    whats = []
    if device > found.question.device_memory:
        changes["device_memory"] = device
        whats.append(f"a device with {format_size(device)}")
    if not host.fits:
        changes["host_memory"] = host.need_bytes
        whats.append(f"{format_size(host.need_bytes)} of host memory a node")
    if changes:
        yield Remedy(changes, " and ".join(whats))
