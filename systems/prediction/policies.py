"""Who makes the plans of a system in a forecast: the strategy itself, or a policy of the same rules."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from functools import partial
from types import MappingProxyType
from typing import Any

from pydantic import BaseModel

from systems.planning.strategy import PlanningContext
from systems.prediction.baseline_policy import BaselinePolicy
from systems.prediction.replicas import DdpPolicy, ResidentPolicy
from systems.prediction.zero_policy import ZeroPolicy
from systems.substrate.system import ManagedSystem
from systems.system import System

RESIDENT = "resident"
BASELINES: Mapping[str, Callable[[Any, PlanningContext], BaselinePolicy]] = MappingProxyType(
    {
        RESIDENT: ResidentPolicy,
        "torch-ddp": DdpPolicy,
        "deepspeed-zero2": partial(ZeroPolicy, "deepspeed-zero2", 2, False),
        "deepspeed-zero2-offload": partial(ZeroPolicy, "deepspeed-zero2-offload", 2, True),
        "deepspeed-zero3": partial(ZeroPolicy, "deepspeed-zero3", 3, False),
        "deepspeed-zero3-offload": partial(ZeroPolicy, "deepspeed-zero3-offload", 3, True),
    }
)


def policy_of(system: System) -> Callable[[Any, PlanningContext], Any]:
    """ValueError for a system that has none, neither of its own nor of its rules."""
    if isinstance(system, ManagedSystem):
        return system.strategy
    if system.name in BASELINES:
        return BASELINES[system.name]
    raise ValueError(f"{system.name} makes no plan that could be simulated: harness run measures it")


def runs_as_planned(system: System) -> bool:
    """A run does what is planned: not so of other packages, of which there are rules alone."""
    return isinstance(system, ManagedSystem) or system.name == RESIDENT


def left_out(system: str, ranks: int) -> tuple[str, ...]:
    """What a forecast of this system does not know, in words; nothing of what is planned and run here on one rank."""
    found = []
    if ranks > 1:
        found.append("what collectives take from compute on a device, and in staging and buffers of their library")
        found.append("waits for a rank that is slower than the others")
    if system in BASELINES and system != RESIDENT:
        found.append(f"what {system} takes in time and memory beyond its rules: a run may be slower")
    return tuple(found)


def sums_natively(system: System, options: BaseModel) -> bool:
    """Ranks add gradients in the library's own way, as all other packages do: not by the ordered sum."""
    return not runs_as_planned(system) or getattr(options, "reduction", "ordered") == "native"
