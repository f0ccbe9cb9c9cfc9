"""What a user may choose, and what H3T tells about its decisions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal

from pydantic import Field, field_validator

from systems.planning import hardware
from systems.planning.policy.options import StrategyOptions, StrategyStatistics
from systems.strategies.h3t.profiling import prepare, read_profile

Variant = Literal["global-offload", "resident-optimizer"]
Solver = Literal["best", "dp", "greedy", "manual", "random", "on", "off", "drawn"]


class H3TOptions(StrategyOptions):
    """profile_steps: steps that the profiler measures before the solver runs (the paper's S). profile: a JSON file that keeps
    what it measured; one that is there is used instead of measuring. hardware: the profile whose copy and update rates the
    solvers and the simulator reckon with at run time; None is the shipped one of the device in this machine, if there is
    one, else an H100's.

    solver: best is the fastest by simulated time of dp, greedy and manual, without the barriers of segment synchronisation; on
    and off have every switch alike, drawn takes a random setting for each layer (by --seed) without looking at time. samples:
    T_rand of random. bins: m of dp.
    variant: global-offload is the paper's, gradients and optimizer of every layer on the host; resident-optimizer keeps
    optimizer state on the device where it fits, first layers first.
    """

    profile_steps: int = Field(default=10, ge=1)
    profile: str | None = None
    hardware: str | None = None
    solver: Solver = "best"
    samples: int = Field(default=10_000, ge=1)
    bins: int = Field(default=128, ge=1)
    variant: Variant = "global-offload"

    may_help: ClassVar[Mapping[str, tuple[Any, str]]] = MappingProxyType(
        {**StrategyOptions.may_help, "variant": ("resident-optimizer", "optimizer states take device memory")}
    )
    for_small_models: ClassVar[Mapping[str, Any]] = MappingProxyType({"profile_steps": 1})  # the second step has a plan

    @field_validator("hardware")
    @classmethod
    def _there_is_one(cls, given: str | None) -> str | None:
        if given is not None:
            hardware.load(given)
        return given

    @field_validator("profile")
    @classmethod
    def _usable(cls, given: str | None) -> str | None:
        if given is not None and os.path.exists(given):  # False where the name itself is impossible
            read_profile(Path(given))
        elif given is not None:
            prepare(Path(given))
        return given


class H3TStatistics(StrategyStatistics):
    """None: no step was planned yet. switch_on_ratios: per switch the share of layers that have it on, as in table 6.

    solver: whose assignment is in force; candidates_s: simulated step time of each that fits. other_modules: what becomes of
    parameters outside the layers (held: on the device while used; early: fetched ahead; resident: kept).
    barriers_per_step: of segment synchronisation, as run.
    hardware: description of the profile reckoned with. solver_s: all solvers together. profiled_steps: measured so far.
    """

    variant: Variant
    num_layers: int
    num_bundles: int
    profiled_steps: int = 0
    solver: str | None = None
    solver_s: float | None = None
    hardware: str | None = None
    simulated_step_time_s: float | None = None
    candidates_s: dict[str, float] = Field(default_factory=dict)
    switch_on_ratios: dict[str, float] | None = None
    other_modules: str | None = None
    barriers_per_step: int | None = None
