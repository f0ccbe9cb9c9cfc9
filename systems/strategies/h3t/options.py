"""What a user may choose, and what H3T tells about its decisions."""

from __future__ import annotations

import os
from collections.abc import Mapping
from pathlib import Path
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self, get_args

from pydantic import Field, field_validator, model_validator

from systems.planning import hardware
from systems.planning.policy.options import StrategyOptions, StrategyStatistics
from systems.strategies.h3t.profiling import prepare, read_profile

Variant = Literal["resident-optimizer", "global-offload", "paper"]
Solver = Literal["best", "dp", "basic-dp", "greedy", "manual", "random", "on", "off", "drawn"]


class H3TOptions(StrategyOptions):
    """profile_steps: steps that the profiler measures before the solver runs (the paper's S). profile: a JSON file that keeps
    what it measured; one that is there is used instead of measuring. hardware: the profile whose copy and update rates the
    solvers and the simulator reckon with at run time; None is the shipped one of the device in this machine, if there is
    one, else an H100's.

    solver: best is the fastest by simulated time of dp, greedy and manual, without the barriers of segment synchronisation; on
    and off have every switch alike, drawn takes a random setting for each layer (by --seed) without looking at time; basic-dp
    is Algorithm 3, for a few layers and bins. samples: T_rand of random. bins: m of dp and basic-dp.
    variant: resident-optimizer keeps optimizer states of the first layers on the device, of as many as make the step shorter;
    global-offload has gradients and optimizer of every layer on the host; paper is global-offload by the paper's workflow and
    cost model, where solver is dp unless given, and never best: on is the paper's "w/o H3T".
    """

    profile_steps: int = Field(default=10, ge=1)
    profile: str | None = None
    hardware: str | None = None
    solver: Solver = "best"
    samples: int = Field(default=10_000, ge=1)
    bins: int = Field(default=128, ge=1)
    variant: Variant = "resident-optimizer"

    rules: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {"paper": {"run_ahead": False, "nonfinite": "skip"}}  # updates are behind the last backward (section 3.1)
    )
    for_small_models: ClassVar[Mapping[str, Any]] = MappingProxyType({"profile_steps": 1})  # the second step has a plan

    @model_validator(mode="before")
    @classmethod
    def _solver_of_the_variant(cls, given: Any) -> Any:
        paper = isinstance(given, Mapping) and given.get("variant") == "paper"
        return {"solver": "dp", **given} if paper else given

    @model_validator(mode="after")
    def _solver_is_the_paper_s(self) -> Self:
        if self.variant == "paper" and self.solver == "best":
            others = ", ".join(get_args(Solver)[1:])
            raise ValueError(
                f"variant=paper has no solver=best, which leaves barriers out: give one of {others}, or leave it out"
            )
        return self

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
    hardware: description of the profile reckoned with; measured_bytes_per_s: of lanes, what variant=paper measured in its place
    (nothing where profile_steps is 1, as that step has no plan). solver_s: all solvers together. profiled_steps: so far.
    """

    variant: Variant
    num_layers: int
    num_bundles: int
    profiled_steps: int = 0
    solver: str | None = None
    solver_s: float | None = None
    hardware: str | None = None
    measured_bytes_per_s: dict[str, float] = Field(default_factory=dict)
    simulated_step_time_s: float | None = None
    candidates_s: dict[str, float] = Field(default_factory=dict)
    switch_on_ratios: dict[str, float] | None = None
    other_modules: str | None = None
    barriers_per_step: int | None = None
