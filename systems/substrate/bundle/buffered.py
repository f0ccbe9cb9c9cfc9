"""A bundle whose updates run behind its steps: its parameters and the sums of its gradients, each in two places on the host.

Note [Lock-free]
    Angel-PTM, 4.3, Algorithm 2. A step reads the version of a bundle's parameters (p'16) that was published last, and adds its
    gradient to a sum (g'16); the updating thread takes the sum, updates master and moments by it, and publishes the next
    version. Neither waits for the other's copy: while one sum is taken gradients go into the other, the two having changed
    places as the update began; and a version is written where nothing reads, then published whole, by one assignment.

    A use of a bundle is the time from one of its gradients to the next. What a use has read first it goes on reading, in all
    its micro-steps, forward and backward: it pins that version until its gradient is in the sum. The place of a version that
    is pinned is not written to.
    Staleness of a use: the gradients before it that the version it pinned does not hold. A fetch waits until that is `most` at
    most. So a gradient is in one sum, and a sum in one update: none is lost, and none is counted twice.

    On several ranks each has versions and sums of its shards, and all this holds for each shard. A fetch that waits for an
    update waits for this rank's own gradients, whose reductions all ranks began before: so no two ranks wait for each other.
"""

from __future__ import annotations

import threading
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass

import torch

from systems.device.lanes.ticket import Ticket
from systems.device.lanes.transfers import TrackedMemory
from systems.device.watch.events import Extent
from systems.recipe.step.parameter_groups import Inside
from systems.substrate.bundle.segments import Stretch


@dataclass
class GradientSum:
    """tensors: one a stretch. fired: parameters that have a gradient in it. steps: whose gradients it holds. inside: the
    hyperparameters of the newest.
    """

    tensors: Sequence[torch.Tensor]
    fired: frozenset[int] = frozenset()
    steps: int = 0
    inside: Inside | None = None


class Behind:
    """What went wrong behind the steps, and the lock of all that is said between their threads; never held over a copy."""

    def __init__(self) -> None:
        self.lock = threading.RLock()  # taken itself: see Lane
        self.changed = threading.Condition(self.lock)
        self.error: BaseException | None = None

    def fail(self, error: BaseException) -> None:
        """Nobody may wait for what will never come."""
        with self.lock:
            self.error = self.error or error
            self.changed.notify_all()

    def wait(self, until: Callable[[], bool]) -> None:
        """Raises what went wrong, if that comes first."""
        with self.lock:
            while not until():
                if self.error is not None:
                    raise self.error
                self.changed.wait()


