"""How a device is divided in one kind of step: what lives there for good, and what is left for bundles that come and go."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from functools import cached_property

from systems.planning.layout import Layout
from systems.planning.plan import Pages, Plan, PlannedOperation, UpdateRule, optimizer_tiers
from systems.planning.policy.refusal import UnitName, check_need
from systems.planning.step.demand import Demand, demand_of, reusable
from systems.planning.step.profiles import Need, held_profile, minimum_need, non_model_profile, pool_profile, room_beside
from systems.planning.step.residence import Residence, unmovable
from systems.planning.strategy import PlanningContext
from systems.planning.trace import Trace


@dataclass(frozen=True)
class Division:
    """One kind of step, by its trace, within a context. For messages: system, unit_name, and smaller (see `check_need`).

    gradients_stay: those written in place do, where they can (Plan.staying).
    """

    layout: Layout
    trace: Trace
    context: PlanningContext
    rule: UpdateRule
    system: str
    unit_name: UnitName
    smaller: str | None = None
    gradients_stay: bool = False

    @cached_property
    def reusable(self) -> frozenset[int]:
        return reusable(self.layout, self.trace, self.context)

    @cached_property
    def demand(self) -> Demand:
        return demand_of(self.layout, self.trace, self.context, self.reusable, self._staying)

    @cached_property
    def _staying(self) -> frozenset[int]:
        can = self.gradients_stay and self.context.ranks == 1 and self.rule is UpdateRule.AFTER_NORM
        return self.reusable if can else frozenset()

    def residence(self, on_device: frozenset[int], *, whole: bool = False) -> Residence:
        """With these bundles updated on the device. Of several ranks each then has its shard there, unless it has all (whole),
        as of what never moves.
        """
        shards = frozenset[int]() if whole or self.context.ranks == 1 else on_device - unmovable(self.layout)
        in_place = self.reusable - (on_device - shards)
        staying = self._staying - on_device
        return Residence(self.layout, self.context, on_device, self.rule, in_place, sharded=shards, staying=staying)

    @cached_property
    def everything(self) -> Residence:
        """Whole, for good."""
        return self.residence(frozenset(b.index for b in self.layout.bundles), whole=True)

    @cached_property
    def base(self) -> Residence:
        """Only what never moves."""
        return self.residence(unmovable(self.layout))

    def least(self, *, measured: bool | None = None) -> Need:
        """The need of the base, when nothing is there but what is held. BudgetError if that does not fit. measured: see
        `check_need`.
        """
        need = minimum_need(self.trace, self.demand, self.base)
        check_need(need, self.context, self.system, self.unit_name, measured=measured, smaller=self.smaller)
        return need

    def fixed(self, residence: Residence) -> list[int]:
        """Bytes per moment that bundles which come and go cannot have."""
        non_model = non_model_profile(self.trace, self.demand, residence)
        return added(pool_profile(self.demand, residence), non_model)

    def fits(self, residence: Residence) -> bool:
        """With nothing that comes and goes."""
        fixed, pool = max(self.fixed(residence)), max(pool_profile(self.demand, residence))
        return fixed <= self.context.device_budget and pool <= self.context.pool_budget

    def room(self, residence: Residence) -> list[int]:
        """Bytes per moment for bundles that come and go; at least what is held, where `least` fits."""
        held = held_profile(self.demand, residence)
        return room_beside(self.fixed(residence), pool_profile(self.demand, residence), held, self.context)

    def room_for_merging(self, residence: Residence) -> list[int]:
        """The same as a moment begins, which is when pages are merged: gradient ranges are opened behind that, and no more
        activations live than at the peak of either interval that the moment bounds.
        """
        pool, others = pool_profile(self.demand, residence), non_model_profile(self.trace, self.demand, residence)
        pool, others = [pool[0], *pool[:-1]], [min(pair) for pair in zip(others, [others[0], *others[:-1]], strict=True)]
        held = held_profile(self.demand, residence)
        return room_beside(added(pool, others), pool, held, self.context)

    def sizes(self, residence: Residence) -> dict[int, int]:
        """Bytes of all bundles that come and go."""
        return {b.index: self.layout.bundle_bytes(b.index) for b in self.layout.bundles if b.index not in residence.whole}

    def plan(
        self,
        operations: tuple[PlannedOperation, ...],
        residence: Residence,
        resident: frozenset[int],
        shards: frozenset[int] = frozenset(),
        pages: frozenset[Pages] = frozenset(),
    ) -> Plan:
        """resident: bundles that come and go and are there when a step begins. shards: those whose shard, which comes and goes
        too, is. pages: what is there of others.
        """
        return Plan(
            signature=self.trace.signature,
            operations=operations,
            optimizer_tier=optimizer_tiers(self.layout, residence.on_device),
            resident_at_start=residence.whole | resident,
            update_rule=self.rule,
            in_place=residence.in_place,
            sharded=residence.sharded,
            shards_at_start=shards,
            pages_at_start=pages,
            staying=residence.staying,
        )


def added(*profiles: Sequence[int]) -> list[int]:
    """Moment by moment."""
    return [sum(each) for each in zip(*profiles, strict=True)]
