"""The sizes of a search, numbered from 1, and the search itself."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, Literal

from harness.spec import RunSpec

LAYERS = "num_layers"


@dataclass(frozen=True)
class Candidates:
    """searched: what is counted, of the run `asked`. first: the number to begin with where no other is likelier. most: the
    last. names: of the sizes, fewest parameters first.
    """

    searched: Literal["layers", "sizes", "samples"]
    asked: RunSpec
    first: int
    most: int
    names: tuple[str, ...] = ()

    def spec(self, number: int) -> RunSpec:
        """One run, of that size."""
        changes: dict[str, Any]
        if self.searched == "samples":
            changes = {"batch_size": number}
        elif self.searched == "sizes":
            changes = {"model": self.names[number - 1]}
        else:
            changes = {"set": (*self.asked.set, f"{LAYERS}={number}")}
        return RunSpec.model_validate(self.asked.model_dump(include=set(RunSpec.model_fields)) | changes)


def largest(fits: Callable[[int], bool], *, first: int, step: int, most: int) -> int:
    """The largest number from 1 to most that fits, 0 if none does; what fits does so at every smaller number too.

    first: tried first; away from it steps double, beginning with `step`. About 2 log2 of how far it is off are tried.
    """
    low, high = 0, most + 1  # low fits, high does not
    number = min(first, most)
    while high - low > 1:
        if fits(number):
            low = number
        else:
            high = number
        if low and high <= most:
            number = (low + high) // 2
        else:
            number = min(low + step, most) if low else max(high - step, high // 2, 1)
            step *= 2
    return low
