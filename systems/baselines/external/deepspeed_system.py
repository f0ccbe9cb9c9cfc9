"""The registry's entries for DeepSpeed: checks a request, sizes it, and hands it to the package."""

from __future__ import annotations

import dataclasses
import uuid
from pathlib import Path
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn

from systems.baselines.external import budget, deepspeed_global, extensions
from systems.baselines.external.deepspeed_config import (
    Sizes,
    Variant,
    check_disk,
    configuration,
    host_need,
    split_ratio,
    with_users_file,
)
from systems.baselines.external.deepspeed_engine import DeepSpeedRun
from systems.baselines.external.faces import INSTALL, InfinityOptions
from systems.baselines.external.package import ConfigOptions, PackageStatistics, require
from systems.baselines.external.process import begin
from systems.baselines.external.weights import find_weights
from systems.errors import UnavailableError
from systems.face import Face
from systems.machine.budgets import device_budget
from systems.messages import one_line
from systems.ranks.ranks import Ranks
from systems.settings import Settings
from systems.system import Engine, RankedSystem

RESERVED_SHARE = 0.5  # of the device, for activations and DeepSpeed's buckets: with 0.35 ps-4b did not fit 20 GiB


class DeepSpeedSystem(RankedSystem):
    """A named configuration of DeepSpeed."""

    def __init__(self, face: Face, variant: Variant) -> None:
        self.name, self.summary, self.abilities, self.variant = face.name, face.summary, face.abilities, variant
        self.Options: type[BaseModel] = face.Options

    def initialize(self, model: nn.Module, settings: Settings, options: BaseModel, *, ranks: Ranks | None = None) -> Engine:
        assert isinstance(options, ConfigOptions)
        mine = begin(model, settings, options, ranks, self.name)
        variant = self.variant
        if isinstance(options, InfinityOptions):
            variant = dataclasses.replace(variant, parameters=options.parameters)
        variant.check(settings, self.name)
        found = find_weights(model, settings, self.name)
        sizes = Sizes.of(found.index, settings)
        disk: Path | None = None
        if isinstance(options, InfinityOptions):
            disk = check_disk(sizes, options.nvme_path, self.name, settings.ranks_here) / f"deepspeed-{uuid.uuid4().hex[:12]}"
        ratio = max(mine.exchange("share of the optimizer on the CPU", _ratio(variant, settings, sizes, options)))
        ours = configuration(variant, settings, sizes, ratio=ratio, nvme_path=None if disk is None else str(disk))
        config, notes = with_users_file(ours, options.config, self.name)
        budget.check_host(settings, system=self.name, need=host_need(variant, settings, sizes, config))
        with deepspeed_global.loaded_for(settings):
            deepspeed = require("deepspeed", INSTALL, self.name)
            self._build(settings)
        statistics = PackageStatistics(
            package="deepspeed",
            version=deepspeed.__version__,
            config=config,
            config_file=options.config,
            notes=notes + self._notes(settings),
        )
        return DeepSpeedRun(
            model,
            found,
            settings,
            mine,
            deepspeed=deepspeed,
            limits=budget.BudgetInForce(settings),
            config=config,
            statistics=statistics,
            disk=disk,
        )

    def _build(self, settings: Settings) -> None:
        """DeepSpeed's extensions, minutes the first time; loaded ones cost nothing later."""
        builders = require("deepspeed.ops.op_builder", INSTALL, self.name)
        disk = self.variant.optimizer == "nvme"
        if disk and not builders.AsyncIOBuilder().is_compatible(verbose=False):
            raise UnavailableError(
                f"{self.name} is unavailable: DeepSpeed's disk operations need libaio and its headers",
                install="apt install libaio-dev",
            )
        wanted = [builders.CPUAdamBuilder] if self.variant.offloads else []
        wanted += [builders.ShareMemCommBuilder] if settings.device == "cpu" else []
        wanted += [builders.AsyncIOBuilder] if disk else []
        come_built = require("deepspeed.git_version_info", INSTALL, self.name).installed_ops
        with extensions.building():
            for builder in wanted:
                if not come_built.get(builder.NAME):
                    extensions.tell_of_build(f"DeepSpeed's {builder.NAME}", builder.NAME)
                try:
                    builder().load(verbose=False)
                except Exception as error:  # a build can fail in any way, and this system alone is lost
                    why = one_line(f"{type(error).__name__}: {error}")[:300]
                    raise UnavailableError(f"{self.name} is unavailable: {builder.NAME} does not build ({why})") from error

    def _notes(self, settings: Settings) -> list[str]:
        notes = []
        if settings.device == "cpu":
            notes.append(budget.ONE_MEMORY)
            if self.variant.offloads:
                notes.append("offloading copies within one memory here: its arithmetic is real, its times mean nothing")
            if self.variant.partial:
                notes.append("on the CPU accelerator every sub-group is the CPU's, whatever the ratio")
        if self.variant.super_offload:
            notes.append("updates start during backward, so a learning rate counts one step later than elsewhere")
        return notes


def _ratio(variant: Variant, settings: Settings, sizes: Sizes, options: Any) -> float:
    """Twin-Flow's share on the CPU: as given, or what the device has no room for beside parameters and activations."""
    if not variant.partial:
        return 1.0
    if options.ratio is not None:
        return options.ratio
    budget_bytes = device_budget(settings)
    free = budget_bytes if settings.device == "cpu" else min(budget_bytes, torch.cuda.mem_get_info()[0])
    reserve = int(RESERVED_SHARE * budget_bytes) if options.reserve is None else options.reserve
    return split_ratio(sizes, variant, free - sizes.width * sizes.share(sizes.parameters) - reserve)
