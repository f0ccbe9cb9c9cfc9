"""Which bundles are on the device: fetch, hold, release, drop, and making room.

States of a bundle: ABSENT (storage points at poison), FETCHING (a copy is on its way), RESIDENT (compute may read it). They
follow from what is there, a block and where the storage points, so that nothing that breaks off leaves another. GRAD and
REDUCING are states of its gradient, see gradients.py. Who owns a block: see Note [What breaks off] in recovery.py.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Sequence
from enum import Enum

import torch

from systems.device.device import Device
from systems.device.lanes.transfers import Memory
from systems.device.memory.account import uncounted
from systems.device.memory.pool import Allocation
from systems.device.watch.labels import labelled
from systems.planning.layout import Bundle, Layout
from systems.planning.plan import LaneKind
from systems.planning.step.operations import Work, of_bundle
from systems.substrate.bundle.poison import Poison
from systems.substrate.bundle.segments import Run
from systems.substrate.bundle.storage import RebindableStorage
from systems.substrate.bundle.store import Store


class BundleState(Enum):
    ABSENT = "absent"
    FETCHING = "fetching"
    RESIDENT = "resident"


class ManagedBundle:
    """A bundle's permanent storage and, while it is on the device, the block behind it.

    updated: on the host, since it was last on the device.
    """

    def __init__(self, bundle: Bundle, storage: RebindableStorage) -> None:
        self.bundle, self.storage = bundle, storage
        self.block: Allocation | None = None
        self.holds: dict[object, int] = {}
        self.updated = False

    @property
    def index(self) -> int:
        return self.bundle.index

    @property
    def state(self) -> BundleState:
        if self.block is None:
            return BundleState.ABSENT
        return BundleState.RESIDENT if self.storage.resident else BundleState.FETCHING


class Residency:
    """choose: which of these un-held bundles is evicted. demote: asked as a last resort to free optimizer state.

    demote returns False when there is nothing left that it could move off the device.
    """

    def __init__(self, layout: Layout, store: Store, device: Device, poison: Poison, *, write_back: bool) -> None:
        self.layout, self.store, self.device = layout, store, device
        self.writes_back = write_back
        self.choose: Callable[[Sequence[int]], int] = lambda candidates: candidates[0]
        self.demote: Callable[[], bool] = lambda: False
        self.bundles = [
            ManagedBundle(b, RebindableStorage(layout.bundle_bytes(b.index), device.torch_device, poison))
            for b in layout.bundles
        ]
        self.limit = device.plannable_bytes  # pool bytes beyond which fetching evicts; lifted by a plan

    def pinned(self, managed: ManagedBundle) -> bool:
        """True for a bundle that stays: never moved by layout, or updated on the device."""
        return not managed.bundle.movable or self.store.states_on_device[managed.index] > 0

    def evictable(self) -> list[int]:
        return [m.index for m in self.bundles if m.block is not None and not m.holds and not self.pinned(m)]

    def make_room(self, fits: Callable[[], bool]) -> bool:
        """Evict until fits() is true; False if it never is."""
        while not fits():
            candidates = self.evictable()
            if candidates:
                self.device.log.count("evictions")
                self.evict(self.choose(candidates))
            elif not self.demote():
                return fits()  # once more: what an allocator refuses once it may grant the next time
        return True

    def allocate(self, nbytes: int, what: str, *, compute: bool = False) -> Allocation:
        """Device bytes, evicting for them if need be. Raises OutOfMemoryError when nothing is left to evict.

        compute: who uses them first, compute or a copy.
        """
        found: list[Allocation] = []

        def fits() -> bool:
            pool = self.device.pool
            if pool.live_bytes + nbytes > self.limit and self.evictable():
                return False
            allocation = pool.allocate(nbytes, what, limit=self.limit, compute=compute)
            if allocation is None and not self.evictable():
                allocation = pool.allocate(nbytes, what, compute=compute)
            if allocation is not None:
                found.append(allocation)
            return allocation is not None

        if not self.make_room(fits):
            raise self.device.pool.out_of_memory(nbytes, what)
        return found[0]

    def fetch(self, index: int) -> None:
        """Start bringing a bundle to the device; nothing if it is there or on its way."""
        managed = self.bundles[index]
        if managed.block is not None:
            return
        nbytes = self.layout.bundle_bytes(index)
        block = self.allocate(nbytes, f"bundle {index}")
        fetch = of_bundle(self.layout, Work.FETCH, LaneKind.H2D, index)
        try:
            sources, memories = self._sources(index)

            def copy() -> None:
                for run, source in sources:
                    run.on(block).copy_(source, non_blocking=True)

            self.device.log.count("h2d_bytes", nbytes)
            with self.device.phases.of("h2d_updated" if managed.updated else "h2d_parameters"):
                self.device.transfers.issue(fetch, copy, reads=memories, writes=[block.memory])
        except Exception:  # after Ctrl-C a copy may be on its way that left no ticket: the block goes once all is at rest
            self.device.pool.free(block, f"bundle {index}")
            raise
        managed.block, managed.updated = block, False

    def _sources(self, bundle: int) -> tuple[list[tuple[Run, torch.Tensor]], list[Memory]]:
        """Slots, or masters where the slot holds a gradient (they round to the same bits)."""
        slots = self.store.runs(bundle, lambda each: not each.slot_holds_gradient)
        masters = self.store.runs(bundle, lambda each: each.slot_holds_gradient)
        memories = [each.slot_memory for run in slots for each in run.stored]
        memories += [each.at_home.memory for run in masters for each in run.stored if each.at_home is not None]
        return [*((run, run.slot) for run in slots), *((run, self._master(run)) for run in masters)], memories

    def _master(self, run: Run) -> torch.Tensor:
        """From the disk as a copy, which waits for what is on its way there."""
        if run.state:
            return run.master
        with uncounted():
            return torch.cat([self.store.part(each, "master") for each in run.stored])

    def hold(self, indices: Sequence[int], key: object) -> None:
        """Compute is about to read the bundles: fetch what is absent, order compute behind the copies, pin them."""
        held = [self.bundles[i] for i in indices]
        for managed in held:
            managed.holds[key] = managed.holds.get(key, 0) + 1
        try:
            for managed in held:
                if managed.block is None:
                    self.device.log.count("on_demand_fetches")
                    self.fetch(managed.index)
        except BaseException:
            for managed in held:
                self._unhold(managed, key)
            raise
        blocks = [managed.block for managed in held if managed.block is not None]
        with labelled("wait for bundles"):
            self.device.transfers.order_compute(reads=[b.memory for b in blocks], label=f"hold for {key}")
        for managed in held:
            if managed.block is not None and not managed.storage.resident:
                managed.storage.point_at(managed.block.data.data_ptr())

    def release(self, indices: Sequence[int], key: object) -> None:
        """Compute has read the bundles."""
        held = [m for m in map(self.bundles.__getitem__, indices) if key in m.holds]
        for managed in held:
            self._unhold(managed, key)
        used = [m.block.memory for m in held if m.block is not None]
        self.device.transfers.compute(reads=used, label=f"release by {key}")

    @staticmethod
    def _unhold(managed: ManagedBundle, key: object) -> None:
        managed.holds[key] -= 1
        if not managed.holds[key]:
            del managed.holds[key]

    def evict(self, index: int) -> None:
        if self.writes_back:
            self.write_back(index)
        else:
            self.drop(index)

    def drop(self, index: int) -> None:
        """Free the device copy; the host's is authoritative."""
        managed = self.bundles[index]
        block = managed.block
        if block is None:
            return
        assert not managed.holds, f"bundle {index} dropped while held"
        with labelled(f"drop bundle {index}"):
            managed.storage.release()
            managed.block = None
            self.device.pool.free(block, f"bundle {index}")

    def write_back(self, index: int) -> None:
        """Copy the device's parameters to the host slots, then drop them."""
        managed = self.bundles[index]
        block = managed.block
        if block is None:
            return
        targets = [self.store.segments[s] for s in managed.bundle.segments]
        if not any(t.slot_holds_gradient for t in targets):

            def copy(runs: Sequence[Run] = self.store.runs(index)) -> None:
                for run in runs:
                    run.slot.copy_(run.on(block), non_blocking=True)

            self.device.log.count("d2h_bytes", self.layout.bundle_bytes(index))
            self.device.transfers.issue(
                of_bundle(self.layout, Work.WRITE_BACK, LaneKind.D2H, index),
                copy,
                reads=[block.memory],
                writes=[t.slot_memory for t in targets],
            )
        self.drop(index)

    def refill(self, index: int, parameters: frozenset[int]) -> None:
        """Read these parameters of a bundle from the host again, into the block that is there."""
        block = self.bundles[index].block
        assert block is not None
        pairs, sources = [], []
        for run in self.store.runs(index):
            target, here = run.on(block), [piece.here for piece in run.placements if piece.parameter in parameters]
            if here:
                assert not any(each.slot_holds_gradient for each in run.stored)
                sources += [each.slot_memory for each in run.stored]
                pairs += [(target[where], run.slot[where]) for where in here]

        def copy() -> None:
            for target, source in pairs:
                target.copy_(source, non_blocking=True)

        self.device.log.count("h2d_bytes", sum(target.nbytes for target, _ in pairs))
        self.device.transfers.issue(
            of_bundle(self.layout, Work.REFILL, LaneKind.H2D, index),
            copy,
            reads=sources,
            writes=[block.memory],
        )

    def overwrite(self, parameter: int, value: torch.Tensor) -> None:
        """Take over a new fp32 value: master, slot and any device copy. Call only when drained, outside a step."""
        for managed in self.bundles:
            start = 0
            for s in managed.bundle.segments:
                stored = self.store.segments[s]
                for place in stored.segment.placements:
                    if place.parameter != parameter:
                        continue
                    flat = value.detach().float().cpu().reshape(-1)
                    piece = flat[place.piece]
                    if stored.state is not None:
                        self.store.overwrite_part(stored, "master", piece, place)
                    self.device.host_kernel.cast(piece, stored.slot[place.here])
                    if managed.block is not None:
                        managed.block.view(self.store.dtype, start + place.offset, place.numel).copy_(piece)
                start += stored.segment.numel

    def resident(self) -> frozenset[int]:
        return frozenset(m.index for m in self.bundles if m.block is not None)

    def release_all(self, *, but: object = None) -> None:
        """A step or a pass was given up: nobody will say any more that compute has read what is held, so it is said here.

        but: a key that goes on holding.
        """
        for managed in self.bundles:
            over = [key for key in managed.holds if key != but]
            if over and managed.block is not None:
                with contextlib.suppress(Exception):  # of a copy to the device that failed: then nothing read it either
                    self.device.transfers.compute(reads=[managed.block.memory], label=f"bundle {managed.index} is let go")
            for key in over:
                del managed.holds[key]

    def close(self) -> None:
        self.release_all()
        for managed in self.bundles:
            self.drop(managed.index)
