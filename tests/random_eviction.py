"""A strategy that exists only to test the substrate: a bundle a unit (or a shared set), no plan, random victims."""

from __future__ import annotations

import random
from collections.abc import Sequence
from typing import ClassVar, Literal

from pydantic import BaseModel, ConfigDict

from systems.errors import BudgetError
from systems.planning.layout import FlatSpace, Layout, ModelIndex, Parameter, pack
from systems.planning.plan import Plan, UpdateRule
from systems.planning.strategy import TO_WAIT, PlanningContext
from systems.planning.trace import Trace


class RandomOptions(BaseModel):
    model_config = ConfigDict(extra="forbid", frozen=True)

    chunk_parameters: int = 3  # parameters a bundle, so that bundles straddle units
    write_back: bool = False
    in_place: bool = False  # gradients over their own parameters where they have one user
    activations: Literal["device", "host"] = "device"


class RandomVictim:
    def __init__(self, seed: int) -> None:
        self._random = random.Random(seed)

    def choose(self, candidates: Sequence[int], moment: int) -> int:
        return self._random.choice(list(candidates))


class RandomEviction:
    name: ClassVar[str] = "random-eviction"
    summary: ClassVar[str] = "test only"
    Options: ClassVar[type[BaseModel]] = RandomOptions
    update_rule = UpdateRule.AFTER_NORM
    to_wait = TO_WAIT
    runs_ahead = True
    warm_up_share: float | None = None
    bounded = False
    max_staleness: int | None = None

    def __init__(self, options: RandomOptions, context: PlanningContext) -> None:
        self._options, self._context = options, context
        self.write_back = options.write_back
        self._victim = RandomVictim(context.seed)
        self.offloaded_inputs: frozenset[int] = frozenset()
        self.rematerialised: frozenset[int] | None = None

    def layout(self, index: ModelIndex) -> Layout:
        self.offloaded_inputs = index.blocks if self._options.activations == "host" else frozenset()
        groups: dict[tuple[bool, tuple[str, ...]], list[Parameter]] = {}
        for p in index.parameters:
            shared = p.users if len(p.users) > 1 else ()
            groups.setdefault((p.trainable, shared), []).append(p)
        parts: list[list[Parameter]] = []
        for (_, shared), members in groups.items():
            size = len(members) if shared else self._options.chunk_parameters
            parts += [members[start : start + size] for start in range(0, len(members), size)]
        packed = (
            [pack(part, space=FlatSpace("world", self._context.ranks, part[0].trainable), itemsize=self._context.itemsize)]
            for part in parts
        )
        single = (n for n, part in enumerate(parts) if part[0].trainable and all(len(p.users) == 1 for p in part))
        in_place = frozenset(single) if self._options.in_place else frozenset[int]()
        return Layout.of(index, self._context.itemsize, packed, in_place=in_place)

    def eviction(self, layout: Layout, trace: Trace | None) -> RandomVictim:
        return self._victim

    def plan(self, layout: Layout, trace: Trace) -> Plan:
        raise BudgetError("no plan, on purpose", tier="device", need=0, have=0)

    def statistics(self) -> BaseModel:
        return self._options