class BufferedBundle:
    """See Note [Lock-free]. All but `produced` and `added`, which the caller's thread alone has, is under the lock.

    versions, sums: two each, tensors one a stretch. front: the version published last; included: gradients that it holds.
    taking: the sum that gradients go into. pins: by use, the version that it reads. produced: gradients that left for a sum;
    added: of the last of them, the tickets of their additions. counts: updates of each parameter. read, stale, most_stale: uses
    that pinned a version, and their staleness, summed and at most.
    """

    def __init__(
        self,
        index: int,
        stretches: Sequence[Stretch],
        versions: Sequence[Sequence[torch.Tensor]],
        sums: Sequence[Sequence[torch.Tensor]],
        *,
        behind: Behind,
        most: int,
    ) -> None:
        self.index, self.stretches, self._behind, self._most = index, list(stretches), behind, most
        on_disk = sum(each.slot.numel() for each in stretches if not each.state)
        self._size = (on_disk, sum(each.slot.numel() for each in stretches))
        self.versions, self.sums = list(versions), [GradientSum(each) for each in sums]
        self._extent = Extent(f"versions of bundle {index}", 0, 1)
        self.read = self.stale = self.most_stale = 0
        self.begin({})

    def begin(self, counts: dict[int, int]) -> None:
        """With the version in front, which is that of the masters. counts: updates that each parameter had."""
        self.front = self.taking = self.included = self.produced = 0
        self.pins: dict[int, int] = {}
        self.added: deque[Ticket] = deque(maxlen=self._most + 1)
        self.counts, self._adding, self._updating = counts, False, False

    # ---- the caller's thread and the lanes of a step

    def source(self) -> tuple[VersionOfUse, list[TrackedMemory]]:
        """What a fetch copies from, stretch by stretch, and what it waits for."""
        memory = TrackedMemory(self._extent)
        wanted = self.produced - self._most
        if wanted > self.included:
            memory.wait_for(Published(self, wanted, self.added[0]))
        return VersionOfUse(self, self.produced), [memory]

    def leaves(self) -> int:
        """A gradient does, for a sum. The use that it is of."""
        self.produced += 1
        return self.produced - 1

    def version_of(self, use: int) -> Sequence[torch.Tensor]:
        """Pinned from now on until the use's gradient is added."""
        with self._behind.lock:
            if use not in self.pins:
                stale = use - self.included
                assert stale <= self._most, f"bundle {self.index} is {stale} steps behind, {self._most} at most are allowed"
                self.read, self.stale, self.most_stale = self.read + 1, self.stale + stale, max(self.most_stale, stale)
                self.pins[use] = self.front
            return self.versions[self.pins[use]]

    def unpin(self) -> None:
        """No copy of it is on the device."""
        with self._behind.lock:
            self.pins.clear()
            self._behind.changed.notify_all()

    def add(self, use: int, fired: frozenset[int], inside: Inside) -> None:
        """The gradient of a use, which lies in the slots, or in the accumulators, which are zero again afterwards."""
        with self._behind.lock:
            taking, self._adding = self.sums[self.taking], True
        before = taking.fired
        for stretch, total in zip(self.stretches, taking.tensors, strict=True):
            gradient = stretch.slot if stretch.accumulator is None else stretch.accumulator
            for p in stretch.placements:
                if p.parameter in fired and p.parameter in before:
                    total[p.here].add_(gradient[p.here])
                elif p.parameter in fired:
                    total[p.here].copy_(gradient[p.here])
            if stretch.accumulator is not None:
                stretch.accumulator.zero_()
        with self._behind.lock:
            taking.fired, taking.steps, taking.inside = before | fired, taking.steps + 1, inside
            self._adding = False
            self.pins.pop(use, None)
            self._behind.changed.notify_all()

    # ---- the updating thread, with the lock

    @property
    def uncleared(self) -> bool:
        """Gradients are in no version yet."""
        return self._updating or self._adding or self.sums[self.taking].steps > 0

    @property
    def waste(self) -> tuple[int, int]:
        """Gradients that the sum could still take before a use waits, in elements of an update: on the disk, and all. Taken now
        they come to that much more to update later.
        """
        missing = self._most + 1 - self.sums[self.taking].steps
        return missing * self._size[0], missing * self._size[1]

    @property
    def ready(self) -> bool:
        """An update can begin: there is a sum, whole, and the place of the next version is not read."""
        there = self.sums[self.taking].steps > 0 and not self._adding
        return there and not self._updating and 1 - self.front not in self.pins.values()

    def take(self) -> GradientSum:
        """An update begins; gradients go into the other sum from now on."""
        taken, self.taking, self._updating = self.sums[self.taking], 1 - self.taking, True
        for parameter in taken.fired:
            self.counts[parameter] += 1
        return taken

    @property
    def back(self) -> Sequence[torch.Tensor]:
        """Where the next version is written."""
        return self.versions[1 - self.front]

    def publish(self, taken: GradientSum) -> None:
        self.front, self.included = 1 - self.front, self.included + taken.steps
        taken.fired, taken.steps, self._updating = frozenset(), 0, False


class Buffering:
    """now: a bundle's versions and sums, while it has any that count."""

    def __init__(self) -> None:
        self.now: BufferedBundle | None = None

    def begin(self, buffered: BufferedBundle) -> None:
        self.now = buffered

    def end(self) -> None:
        self.now = None


class VersionOfUse:
    """Of a bundle: (stretch, values), which version it is being decided when they are gone through."""

    def __init__(self, buffered: BufferedBundle, use: int) -> None:
        self._buffered, self._use = buffered, use

    def __iter__(self) -> Iterator[tuple[Stretch, torch.Tensor]]:
        return iter(zip(self._buffered.stretches, self._buffered.version_of(self._use), strict=True))


class Published:
    """The ticket of the first version of a bundle that holds so many gradients. added: that of the last of them."""

    compute = False

    def __init__(self, buffered: BufferedBundle, wanted: int, added: Ticket) -> None:
        self._buffered, self._wanted, self._added, self.id = buffered, wanted, added, added.id

    def done(self) -> bool:
        return self._buffered.included >= self._wanted or self._buffered._behind.error is not None

    def wait(self) -> None:
        self._added.wait()
        self._buffered._behind.wait(lambda: self._buffered.included >= self._wanted)

    def order(self, stream: torch.cuda.Stream | None) -> None:
        self.wait()

    def at_once(self) -> bool:
        return self.done()
