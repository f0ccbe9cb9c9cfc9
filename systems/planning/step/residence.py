"""Where each bundle lives and is updated, and what of a step's demand depends on that alone: how long gradients are on the
device, and the bytes that states take.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from functools import cached_property

from systems.planning.disk_layout import buffer_bytes
from systems.planning.layout import PAGE, Layout, round_up
from systems.planning.plan import Tier, UpdateRule
from systems.planning.step.demand import Demand, Span
from systems.planning.strategy import PlanningContext


@dataclass(frozen=True)
class Residence:
    """Where each bundle lives and is updated: the part of a plan that lifetimes depend on.

    on_device: bundles whose segments are updated on the device (or that never move). sharded: those of them that rest there
    as this rank's shard (Plan.sharded); the others are resident for good.
    in_place: see Note [Gradients in place] in demand.py. ahead: bundles with second versions, see Plan.ahead. staying: see
    Plan.staying.
    """

    layout: Layout
    context: PlanningContext
    on_device: frozenset[int]
    update_rule: UpdateRule
    in_place: frozenset[int] = frozenset()
    ahead: frozenset[int] = frozenset()
    sharded: frozenset[int] = frozenset()
    staying: frozenset[int] = frozenset()

    @classmethod
    def of(
        cls,
        layout: Layout,
        context: PlanningContext,
        optimizer_tier: Sequence[Tier],
        update_rule: UpdateRule,
        in_place: frozenset[int] = frozenset(),
        ahead: frozenset[int] = frozenset(),
        sharded: frozenset[int] = frozenset(),
        staying: frozenset[int] = frozenset(),
    ) -> Residence:
        """A bundle is on the device if its first segment is: all segments of a bundle share their tier."""
        on_device = frozenset(b.index for b in layout.bundles if optimizer_tier[b.segments[0]] is Tier.DEVICE)
        return cls(layout, context, on_device, update_rule, in_place, ahead, sharded, staying)

    @cached_property
    def whole(self) -> frozenset[int]:
        """Bundles that never leave the device."""
        return self.on_device - self.sharded

    def reuses(self, bundle: int) -> bool:
        """True if the gradient takes the parameters' place."""
        return bundle in self.in_place and bundle not in self.whole

    def adopted(self, bundle: int) -> bool:
        """True if the gradient stays in autograd's own buffers until the update."""
        return bundle in self.on_device and self.context.accumulate == 1 and self.context.ranks == 1

    def keeps_shard(self, bundle: int) -> bool:
        """True if, of the sum over ranks, this rank's shard waits on the device for the norm, and the range does not."""
        waits = self.context.accumulate == 1 and self.update_rule is UpdateRule.AFTER_NORM
        return bundle in self.on_device and self.context.ranks > 1 and waits and self.layout.bundles[bundle].scattered

    def gradient_freed_at_flush(self, bundle: int) -> bool:
        """Else the gradient waits for its update at STEP_END."""
        if bundle not in self.on_device or self.context.accumulate > 1 or self.update_rule is UpdateRule.WHEN_REDUCED:
            return True
        return self.keeps_shard(bundle)

    def gradient_spans(self, demand: Demand, bundle: int) -> tuple[Span, ...]:
        """Intervals in which the bundle's whole gradient takes device memory, in a range or in autograd's buffers.

        One that waits for the update is there when STEP_END begins: an adopted one counts in the interval behind it
        too, a range, whose bytes are known exactly, only until there.
        """
        spans = demand.gradient_spans.get(bundle, ())
        if self.gradient_freed_at_flush(bundle):
            return spans
        end = len(demand) if self.adopted(bundle) else len(demand) - 1
        return tuple(Span(span.begin, end) for span in spans[:1])

    def gradient_bytes(self, demand: Demand, bundle: int) -> list[tuple[Span, int]]:
        """What it takes beside parameters: the same with their bytes, unless it is in their place, and the shard that waits for
        the norm. That is taken before the range is freed, or the block, so it counts in the interval before too.
        """
        spans, size = self.gradient_spans(demand, bundle), self.layout.bundle_bytes(bundle)
        found = [] if self.reuses(bundle) else [(span, size) for span in spans]
        if spans and self.keeps_shard(bundle):
            found.append((Span(spans[0].end - 1, len(demand) - 1), self.layout.shard_bytes(bundle)))
        return found

    def state_bytes(self, bundle: int) -> int:
        """Bytes of master weight, moments and accumulator of this rank's shards if they are on the device, else 0."""
        return self.optimizer_bytes(bundle) if bundle in self.on_device else 0

    def optimizer_bytes(self, bundle: int) -> int:
        """The same wherever they are. Frozen segments have none."""
        segments = (self.layout.segments[s] for s in self.layout.bundles[bundle].segments)
        return sum(s.shard_numel for s in segments if s.space.trainable) * self.context.optimizer_itemsize

    @cached_property
    def buffered(self) -> tuple[int, ...]:
        """Bundles whose updates run behind the steps."""
        there = (b for b in self.layout.bundles if b.trainable and b.movable and b.index not in self.on_device)
        return tuple(b.index for b in there) if self.layout.max_staleness is not None else ()

    @cached_property
    def host_bytes(self) -> int:
        """Of slots, states that have their home there and are not on the device (their pages go back then), buffers for those
        on the disk, second versions, and buffers for updates that run behind the steps."""
        states = sum(map(self.host_state_bytes, range(len(self.layout.bundles))))
        seconds = second_version_bytes(self.layout, self.context, self.ahead)
        behind = lock_free_bytes(self.layout, self.context, self.buffered)
        return slot_bytes(self.layout) + states + buffer_bytes(self.layout) + seconds + behind

    def host_state_bytes(self, bundle: int) -> int:
        """Of a bundle's states, on the host; of those on the disk the accumulators are there."""
        if bundle in self.on_device:
            return 0
        size, each = self.optimizer_bytes(bundle), self.context.optimizer_itemsize
        return size // each * self.context.accumulator_itemsize if bundle in self.layout.on_disk else size

    def resting_bytes(self, bundle: int) -> int:
        """Pool bytes of the bundle's parameters that are there at every moment: all of it, or this rank's shard."""
        if bundle in self.sharded:
            return self.layout.shard_bytes(bundle)
        return self.layout.bundle_bytes(bundle) if bundle in self.on_device else 0

    @property
    def static_bytes(self) -> int:
        """Pool bytes that are there at every moment: parameters and optimizer state of the bundles on the device."""
        return sum(self.resting_bytes(b) + self.state_bytes(b) for b in self.on_device)


