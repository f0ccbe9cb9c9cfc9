"""Tags of collectives: see ranks/link.py."""

from __future__ import annotations

from systems.planning.step.operations import LaneOperation
from systems.ranks.link import Link


def issued(link: Link, operation: LaneOperation, *, of_all: bool) -> str:
    """The tag of a collective that is on its way. link: all ranks'. of_all: else it is of a part of the ranks, and the others
    may have its units under other names.
    """
    return link.issue(operation.label, None if of_all else operation._replace(name="").label)
