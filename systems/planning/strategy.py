"""The protocol of a strategy: a small policy that returns data. The substrate turns any strategy into a system."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Protocol

from pydantic import BaseModel

from systems.errors import UnsupportedError
from systems.planning.allowance import EXACT, Allowance
from systems.planning.hardware import HardwareProfile
from systems.planning.layout import ADAM, FlatSpace, Layout, ModelIndex, Parameter
from systems.planning.plan import Plan, UpdateRule
from systems.planning.trace import Trace
from systems.ranks.group_names import REPLICA, WORLD

UNLIMITED = 1 << 62


@dataclass(frozen=True)
class PlanningContext:
    """What a strategy may know before it decides. Budgets in bytes.

    itemsize: bytes of a parameter as computed with. gradient_itemsize: bytes of its gradient on the device (the same).
    recompute: what the user asked for, "none", "full" or block numbers. hardware: the machine, where a profile says what it
    is; at run time there is none but what traces tell, and device_name, as CUDA gives it.
    accumulator_itemsize: 4 with several micro-batches (fp32 accumulator), else 0.
    any_plan: it is only asked whether there is a plan, so one will do as well as another; the layout is as ever, and
    no more bundles are updated on the device.
    allowance: what was left of the device's memory to its allocator; device_budget is what remains.
    moments: names of what the optimizer keeps of a trained parameter in fp32 beside its master weight.
    disk_budget: of files for what the host cannot hold; 0 without a disk.
    expert_ranks: ranks that share one set of experts: see Note [Experts in groups] in systems/ranks/group_names.py.
    pool_budget: what bundles, gradient ranges and states may take of it at any moment, beside what is held in any case.
    """

    device_budget: int
    host_budget: int
    itemsize: int
    ranks: int
    accumulate: int
    seed: int
    recompute: Literal["none", "full"] | tuple[int, ...] = "none"
    hardware: HardwareProfile | None = None
    device_name: str | None = None
    allowance: Allowance = EXACT
    any_plan: bool = False
    pool_budget: int = UNLIMITED
    disk_budget: int = 0
    moments: tuple[str, ...] = ADAM
    expert_ranks: int = 1

    def space_of(self, parameter: Parameter, *, scattered: bool = True) -> FlatSpace:
        """Where it may lie. Where each rank has all experts, they are as everything else is."""
        group, ranks = parameter.group, self.ranks
        if group == REPLICA:
            group, ranks = (WORLD, ranks) if self.expert_ranks == 1 else (REPLICA, ranks // self.expert_ranks)
        return FlatSpace(group, ranks, parameter.trainable, scattered)

    def memory_for(self, nbytes: int) -> int:
        """Device memory that must be given for plans to have nbytes of it."""
        return self.allowance.budget_for(nbytes)

    @property
    def accumulator_itemsize(self) -> int:
        return 4 if self.accumulate > 1 else 0

    @property
    def optimizer_itemsize(self) -> int:
        """Bytes a parameter of master weight, moments and accumulator."""
        return 4 + 4 * len(self.moments) + self.accumulator_itemsize


class Eviction(Protocol):
    """Which bundle goes when room is needed and no plan says so (warm-up, departures from the trace)."""

    def choose(self, candidates: Sequence[int], moment: int) -> int:
        """candidates: resident bundles that nothing holds, never empty. moment: the last one that began."""


class Strategy(Protocol):
    """One instance a run. Methods are called in the order written; `plan` again for every newly traced step.

    warm_up_share: part of the device that model data may fill while there is no plan; None leaves it to the device.
    to_wait: what to change for updates that wait for the norm, in words of arguments.
    max_staleness: None: a step's updates are done before their parameters are used again. Else they run behind the steps, of
    which the parameters that a step reads may lack so many: Note [Lock-free] in substrate/bundle/buffered.py.
    bounded: what a plan in force does not ask for takes no more of the device than what it does ask for.
    offloaded_inputs: units whose inputs wait on the host for backward, where the unit is recomputed. Read at each step's
    begin; only units that were in it when `layout` returned can be. A trace's memory is that of the set then in force.
    rematerialised: None leaves recomputation to the settings. A strategy that chooses itself has here, when `layout` returns,
    the units that it may recompute, and all of them are in steps without a plan; a plan has Plan.rematerialise.
    """

    name: ClassVar[str]
    summary: ClassVar[str]
    Options: ClassVar[type[BaseModel]]
    update_rule: UpdateRule
    to_wait: str
    runs_ahead: bool  # updates may, with UpdateRule.AFTER_NORM: Plan.ahead is filled in for it
    write_back: bool  # evictions outside a plan write the parameters to the host (no master shard there)
    warm_up_share: float | None
    bounded: bool
    max_staleness: int | None
    offloaded_inputs: frozenset[int]
    rematerialised: frozenset[int] | None

    def __init__(self, options: Any, context: PlanningContext) -> None: ...

    def layout(self, index: ModelIndex) -> Layout: ...

    def eviction(self, layout: Layout, trace: Trace | None) -> Eviction: ...

    def plan(self, layout: Layout, trace: Trace) -> Plan: ...

    def statistics(self) -> BaseModel: ...


TO_WAIT = "`options=dict(nonfinite='skip')`"


def check_update_rule(rule: UpdateRule, *, to_wait: str, clip: float, dtype: str) -> None:
    """UnsupportedError where updates that begin during backward would need the norm first. to_wait: the strategy's."""
    if rule is UpdateRule.WHEN_REDUCED and (clip > 0 or dtype == "fp16"):
        raise UnsupportedError(
            "updates that do not wait for the norm (nonfinite=stop) can neither clip nor run fp16's loss scaling: use `clip=0` "
            f"and `dtype='bf16'`, or {to_wait}"
        )
