"""A position in a plan: what is to be done now, and whether the step still follows its trace."""

from __future__ import annotations

from collections.abc import Iterator

from systems.planning.plan import Operation, Plan
from systems.planning.trace import Moment


class Cursor:
    """A position in a plan's trace. Once an event differs from it, the rest of the step is on its own.

    first: per moment, of those that have any, operations that come as it is reached (PlannedOperation).
    Of several ranks, see following.py: departed: this step differs from it. strayed: by more than what it leaves out.
    """

    def __init__(self) -> None:
        self.plan: Plan | None = None
        self.following = self.departed = self.strayed = False
        self.position = -1
        self._operations: list[list[Operation]] = []
        self.first: dict[int, list[Operation]] = {}

    def use(self, plan: Plan | None) -> None:
        self.plan = plan
        self.following = False
        self._operations, self.first = [], {}
        if plan is not None:
            self._operations = [[] for _ in plan.signature]
            for planned in sorted(plan.operations, key=lambda p: (p.trigger, p.priority)):
                at = planned.trigger
                (self.first.setdefault(at, []) if planned.first else self._operations[at]).append(planned.operation)

    def start(self) -> None:
        self.following, self.position = self.plan is not None, -1

    def leave(self) -> None:
        """The rest of the step is on its own, whatever comes."""
        self.following = False

    def advance(self, moment: Moment) -> bool:
        """Step on to `moment`. False if the plan did not expect it (then, and from then on, nothing is planned)."""
        self.position += 1
        if not self.following:
            return True
        assert self.plan is not None
        signature = self.plan.signature
        if self.position < len(signature) and signature[self.position] == moment:
            return True
        self.following = False
        return False

    @property
    def at_barrier(self) -> bool:
        """True if the plan wants the device's lanes to wait for each other at the current moment."""
        return self.following and self.plan is not None and self.position in self.plan.barriers

    def operations(self, *, first: bool = False) -> Iterator[Operation]:
        """What the plan wants done at the current moment, in its turn or first of all."""
        if self.following:
            yield from self.first.get(self.position, ()) if first else self._operations[self.position]
