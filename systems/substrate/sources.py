"""Units at which a model begins: they take no tensor that wants a gradient, so that none tells that their backward ends."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass
class Called:
    """begin, end: of its calls in this micro-step, by count of both. source: it took no tensor that wants a gradient."""

    begin: int
    end: int | None = None
    times: int = 1
    source: bool = False


class Sources:
    """Sources is the calls of a micro-step's forward on several ranks: see Note [Ends on several ranks] in hooks.py."""

    def __init__(self) -> None:
        self._calls: dict[int, Called] = {}
        self._place, self._count = (-1, -1), 0

    def begin(self, unit: int, place: tuple[int, int]) -> None:
        """place: the step and micro-step in which the unit is called."""
        if place != self._place:
            self._calls, self._place = {}, place
        self._count += 1
        known = self._calls.setdefault(unit, Called(self._count, times=0))
        known.times, known.end = known.times + 1, None

    def takes_nothing(self, unit: int) -> None:
        """That wants a gradient."""
        self._calls[unit].source = True

    def end(self, unit: int) -> None:
        known = self._calls.get(unit)
        if known is not None:
            self._count += 1
            known.end = self._count

    def before(self, unit: int) -> list[int]:
        """Sources that are done as that unit's backward begins: called once, after all of its calls."""
        then = self._calls.get(unit)
        if then is None or then.end is None:
            return []
        return [number for number, each in self._calls.items() if each.source and each.times == 1 and each.begin > then.end]
