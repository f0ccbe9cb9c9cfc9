"""What a model may have of both memories before a trace is there, which bounds the largest model (sections 7.3 and 8.2.1).

Of 14 bytes a parameter the host has what it can hold, and the device no more than its warm-up share: of a device of L bytes
(0.2 L + host) x utilization / 14 parameters. What the host lacks lives on the device for good here, by whole chunks with all
their lists (policy.homes); beside it, within the share, is what a unit holds, which the host has too. Tails of chunks are not
allocated, so the utilization that counts is that of what is: the padding.
"""

from __future__ import annotations

from dataclasses import replace

from systems.errors import BudgetError
from systems.planning.layout import Layout
from systems.planning.plan import UpdateRule
from systems.planning.policy.homes import host_need, within_host
from systems.planning.step.residence import Residence, unmovable
from systems.planning.strategy import PlanningContext
from systems.sizes import format_need, format_size


def warm_up_share(layout: Layout, context: PlanningContext, rule: UpdateRule, share: float) -> float:
    """Strategy.warm_up_share, which is of what is left beside that which never moves, so that all of it is `share` of the
    device. BudgetError where host and that share of the device cannot hold the model.
    """
    most = int(share * context.device_budget)
    if host_need(layout, context) <= context.host_budget:
        return share
    try:
        found = within_host(layout, replace(context, device_budget=most), rule)
    except BudgetError as error:
        have = context.host_budget
        raise BudgetError(
            f"the model needs {format_need(error.need, have)} of host memory, {format_size(have)} are there, and what is "
            f"missing does not fit the {share:.0%} of the device ({format_size(most)}) that patrickstar's chunks may take "
            "before a step was traced (`warmup_share`): raise `host_memory`, `device_memory` or `warmup_share`, or take a "
            "smaller model",
            tier=error.tier,
            need=error.need,
            have=have,
        ) from None
    settled = Residence(found, context, unmovable(found), rule).static_bytes
    return max(0.0, (most - settled) / max(1, context.device_budget - settled))
