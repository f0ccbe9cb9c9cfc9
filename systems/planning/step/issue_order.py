"""What a schedule is written into while its plan is spelt out: operations in issue order, and flaws of the plan."""

from __future__ import annotations

from dataclasses import dataclass

from systems.planning.layout import Layout
from systems.planning.plan import LaneKind
from systems.planning.step.operations import ScheduledOperation, Work


@dataclass(frozen=True)
class Flaw:
    """Something a plan must not ask for. The runtime survives it; the validator refuses it."""

    moment: int
    bundle: int
    what: str


class IssueOrder:
    """The operations of a step in the order of their issue.

    moment: at which the next are issued. late: (ticket of a fetch, bundle) that needs an update issued after it.
    """

    def __init__(self, layout: Layout) -> None:
        self.layout = layout
        self.moment = 0
        self.operations: list[ScheduledOperation] = []
        self.flaws: list[Flaw] = []
        self.late: list[tuple[int, int]] = []

    def begin(self, moment: int) -> None:
        """What is added from here on is issued at it."""
        self.moment = moment

    def flaw(self, bundle: int, what: str) -> None:
        self.flaws.append(Flaw(self.moment, bundle, what))

    def add(
        self,
        kind: Work,
        lane: LaneKind | None,
        bundle: int = -1,
        *,
        segment: int = -1,
        bytes: int = 0,
        device_delta: int = 0,
        seconds: float = 0.0,
        reads: tuple[str, ...] = (),
        writes: tuple[str, ...] = (),
        planned: bool = True,
        name: str = "",
    ) -> None:
        ticket = len(self.operations)
        self.operations.append(
            ScheduledOperation(
                ticket,
                *(self.moment, kind, lane, bundle, segment, bytes, device_delta, seconds, reads, writes),
                planned=planned,
                name=self.layout.bundle_names[bundle] if bundle >= 0 else name,
            )
        )
