"""How long compute takes in steps under a plan: what a choice that goes by times has to wait for.

A step without a plan is no measure. It is often the first, in which libraries are loaded and kernels compiled, and what it does
on demand keeps the device waiting for the host.
"""

from __future__ import annotations

from systems.planning.plan import Plan

ENOUGH = 2  # steps; of each interval the shorter time counts


class StepTimes:
    """Of steps under plans that wait for it."""

    def __init__(self) -> None:
        self._wanted: list[tuple[Plan, list[tuple[float, ...]]]] = []

    def want(self, plan: Plan) -> None:
        """Of the next steps under this plan."""
        self._wanted = [(each, times) for each, times in self._wanted if each.signature != plan.signature] + [(plan, [])]

    def forget(self) -> None:
        self._wanted.clear()

    def wanted(self, plan: Plan) -> bool:
        return any(plan is each for each, _ in self._wanted) if self._wanted else False

    def add(self, plan: Plan, seconds: tuple[float, ...]) -> tuple[float, ...] | None:
        """Of a step under the plan, per moment. What counts, once there are enough; none are wanted then."""
        found = next((times for each, times in self._wanted if each is plan), None)
        if found is None:
            return None
        found.append(seconds)
        if len(found) < ENOUGH:
            return None
        self._wanted = [(each, times) for each, times in self._wanted if each is not plan]
        return tuple(map(min, zip(*found, strict=True)))
