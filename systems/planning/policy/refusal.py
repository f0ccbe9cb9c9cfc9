"""How a strategy refuses a device that is too small: what is needed where, what there is, what to change."""

from __future__ import annotations

from collections.abc import Callable

from systems.errors import BudgetError
from systems.messages import LEAST_OF_A_BATCH
from systems.planning.step.profiles import Need
from systems.planning.strategy import PlanningContext
from systems.planning.trace import NO_UNIT
from systems.sizes import format_need, format_size

UnitName = Callable[[int], str]


def check_need(
    need: Need,
    context: PlanningContext,
    system: str,
    unit_name: UnitName,
    *,
    measured: bool | None = None,
    smaller: str | None = "chunk_max",
) -> None:
    """BudgetError unless `need` fits. measured: activations were traced; None takes them as such if there are any.

    smaller: the system's option that bounds what is moved at once; None if it has none.
    """
    if need.total_bytes <= context.device_budget:
        return
    parts = [f"{format_size(need.parameter_bytes)} of parameters", f"{format_size(need.gradient_bytes)} of gradients"]
    if need.static_bytes:
        parts.append(f"{format_size(need.static_bytes)} that never moves")
    if need.non_model_bytes and measured is not False:
        parts.append(f"{format_size(need.non_model_bytes)} of activations")
        advice = "raise `device_memory`, lower the batch or the sequence length, or recompute activations"
    else:
        if need.non_model_bytes:
            parts[1] = f"{format_size(need.gradient_bytes + need.non_model_bytes)} of gradients"
        advice = f"activations come on top: raise `device_memory` well above this ({LEAST_OF_A_BATCH})"
        if smaller is not None:
            advice += f", or give a smaller {smaller} in `options`"
    raise refusal(need.total_bytes, need.unit, parts, advice, context, system, unit_name)


def refusal(
    total: int, unit: int, parts: list[str], advice: str, context: PlanningContext, system: str, unit_name: UnitName
) -> BudgetError:
    """total: bytes, made of `parts`, that the unit (or NO_UNIT) sets; the allocator's part is added."""
    where = f"unit {unit_name(unit)!r}" if unit != NO_UNIT else "the step"
    needed, given = context.memory_for(total), context.memory_for(context.device_budget)
    if needed > total:
        parts = [*parts, f"{format_size(needed - total)} for the allocator"]
    return BudgetError(
        f"{system} needs at least {format_need(needed, given)} of device memory for {where} ({', '.join(parts)}), "
        f"{format_size(given)} is given: {advice}",
        tier="device",
        need=needed,
        have=given,
    )
