"""Inputs of recomputed units that wait on the host for their backward, as the substrate's offloaded_inputs keeps them."""

from __future__ import annotations

from collections.abc import Iterator

from systems.planning.plan import LaneKind, Plan
from systems.planning.step.issue_order import IssueOrder
from systems.planning.step.operations import Work
from systems.planning.trace import Phase, Trace


def inputs_leaving(trace: Trace, units: frozenset[int]) -> dict[int, list[int]]:
    """Per moment those of `units` whose inputs leave there: where the trace saw it. Those that stayed in it behave so again (a
    model that recomputes within hooks of its own keeps them); what it was not asked to show leaves where its forward begins.
    """
    found: dict[int, list[int]] = {}
    for number, seen in enumerate(trace.inputs_left):
        found.setdefault(number, []).extend(unit for unit in seen if unit in units)
    unseen = units - trace.offloaded if trace.inputs_left else units
    for number, moment in enumerate(trace.moments):
        if moment.phase is Phase.FORWARD_ENTER and moment.unit in unseen:
            found.setdefault(number, []).append(moment.unit)
    return found


class WaitingInputs:
    """Inputs that have left the device and that no backward has taken. bytes: of each unit whose input leaves."""

    def __init__(self, trace: Trace, plan: Plan, order: IssueOrder) -> None:
        leaving = trace.offloaded if plan.offload_inputs is None else plan.offload_inputs
        self.bytes = {unit: size for unit, size in trace.input_bytes if unit in leaving and size}
        self._leaving = inputs_leaving(trace, frozenset(self.bytes))
        self._order = order
        self._waiting: list[list[int]] = []  # [unit, 1 if fetched], in order of forward

    def fetch_for(self, unit: int) -> None:
        """The unit's backward begins: its own, then the one before it; of a unit that has none, the last. Each comes once."""
        for needed in self._needed(unit):
            size, name = self.bytes[needed], self._order.layout.unit_name(needed)
            reads, writes = (f"host:hidden:{needed}",), (f"hidden:{needed}",)
            self._order.add(Work.FETCH_INPUT, LaneKind.H2D, bytes=size, reads=reads, writes=writes, name=name)

    def _needed(self, unit: int) -> Iterator[int]:
        mine = max((place for place, (each, _) in enumerate(self._waiting) if each == unit), default=len(self._waiting))
        for entry in reversed(self._waiting[max(mine - 1, 0) : mine + 1]):
            if not entry[1]:
                entry[1] = 1
                yield entry[0]
        del self._waiting[mine : mine + 1]

    def offload(self) -> None:
        """Those that leave at this moment."""
        for unit in self._leaving.get(self._order.moment, ()):
            self._waiting.append([unit, 0])
            size, name = self.bytes[unit], self._order.layout.unit_name(unit)
            reads, writes = (f"hidden:{unit}",), (f"host:hidden:{unit}",)
            self._order.add(Work.OFFLOAD_INPUT, LaneKind.D2H, bytes=size, reads=reads, writes=writes, name=name)