def slot_bytes(layout: Layout) -> int:
    """Of this rank's host: in the compute dtype, whatever may leave the device."""
    return sum(layout.shard_numel(b.index) for b in layout.bundles if b.movable) * layout.itemsize


def second_version_bytes(layout: Layout, context: PlanningContext, bundles: Iterable[int]) -> int:
    """Of this rank's host, for the second versions of these bundles: a mapping each for master, each moment and slots.

    With several micro-batches none for slots: gradients are in the accumulators, and both versions have one slot.
    """
    numel = sum(map(layout.shard_numel, bundles))
    slots = numel * layout.itemsize if context.accumulate == 1 else 0
    return (1 + len(context.moments)) * round_up(4 * numel, PAGE) + round_up(slots, PAGE)


def lock_free_bytes(layout: Layout, context: PlanningContext, bundles: Iterable[int]) -> int:
    """Of this rank's host, for updates of these bundles that run behind the steps: twice their parameters, and twice a sum of
    their gradients, as these are added up for an update: in fp32 with several micro-batches. A mapping each.
    """
    numel = 2 * sum(map(layout.shard_numel, bundles))
    return round_up(numel * layout.itemsize, PAGE) + round_up(numel * (context.accumulator_itemsize or layout.itemsize), PAGE)


def unmovable(layout: Layout) -> frozenset[int]:
    return frozenset(b.index for b in layout.bundles if not b.movable)
