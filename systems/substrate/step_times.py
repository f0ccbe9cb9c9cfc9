"""How long compute takes in steps under a plan: what a choice that goes by times has to wait for.

A step without a plan is no measure. It is often the first, in which libraries are loaded and kernels compiled, and what it does
on demand keeps the device waiting for the host.
"""

from __future__ import annotations

from systems.planning.plan import Plan
from systems.planning.trace import Moment

ENOUGH = 2  # steps; of each interval the shorter time counts


class StepTimes:
    """Of the kinds of steps that are to be timed, by their moments."""

    def __init__(self) -> None:
        self._wanted: dict[tuple[Moment, ...], list[tuple[float, ...]]] = {}

    def want(self, plan: Plan) -> None:
        """Of the next steps under this plan."""
        self._wanted[plan.signature] = []

    def forget(self) -> None:
        self._wanted.clear()

    def wanted(self, plan: Plan) -> bool:
        return plan.signature in self._wanted

    def add(self, plan: Plan, seconds: tuple[float, ...]) -> tuple[float, ...] | None:
        """Of a step under the plan, per moment. What counts, once there are enough; none are wanted then."""
        found = self._wanted.get(plan.signature)
        if found is None:
            return None
        found.append(seconds)
        if len(found) < ENOUGH:
            return None
        del self._wanted[plan.signature]
        return tuple(map(min, zip(*found, strict=True)))
