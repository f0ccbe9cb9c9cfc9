"""What updates that run ahead of the norm take and gain in a forecast, and what more host memory would bring."""

from __future__ import annotations

from dataclasses import dataclass

from systems.planning.plan import Plan
from systems.planning.policy.ahead import NEAR, AheadChoice
from systems.planning.strategy import UNLIMITED


@dataclass(frozen=True)
class MoreHostMemory:
    """nbytes: of a node's, beyond what there is; then so long a step, with this share of the updates ahead."""

    nbytes: int
    step_time_s: float
    share: float


@dataclass(frozen=True)
class AheadForecast:
    """Bytes of a node's host. spare_bytes: that second versions may take. taken_bytes: that they take.

    share: of the parameters updated on the host, those whose updates run ahead. waiting_step_time_s: of a step in which none
    does, as it is where the norm asks for clipping. more: None where all is ahead that helps.
    """

    spare_bytes: int
    taken_bytes: int
    share: float
    step_time_s: float
    waiting_step_time_s: float
    more: MoreHostMemory | None

    @classmethod
    def of(cls, choice: AheadChoice, plan: Plan, ranks_on_node: int) -> AheadForecast | None:
        """plan: the one made by `choice`, which has a profile. None where no update can run ahead, or the host is too small."""
        if not choice.eligible or choice.spare_bytes < 0:
            return None
        return cls(
            spare_bytes=choice.spare_bytes * ranks_on_node,
            taken_bytes=choice.nbytes(plan.ahead) * ranks_on_node,
            share=choice.share(plan.ahead),
            step_time_s=choice.step_time_s(plan.ahead),
            waiting_step_time_s=choice.step_time_s(frozenset()),
            more=_more(choice, plan.ahead, ranks_on_node),
        )


def _more(choice: AheadChoice, taken: frozenset[int], ranks_on_node: int) -> MoreHostMemory | None:
    if choice.nbytes(frozenset(choice.eligible)) <= choice.spare_bytes:
        return None
    wanted = choice.within(UNLIMITED)
    missing, seconds = choice.nbytes(wanted) - choice.spare_bytes, choice.step_time_s(wanted)
    if missing <= 0 or choice.step_time_s(taken) <= NEAR * seconds:
        return None
    return MoreHostMemory(missing * ranks_on_node, seconds, choice.share(wanted))
