"""Turns a strategy into a system: the one place where policy and mechanism meet."""

from __future__ import annotations

import os
import shutil
from collections.abc import Callable
from typing import Any

import torch
from pydantic import BaseModel

from systems.device.device import Device
from systems.device.make import make_device
from systems.device.watch.events import EventLog
from systems.errors import BudgetError, UnsupportedError
from systems.face import OF_STRATEGIES
from systems.machine.budgets import Budgets, device_budget, disk_budget, host_budget
from systems.optimizers.choice import chosen
from systems.planning.policy.options import StrategyOptions
from systems.planning.strategy import Strategy
from systems.ranks.beginnings import ALONE, begin_alike, smallest
from systems.ranks.ranks import Ranks, SingleRank
from systems.recipe.model.uses import said_by
from systems.settings import Settings
from systems.sizes import format_size
from systems.substrate.engine import ManagedEngine
from systems.substrate.room import look
from systems.system import Engine, System


class ManagedSystem(System):
    """A strategy run on the substrate; obeys systems.system.System."""

    abilities = OF_STRATEGIES

    def __init__(self, strategy: type[Strategy]) -> None:
        self.strategy = strategy
        self.name, self.summary, self.Options = strategy.name, strategy.summary, strategy.Options

    def look_for_room(self, model: torch.nn.Module, settings: Settings, options: BaseModel) -> Settings:
        """See systems.substrate.room.look."""
        return look(self.strategy, model, settings, options)

    def initialize(
        self,
        model: torch.nn.Module,
        settings: Settings,
        options: BaseModel,
        *,
        device: Callable[[EventLog], Device] | None = None,
        ranks: Ranks | None = None,
    ) -> Engine:
        """device: makes the device instead of the settings' own (tests inject jitter and faults this way). ranks: this one and
        the others. Each plans with what the one with the smallest budgets has. All of them initialize, step, evaluate, read
        values and close alike; `drain` is each one's own.
        """
        if ranks is None and settings.ranks != 1:
            raise UnsupportedError(ALONE.format(settings.ranks))

        def make(log: EventLog) -> Device:
            return device(log) if device is not None else make_device(settings, budget, log)

        def strategy(context: Any) -> Strategy:
            return self.strategy(options, context)

        try:
            mine = SingleRank() if ranks is None else ranks
            more: dict[str, Any] = {"system": self.name, "device_memory": settings.device_memory}
            more |= {"uses": said_by(model), "optimizer": chosen(settings).described}
            begin_alike(mine, settings, options, model, **more)
            budget, host, disk = smallest(mine, lambda: [each(settings) for each in (device_budget, host_budget, disk_budget)])
            if isinstance(options, StrategyOptions):
                mine.link.sum_by(options.reduction)
            return ManagedEngine(model, settings, strategy, make, Budgets(host=host, disk=disk), mine)
        except BudgetError as error:
            if settings.disk is not None and error.tier == "host":  # with more room there it may have done
                free = format_size(shutil.disk_usage(settings.disk).free)
                error.args = (f"{error} ({free} are free on the disk of {os.fspath(settings.disk)})",)
            raise
