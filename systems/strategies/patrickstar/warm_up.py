"""What a model may have of both memories before a trace is there, which bounds the largest model (sections 7.3 and 8.2.1).

Of 14 bytes a parameter the host has what it can hold, and the device no more than its warm-up share: of a device of L bytes
(0.2 L + host) x utilization / 14 parameters. What the host lacks lives on the device for good here, by whole chunks with all
their lists (policy.homes). What a unit holds comes on top where the share has no room left for it, for the host has that too.
Tails of chunks are not allocated, so the utilization that counts is that of what is: the padding.
"""

from __future__ import annotations

from math import ceil

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
    most, device, host = int(share * context.device_budget), context.device_budget, context.host_budget
    found = within_host(layout, context, rule)
    settled = Residence(found, context, unmovable(found), rule).static_bytes
    if not settled:
        return share
    if settled > most:
        need, enough = host_need(layout, context), ceil(100 * settled / device) / 100
        more = (
            f"`device_memory` or warmup_share, as `options=dict(warmup_share={enough})`" if enough <= 1 else "`device_memory`"
        )
        raise BudgetError(
            f"the model needs {format_need(need, host)} of host memory, {format_size(host)} are there, and what is missing is "
            f"{format_need(settled, most)} on the device, of which patrickstar's chunks may take {share:.0%} "
            f"({format_size(most)}) before a step was traced: raise `host_memory`, {more}, or take a smaller model",
            tier="host",
            need=need,
            have=host,
        )
    return (most - settled) / (device - settled) if device > most else share
