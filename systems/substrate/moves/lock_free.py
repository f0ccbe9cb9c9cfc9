"""Lock-free updating, as the step sees it: bundles are buffered while a plan is in force, and at rest when anybody looks.

See Note [Lock-free] in bundle/buffered.py. Bundles whose states are on the device are updated there as ever. At rest, and in
steps without a plan, all is as without it: slots hold the parameters, and nothing but the masters and them counts. What was on
the device leaves as bundles come to rest, and is back as the next step begins: to come to rest takes no collective. Where one
of several ranks has come to rest, by `drain`, so do the others before the next step.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from functools import partial

from systems.device.device import Device
from systems.device.memory.host import HostMapping
from systems.messages import in_words
from systems.planning.layout import Layout
from systems.planning.plan import LaneKind
from systems.planning.step.operations import Work, before_updates, of_bundle
from systems.recipe.step.control import StepControl, count_updates
from systems.substrate.bundle.buffered import Behind, BufferedBundle
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.bundle.segments import slots_take_parameters
from systems.substrate.bundle.store import Store
from systems.substrate.moves.residency import Residency
from systems.substrate.moves.updating import UpdatingThread

BROKE_OFF = "an update behind the steps broke off ({}), so that parameters belong to several: initialize anew from a checkpoint"


class LockFree:
    """active: bundles are buffered. mappings: of their versions and sums.

    most: see `max_staleness` of the strategy's options.
    """

    def __init__(
        self,
        layout: Layout,
        bundles: Sequence[ManagedBundle],
        residency: Residency,
        store: Store,
        control: StepControl,
        most: int,
    ) -> None:
        self.active = False
        self._planned, self._order = False, list[ManagedBundle]()
        self.mappings: list[HostMapping] = []
        self._layout, self._bundles, self._residency, self._store = layout, bundles, residency, store
        self._control, self._most = control, most
        self._device: Device = store.device
        self._made: dict[int, BufferedBundle] = {}
        self._before = (0, 0, 0)
        self._behind = Behind()
        self._left: list[tuple[int, bool]] = []  # bundles that left the device to come to rest; whole, or their shards alone
        self._thread = UpdatingThread(layout, store.disk, store.device, control, self._behind)

    def follow(self, order: Sequence[ManagedBundle], *, planned: bool) -> None:
        """Trained bundles in the order in which steps use them first. planned: a plan is in force for the steps to come."""
        self._order, self._planned, self._left = list(order), planned, []

    def begin(self) -> None:
        """A step begins. What is updated on the host is buffered from now on, if it is to be and is not yet."""
        if self._behind.error is not None:
            self._raise()
        ranks = self._store.ranks
        if self._planned and ranks.size > 1 and not all(ranks.exchange("updates are behind the steps", self.active)):
            self.settle()
        if self.active or not self._planned:
            return
        chosen = [b for b in self._order if b.movable and not b.states_on_device]
        if not chosen:
            return
        self._device.drain()
        if [b.index for b in chosen] != list(self._made):
            self._make(chosen)
        kernel, updates = self._device.host_kernel, self._control.updates
        for bundle in chosen:
            buffered = self._made[bundle.index]
            buffered.begin({p: updates[p] for p in bundle.gradients.parameters})
            for stretch, version in zip(buffered.stretches, buffered.versions[0], strict=True):
                kernel.copy(version, stretch.slot)
            if bundle.block is not None or bundle.shard.block is not None:
                buffered.version_of(0)
        self._thread.go_over([self._made[b.index] for b in chosen])
        self.active = True  # first, so that `settle` finds what follows if Ctrl-C breaks it off
        for bundle in chosen:
            bundle.buffering.begin(self._made[bundle.index])
        left, self._left = self._left, []
        for index, whole in left:
            if whole:
                self._residency.fetch(index)
            else:
                self._residency.shards.move(index)

    def _make(self, chosen: Sequence[ManagedBundle]) -> None:
        """Raises BudgetError where the host has no room for them."""
        self._forget()
        adds = any(stretch.accumulator is not None for bundle in chosen for stretch in bundle.stretches)
        dtype = self._store.dtype
        added = chosen[0].stretches[0].accumulator.dtype if adds else dtype  # type: ignore[union-attr]
        numel = 2 * sum(stretch.slot.numel() for bundle in chosen for stretch in bundle.stretches)
        host = self._store.host
        for name, kind in (("versions", dtype), ("sums", added)):
            self.mappings.append(HostMapping(f"host-{name}", numel * kind.itemsize, host, pinned=name == "versions"))
            self._device.meter.exempt(self.mappings[-1].storage)
            self.mappings[-1].touch()
        versions, sums = self.mappings
        for b in chosen:
            sizes = [stretch.slot.numel() for stretch in b.stretches]
            two = [[versions.take(dtype, size)[0] for size in sizes] for _ in range(2)]
            totals = [[sums.take(added, size)[0] for size in sizes] for _ in range(2)]
            self._made[b.index] = BufferedBundle(b.index, b.stretches, two, totals, behind=self._behind, most=self._most)

    def add(self, bundle: ManagedBundle, fired: frozenset[int]) -> None:
        """The gradient of a step, complete, is on its way to the slots, or in the accumulators. fired: parameters with one,
        be they of other bundles.
        """
        buffered, fired = bundle.buffering.now, fired.intersection(bundle.gradients.parameters)
        assert buffered is not None
        use = buffered.leaves()
        added = of_bundle(self._layout, Work.ACCUMULATE, LaneKind.CPU, bundle.index)
        memories = [
            memory for each in bundle.segments if each.state is not None for memory in (each.slot_memory, each.state.memory)
        ]
        work = partial(buffered.add, use, fired, self._control.groups.inside)
        priority = before_updates(self._layout, bundle.index)
        buffered.added.append(self._device.transfers.issue(added, work, writes=memories, priority=priority))
        slots_take_parameters(bundle.segments)
        bundle.update_on_host()

    def settle(self) -> None:
        """All gradients are in the masters, and the slots hold the parameters again. Not within a step."""
        if not self.active:
            if self._behind.error is not None:
                self._raise()
            return
        mine = [bundle for bundle in self._bundles if bundle.buffering.now is not None]
        there = [b for b in mine if (b.block is not None or b.shard.block is not None) and not b.pinned]
        self._left += [(bundle.index, bundle.block is not None) for bundle in there]
        for bundle in there:
            self._residency.drop(bundle.index)
        self._device.drain()
        for bundle in mine:
            self._made[bundle.index].unpin()
        try:
            self._thread.finish()
        except BaseException as error:
            if error is self._behind.error:
                self._raise()
            raise
        updates, kernel = list(self._control.updates), self._device.host_kernel
        for bundle in mine:
            buffered = self._made[bundle.index]
            for stretch, version in zip(buffered.stretches, buffered.versions[buffered.front], strict=True):
                kernel.copy(stretch.slot, version)
            for parameter, count in buffered.counts.items():
                updates[parameter] = count
        slots_take_parameters(each for bundle in mine for each in bundle.segments)
        count_updates(self._control, updates)
        self._end()

    def _raise(self) -> None:
        error = self._behind.error
        assert error is not None
        self._control.ruin(self._control.ruined or BROKE_OFF.format(in_words(error)))
        raise error

    def _end(self) -> None:
        self.active = False
        self._thread.go_over([])
        for bundle in self._bundles:
            bundle.buffering.end()

    @contextmanager
    def paused(self) -> Iterator[None]:
        """States move by another way than the updating thread's."""
        with self._thread.paused():
            yield

    def staleness(self) -> dict[str, float | int | None]:
        """Of all reads so far, one a bundle and step, by names of a strategy's statistics."""
        read, stale, most = self._totals()
        return {
            "staleness_max": most if read else None,
            "staleness_mean": stale / read if read else None,
            "updates_behind": self._thread.updates,
        }

    def _totals(self) -> tuple[int, int, int]:
        made, (read, stale, most) = self._made.values(), self._before
        highest = max((each.most_stale for each in made), default=0)
        return read + sum(each.read for each in made), stale + sum(each.stale for each in made), max(most, highest)

    def _forget(self) -> None:
        self._before, self._made = self._totals(), {}
        for mapping in self.mappings:
            mapping.close()
        self.mappings = []

    def close(self) -> None:
        """Call only when nothing is in flight."""
        self._thread.close()
        self._end()
        self._forget()


def settle(lock_free: LockFree | None) -> None:
    """Updates that run behind their steps are made, if there are any. Not within a step."""
    if lock_free is not None:
        lock_free.settle()


def paused(lock_free: LockFree | None) -> AbstractContextManager[None]:
    """No update that runs behind its step is on its way."""
    return nullcontext() if lock_free is None else lock_free.paused()
