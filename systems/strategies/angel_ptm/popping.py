"""What phase 1 of Algorithm 1 takes back where memory is short, and what it moves again where there is room: as the paper has
it printed, or in order of use.

As printed the movement that is popped is the last of S, in which all are in model order at first, and one that is pushed again
comes last; the page that is pushed again is the last that was popped (lines 8, 9 and 15). Pages of a layer that still wait at
its use, for which the paper has no line, are moved at its trigger, which is pushing them again. In order of use is the same
while each layer is used once; in a step, where it is used twice, what is not needed soonest goes first.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from typing import TypeVar

T = TypeVar("T")


class Popping:
    """Which movement is popped, and which page is pushed again (lines 7 to 9, and 13 to 15)."""

    def __init__(self, bundles: Iterable[int], *, as_printed: bool) -> None:
        self.as_printed = as_printed
        self._order = {bundle: number for number, bundle in enumerate(sorted(bundles))}  # of movements in S

    def last(self, bundle: int, in_use: tuple[int, ...]) -> tuple[int, ...]:
        """A key of movements: that of the one to pop is the greatest. in_use: one by order of use."""
        return (self._order[bundle],) if self.as_printed else in_use

    def in_turn(self, waiting: Sequence[T], in_use: Callable[[T], tuple[int, int]]) -> list[T]:
        """What waits, in the order of popping: the next to be pushed last. in_use: as above."""
        return list(waiting) if self.as_printed else sorted(waiting, key=in_use, reverse=True)

    def pushed(self, bundle: int) -> None:
        """Its movement is the last of S."""
        self._order[bundle] = max(self._order.values()) + 1
