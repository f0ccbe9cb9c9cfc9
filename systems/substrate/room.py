"""What is certain of memory before anything is built: whether host and device can hold a model at all.

Only the model's sizes are looked at. No kernel is compiled, no byte is taken, nothing is observed: activations come on top.
"""

from __future__ import annotations

from dataclasses import replace

import torch
from pydantic import BaseModel
from torch import nn

from systems.errors import BudgetError
from systems.machine.budgets import device_budget, disk_budget, host_budget
from systems.optimizers.choice import chosen
from systems.planning.allowance import CUDA, EXACT
from systems.planning.policy.homes import host_need, within_host
from systems.planning.strategy import PlanningContext, Strategy, check_update_rule
from systems.recipe.model.units import find_units
from systems.settings import TORCH_DTYPE, Settings
from systems.sizes import format_size

AMPLE = 4  # times a model's host memory: then there is room for its device beside it, where both are one memory


def look(strategy: type[Strategy], model: nn.Module, settings: Settings, options: BaseModel) -> Settings:
    """The settings, with the emulated device's budget where they have none and a large model's host memory leaves less.

    Raises BudgetError as the engine would, and where both do not fit the one memory that they are.
    """
    budget, index = device_budget(settings), find_units(model, TORCH_DTYPE[settings.dtype]).index

    def need_at(device_bytes: int) -> int:
        emulated = settings.device == "cpu"
        allowance = EXACT if emulated else CUDA.on(settings.ranks)
        context = PlanningContext(
            device_budget=allowance.plannable(device_bytes),
            host_budget=host_budget(settings),
            itemsize=TORCH_DTYPE[settings.dtype].itemsize,
            ranks=settings.ranks,
            expert_ranks=settings.expert_ranks,
            accumulate=settings.accumulate,
            seed=settings.seed,
            recompute=settings.recompute,
            allowance=allowance,
            device_name="cpu-emulated" if emulated else torch.cuda.get_device_name(),
            disk_budget=disk_budget(settings),
            moments=chosen(settings).moments,
        )
        policy = strategy(options, context)
        check_update_rule(policy.update_rule, to_wait=policy.to_wait, clip=settings.clip, dtype=settings.dtype)
        return host_need(within_host(policy.layout(index), context, policy.update_rule), context)

    need = need_at(budget)
    if settings.device != "cpu" or settings.device_memory is not None or AMPLE * need <= budget:
        return settings
    left = max(budget - need, 0)
    try:
        need_at(left)
    except BudgetError as error:
        both = f"{format_size(need)} of host memory and {format_size(error.need)} of the emulated device"
        raise BudgetError(
            f"{strategy.name} needs at least {both}, which is host memory too, {format_size(budget)} are there: take a smaller "
            "model, or a machine with more memory",
            tier="host",
            need=need + error.need,
            have=budget,
        ) from None
    return replace(settings, device_memory=left)
