"""A second, plainer runtime for tests: carries out a plan by the contract's words and keeps the pool's account.

It shares no code with systems.planning beyond the types, so that a mistake there shows.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass, field

from systems.planning.layout import Layout
from systems.planning.plan import OpKind, Plan, Tier, UpdateRule
from systems.planning.strategy import PlanningContext
from systems.planning.trace import ENTER, EXIT, Phase, Trace


@dataclass
class PoolAccount:
    """Pool bytes after every change, with the moment of each; fetches and gradient bytes over the step."""

    now: int = 0
    log: list[tuple[int, int]] = field(default_factory=list)
    after: list[int] = field(default_factory=list)
    h2d_bytes: int = 0
    d2h_bytes: int = 0
    adopted: list[int] = field(default_factory=list)  # bytes in autograd's buffers after each moment, all of its unit's
    newly_adopted: dict[int, list[int]] = field(default_factory=dict)
    updates: list[tuple[int, str, int]] = field(default_factory=list)  # (moment, what, bundle) of the host's, as issued
    host_bytes: int = 0  # slots and states, both versions of them

    def add(self, moment: int, size: int) -> None:
        self.now += size
        self.log.append((moment, self.now))

    @property
    def peak(self) -> int:
        return max([*self.after, *(value for _, value in self.log)])


class ReferenceRuntime:
    def __init__(self, layout: Layout, trace: Trace, plan: Plan, context: PlanningContext) -> None:
        self.layout, self.trace, self.plan, self.context = layout, trace, plan, context
        self.device = {b.index for b in layout.bundles if all(plan.optimizer_tier[s] is Tier.DEVICE for s in b.segments)}
        self.settled = self.device - plan.sharded  # whole for good
        self.moved = {p.operation.bundle for p in plan.operations if p.operation.kind is OpKind.MOVE}  # of one rank
        self.shards = set(plan.sharded | plan.shards_at_start)  # of which this rank's part is there
        self.sums: set[int] = set()  # of which this rank's part of the reduced gradient waits for the norm
        self.in_place = plan.in_place - self.settled
        self.carrying: set[int] = set()  # blocks with gradients in them
        self.staying: dict[int, None] = {}  # of those, complete ones that the plan has stay
        self.adopts = self.device if context.accumulate == 1 and context.ranks == 1 else set()
        self.resident = set(plan.resident_at_start)
        self.holds = [0] * len(layout.bundles)
        self.ranges: set[int] = set()
        self.kept: set[int] = set()  # adopted gradients
        self.flushed: set[int] = set()
        self.due: set[int] = set()  # flushed, and not updated since
        self.versions = dict.fromkeys(plan.ahead, 0)  # which of two counts
        self.written: dict[int, int] = {}  # which one an update ahead of the norm has written
        self.account = PoolAccount()

    def size(self, bundle: int) -> int:
        return self.layout.bundles[bundle].numel * self.layout.itemsize

    def part(self, bundle: int) -> int:
        return self.size(bundle) // self.context.ranks

    def run(self) -> PoolAccount:
        states = 0
        self.account.host_bytes = self.host_bytes()
        for bundle in self.device:
            for s in self.layout.bundles[bundle].segments:
                segment = self.layout.segments[s]
                each = 16 if self.context.accumulate > 1 else 12
                states += segment.numel // segment.space.ranks * each if segment.space.trainable else 0
        self.account.now = states + sum(map(self.size, self.resident)) + sum(map(self.part, self.shards))
        for moment in range(len(self.trace)):
            self.account.newly_adopted[moment] = []
            self.at(moment)
            self.account.after.append(self.account.now)
            self.account.adopted.append(sum(map(self.size, self.kept)))
        assert not self.ranges
        assert not self.carrying
        assert not any(self.holds)
        assert self.resident == set(self.plan.resident_at_start)
        assert self.shards == self.plan.sharded | self.plan.shards_at_start
        assert not self.sums
        assert not self.staying
        assert not self.due
        assert set(self.versions.values()) <= {1}, "each update that ran ahead was the step's"
        return self.account

    def elements(self, bundles: Iterable[int]) -> int:
        """Of this rank."""
        segments = [self.layout.segments[s] for b in bundles for s in self.layout.bundles[b].segments]
        return sum(segment.numel // segment.space.ranks for segment in segments)

    def host_bytes(self) -> int:
        item, several = self.layout.itemsize, self.context.accumulate > 1
        host = [b.index for b in self.layout.bundles if b.trainable and b.index not in self.device]
        movable = [b.index for b in self.layout.bundles if b.movable]
        first = self.elements(movable) * item + self.elements(host) * (16 if several else 12)
        second = self.elements(self.plan.ahead)
        mappings = [4 * second] * 3 + [0 if several else item * second]
        return first + sum((size + 4095) // 4096 * 4096 for size in mappings)

    def at(self, moment: int) -> None:
        what = self.trace.moments[moment]
        bundles = self.layout.bundles_of_unit.get(what.unit, ())
        if what.phase in ENTER:
            self.carry_out(moment, first=True)
            self.carry_out(moment)
            for bundle in bundles:
                assert bundle in self.resident, f"bundle {bundle} absent at moment {moment}"
                self.holds[bundle] += 1
                if (
                    what.phase is Phase.BACKWARD_ENTER
                    and self.layout.bundles[bundle].trainable
                    and bundle not in self.ranges
                    and bundle not in self.in_place
                ):
                    if bundle in self.adopts:
                        if bundle not in self.kept:
                            self.account.newly_adopted[moment].append(bundle)
                        self.kept.add(bundle)
                    else:
                        self.ranges.add(bundle)
                        self.account.add(moment, self.size(bundle))
            return
        if what.phase in EXIT:
            for bundle in bundles:
                self.holds[bundle] -= 1
            if what.phase is Phase.BACKWARD_EXIT:
                self.carrying.update(self.in_place.intersection(bundles) - self.flushed)
        self.carry_out(moment, first=True)
        for bundle in self.trace.flushes[moment]:
            self.flush(bundle, moment)
        if what.phase is Phase.STEP_END:
            self.end(moment)
        self.carry_out(moment)

    def flush(self, bundle: int, moment: int) -> None:
        self.flushed.add(bundle)
        self.carrying.discard(bundle)
        several = self.context.accumulate > 1
        early = self.plan.update_rule is UpdateRule.WHEN_REDUCED
        if bundle not in self.device or several or early:
            self.free(bundle, moment)
        elif self.context.ranks > 1:
            self.sums.add(bundle)
            self.account.add(moment, self.part(bundle))
            self.free(bundle, moment)
        last = self.trace.moments[moment].micro_step == self.context.accumulate - 1
        if bundle not in self.device:
            self.account.d2h_bytes += self.size(bundle) // self.context.ranks
            self.update(bundle, moment, last=last)
        if bundle in self.plan.staying:
            self.staying[bundle] = None
        elif last and bundle not in self.settled and not self.holds[bundle]:
            self.drop(bundle, moment)

    def update(self, bundle: int, moment: int, *, last: bool) -> None:
        """Complete on the host: the update that need not wait is made."""
        self.due.add(bundle)
        if last and self.plan.update_rule is UpdateRule.WHEN_REDUCED:
            self.host_work(moment, "update", bundle)
            self.due.remove(bundle)
        elif last and bundle in self.versions:
            assert bundle not in self.written, "both versions are taken"
            self.written[bundle] = 1 - self.versions[bundle]
            self.host_work(moment, "update-ahead", bundle)

    def host_work(self, moment: int, what: str, bundle: int) -> None:
        self.account.updates.append((moment, what, bundle))

    def free(self, bundle: int, moment: int) -> None:
        self.kept.discard(bundle)
        if bundle in self.ranges:
            self.ranges.remove(bundle)
            self.account.add(moment, -self.size(bundle))

    def drop(self, bundle: int, moment: int, *, shard: bool = True) -> None:
        """The copy, if it is there, and the shard, if that is not its home."""
        assert bundle not in self.carrying
        if bundle in self.resident:
            self.resident.remove(bundle)
            self.account.add(moment, -self.size(bundle))
        if shard and bundle in self.shards - self.plan.sharded:
            self.shards.remove(bundle)
            self.account.add(moment, -self.part(bundle))

    def end(self, moment: int) -> None:
        self.staying.clear()
        for bundle in sorted(self.due, key=lambda b: (self.first_use(b), b)):
            if bundle not in self.written:
                self.host_work(moment, "update", bundle)
            elif self.context.accumulate > 1:
                self.host_work(moment, "clear", bundle)
        self.versions |= self.written
        self.due.clear()
        for bundle in self.flushed - self.settled:
            self.drop(bundle, moment)
        for bundle in list(self.sums):
            self.sums.remove(bundle)
            self.account.add(moment, -self.part(bundle))
        for bundle in list(self.ranges | self.kept):
            self.free(bundle, moment)

    def first_use(self, bundle: int) -> int:
        units = self.layout.bundles[bundle].units
        return next(i for i, m in enumerate(self.trace.moments) if m.phase in ENTER and m.unit in units)

    def carry_out(self, moment: int, *, first: bool = False) -> None:
        mine = [p for p in self.plan.operations if p.trigger == moment and p.first == first]
        for planned in sorted(mine, key=lambda p: p.priority):
            bundle, kind = planned.operation.bundle, planned.operation.kind
            assert bundle not in self.settled
            if self.context.ranks == 1 and kind in (OpKind.MOVE, OpKind.SHRINK):
                self.moved.add(bundle)
                if kind is OpKind.SHRINK:
                    continue
                kind = OpKind.FETCH
            elif kind is OpKind.FETCH and bundle in self.moved & self.resident:
                continue
            if kind is OpKind.FETCH:
                assert bundle not in self.resident
                self.resident.add(bundle)
                self.account.add(moment, self.size(bundle))
                self.account.h2d_bytes += 0 if bundle in self.shards else self.part(bundle)
            elif kind is OpKind.MOVE:
                assert bundle not in self.resident | self.shards
                self.shards.add(bundle)
                self.account.add(moment, self.part(bundle))
                self.account.h2d_bytes += self.part(bundle)
            else:
                assert bundle in self.resident or (kind is OpKind.DROP and bundle in self.shards)
                assert not self.holds[bundle]
                if bundle in self.staying:
                    assert kind is OpKind.WRITE_BACK
                    del self.staying[bundle]
                if kind is OpKind.SHRINK and bundle not in self.shards:
                    self.shards.add(bundle)
                    self.account.add(moment, self.part(bundle))
                self.drop(bundle, moment, shard=kind is not OpKind.SHRINK)


def can_run_ahead(layout: Layout, trace: Trace, plan: Plan, context: PlanningContext) -> frozenset[int]:
    """Bundles that the host updates after the norm, out of its own memory, once nothing reads them any more in the step."""
    found = set()
    for bundle in layout.bundles:
        flushes = [m for m, bundles in enumerate(trace.flushes) if bundle.index in bundles]
        flushes = [m for m in flushes if trace.moments[m].micro_step == context.accumulate - 1]
        uses = [m for m, moment in enumerate(trace.moments) if moment.phase in ENTER and moment.unit in bundle.units]
        on_host = plan.optimizer_tier[bundle.segments[0]] is Tier.HOST and bundle.index not in layout.on_disk
        if bundle.trainable and on_host and len(flushes) == 1 and max(uses) < flushes[0]:
            found.add(bundle.index)
    return frozenset(found if plan.update_rule is UpdateRule.AFTER_NORM else ())
