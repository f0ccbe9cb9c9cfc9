"""Where every segment lives at rest: its slot on the host, and master weights and moments on host, disk or device.

Note [The slot]
    Each segment has one host slot in the compute dtype. It holds the parameters; from the flush of a step's gradient to the
    update it holds that gradient instead (14 bytes a parameter). While it does, parameters are read from
    the master, which rounds to the same bits. Segments updated on the device need no slot once they are there.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from itertools import accumulate as running_sums
from typing import Literal

import torch

from systems.device.device import Device
from systems.device.memory.account import Account
from systems.device.memory.disk import Disk
from systems.device.memory.host import HostMapping, release_freed
from systems.device.memory.pool import Allocation
from systems.errors import BudgetError
from systems.planning.layout import Bundle, Layout, Placement, Segment
from systems.planning.plan import LaneKind, Tier
from systems.planning.step.operations import Work, of_bundle
from systems.sizes import format_need, format_size
from systems.substrate.bundle.segments import STATE_PARTS, DiskState, OptimizerState, Run, StoredSegment, runs_of

FILL_SHARE = 8  # a parameter's fp32 values may take this part of the device while they are made
TAKEN_FIRST = ("slots", "master")


class Store:
    """All segments of one rank. Construction allocates and fills the host, and the device for what never moves.

    initial: (parameter number, fp32 tensor of its shape) fills the tensor with the parameter's first value.
    disk: for the layout's bundles on disk, whose place it has; the caller closes it.
    states_on_device: per bundle, how many of its segments have their optimizer state there.
    Raises BudgetError when a tier is too small.
    """

    def __init__(
        self,
        layout: Layout,
        device: Device,
        host: Account,
        dtype: torch.dtype,
        *,
        accumulate: int,
        shapes: Sequence[tuple[int, ...]],
        initial: Callable[[int, torch.Tensor], None],
        disk: Disk | None = None,
    ) -> None:
        self.layout, self.device, self.host, self.dtype, self.disk = layout, device, host, dtype, disk
        settled = {s for b in layout.bundles if not b.movable for s in b.segments}
        at_home = [s for s in layout.segments if s.space.trainable and s.index not in settled]
        slot_bytes = sum(s.shard_numel for s in layout.segments) * dtype.itemsize
        on_host = [s for s in at_home if layout.bundle_of_segment[s.index] not in layout.on_disk]
        parts = STATE_PARTS if accumulate > 1 else STATE_PARTS[:3]
        sizes = {part: sum(s.shard_numel for s in (at_home if part == "accumulator" else on_host)) * 4 for part in parts}
        self._check_host(slot_bytes, sum(sizes.values()))
        self._mappings: dict[str, HostMapping] = {}
        self.segments: list[StoredSegment] = []
        self._runs: list[list[Run]] = []
        self.states_on_device = [0] * len(layout.bundles)
        try:
            self.slots = self._mappings["slots"] = HostMapping("host-slots", slot_bytes, host, pinned=True)
            for part, size in sizes.items():
                if size:
                    self._mappings[part] = HostMapping(f"host-{part}", size, host, pinned=False)
            for part, mapping in self._mappings.items():
                device.meter.exempt(mapping.storage)
                if part in TAKEN_FIRST:
                    mapping.touch()
            for segment in layout.segments:
                self.segments.append(self._place(segment, parts, settled=segment.index in settled))
            for bundle in layout.bundles:
                starts = running_sums((layout.segments[s].numel for s in bundle.segments), initial=0)
                self._runs.append(runs_of(zip(starts, [self.segments[s] for s in bundle.segments], strict=False)))
                self._fill(bundle, shapes, initial)
        except BaseException:
            self.close()
            raise

    def _check_host(self, slot_bytes: int, state_bytes: int) -> None:
        need, have = slot_bytes + state_bytes, self.host.room
        if need > have:
            raise BudgetError(
                f"the model needs {format_need(need, have)} of host memory ({format_size(slot_bytes)} for parameters, "
                f"{format_size(state_bytes)} for master weights and moments), {format_size(have)} are there: raise "
                "`host_memory` or take a smaller model",
                tier="host",
                need=need,
                have=have,
            )

    def _place(self, segment: Segment, parts: Sequence[str], *, settled: bool) -> StoredSegment:
        """settled: on the device from the beginning, with no place on the host to go back to."""
        slot, slot_memory = self._mappings["slots"].take(self.dtype, segment.shard_numel)
        if settled and segment.space.trainable:
            there = self._on_device(segment, len(parts))
            if there is None:
                need = segment.shard_numel * 4 * len(parts)
                raise BudgetError(
                    f"the optimizer state of segment {segment.index}, which stays on the device, needs {format_size(need)} "
                    f"there, {format_size(max(self.device.account.room, 0))} are free: raise `device_memory`",
                    tier="device",
                    need=need,
                    have=max(self.device.account.room, 0),
                )
            for tensor in there.tensors()[1:]:
                tensor.zero_()
            self.states_on_device[self.layout.bundle_of_segment[segment.index]] += 1
            return StoredSegment(segment, slot, slot_memory, there, None)
        state: OptimizerState | DiskState | None = None
        if segment.space.trainable and self.layout.bundle_of_segment[segment.index] in self.layout.on_disk:
            assert self.disk is not None
            added = self._mappings["accumulator"].take(torch.float32, segment.shard_numel)[0] if len(parts) > 3 else None
            state = DiskState(self.disk.places[segment.index], added)
        elif segment.space.trainable:
            taken = {part: self._mappings[part].take(torch.float32, segment.shard_numel) for part in parts}
            tensors = {part: tensor for part, (tensor, _) in taken.items()}
            state = OptimizerState(
                Tier.HOST,
                tensors["master"],
                tensors["exp_avg"],
                tensors["exp_avg_sq"],
                tensors.get("accumulator"),
                taken["master"][1],
            )
        return StoredSegment(segment, slot, slot_memory, state, state)

    def _fill(self, bundle: Bundle, shapes: Sequence[tuple[int, ...]], initial: Callable[[int, torch.Tensor], None]) -> None:
        """First values of a bundle."""
        pieces: dict[int, list[tuple[StoredSegment, Placement]]] = {}
        for s in bundle.segments:
            for place in self.segments[s].segment.placements:
                pieces.setdefault(place.parameter, []).append((self.segments[s], place))
        away = [s for s in bundle.segments if self.segments[s].tier is Tier.DISK]
        made = {s: torch.zeros(self.layout.segments[s].shard_numel) for s in away}
        for parameter, mine in pieces.items():
            draw = lambda out, parameter=parameter: initial(parameter, out)  # noqa: E731
            self._draw(shapes[parameter], mine, draw, made)
        for s, master in made.items():
            self.overwrite_part(self.segments[s], "master", master)
        for s in bundle.segments:
            if self.segments[s].tier is Tier.DEVICE:
                state = self.segments[s].state
                assert state is not None
                self.device.transfers.compute(writes=[state.memory], label=f"first values of segment {s}")

    def _draw(
        self,
        shape: tuple[int, ...],
        pieces: Sequence[tuple[StoredSegment, Placement]],
        draw: Callable[[torch.Tensor], None],
        made: Mapping[int, torch.Tensor],
    ) -> None:
        """made: masters that the disk will be given.

        Made on the compute device where they fit (same bits, and a GPU draws them faster), and in their place where that is
        one and there; what stays on the device is drawn there."""
        fits = math.prod(shape) * 4 <= self.device.account.budget // FILL_SHARE
        settled = pieces[0][0].tier is Tier.DEVICE
        made_on = self.device.torch_device if fits or settled else torch.device("cpu")
        homes = [
            made[stored.segment.index][place.here]
            if stored.segment.index in made
            else (stored.state.master[place.here] if isinstance(stored.state, OptimizerState) else None)
            for stored, place in pieces
        ]
        home = homes[0] if len(homes) == 1 else None
        value = torch.empty(shape, device=made_on) if home is None or home.device != made_on else home.view(shape)
        draw(value)
        flat = value.reshape(-1)
        for (stored, place), target in zip(pieces, homes, strict=True):
            piece, slot = flat[place.piece], stored.slot[place.here]
            if target is not None and target.data_ptr() != piece.data_ptr():
                if target.device == piece.device:
                    target.copy_(piece)
                else:
                    self.device.copy_to_host(piece, target)
            if piece.device.type == "cpu":
                self.device.host_kernel.cast(piece, slot)
            else:
                slot.copy_(piece.to(self.dtype))

    def pieces(self, bundle: int, block: Allocation) -> list[torch.Tensor]:
        """A bundle's block cut into its segments, as flat tensors of the compute dtype."""
        sizes = [self.layout.segments[s].numel for s in self.layout.bundles[bundle].segments]
        return list(block.view(self.dtype, 0, sum(sizes)).split(sizes))  # one operation however many there are

    def runs(self, bundle: int, which: Callable[[StoredSegment], bool] | None = None) -> list[Run]:
        """A bundle's segments, or some of them, as few runs as can be: see Note [Runs]."""
        runs = self._runs[bundle]
        return runs if which is None else [part for run in runs for part in run.those(which)]

    def restore_slots(self, bundle: int, which: Callable[[StoredSegment], bool] | None = None) -> None:
        """Put the parameters back where a gradient lies: cast them anew from the master (skipped step, abort)."""
        runs = self.runs(bundle, which)
        restored = [each for run in runs for each in run.stored]
        if not restored:
            return
        kernel, disk = self.device.host_kernel, self.disk
        away = [(each.at_home.place, each.slot) for each in restored if isinstance(each.at_home, DiskState)]

        def work() -> None:
            for run in runs:
                if run.state:
                    kernel.cast(run.master, run.slot)
            for place, slot in away:
                assert disk is not None
                kernel.cast(disk.load(place, "master", settled=True), slot)

        self.device.transfers.issue(
            of_bundle(self.layout, Work.RESTORE, LaneKind.CPU, bundle),
            work,
            reads=[each.at_home.memory for each in restored if each.at_home is not None],
            writes=[each.slot_memory for each in restored],
            priority=bundle,
        )
        for each in restored:
            each.slot_holds_gradient = False

    def state_to_device(self, index: int) -> bool:
        """Move master and moments to the device for good. False, and nothing changed, if they do not fit there now."""
        stored = self.segments[index]
        old = stored.state
        assert old is not None and old.tier is not Tier.DEVICE and not stored.slot_holds_gradient
        new = self._on_device(stored.segment, 3 if old.accumulator is None else 4)
        if new is None:
            return False
        sources, memories = old.tensors(), [old.memory]
        move = of_bundle(self.layout, Work.STATE_TO_DEVICE, LaneKind.H2D, self.layout.bundle_of_segment[index], index)

        def copy(targets: Sequence[torch.Tensor] = new.tensors()) -> None:
            for target, source in zip(targets, sources, strict=True):
                target.copy_(source, non_blocking=True)

        self.device.log.count("h2d_bytes", sum(tensor.nbytes for tensor in new.tensors()))
        try:
            if isinstance(old, DiskState):
                assert self.disk is not None
                buffer = self.disk.read(old.place, self.device.transfers)
                sources, memories = [*buffer.views(old.place), *sources], [old.memory, buffer.memory]
            self.device.transfers.issue(move, copy, reads=memories, writes=[new.memory]).wait()
        except Exception:  # after Ctrl-C a copy may be on its way that left no ticket: the room goes once all is at rest
            assert new.allocation is not None
            self.device.pool.free(new.allocation, f"optimizer state of segment {index}")
            raise
        stored.state = new
        self.count_on_device(self.layout.bundle_of_segment[index])
        for name, tensor in _on_host(old):
            self._mappings[name].discard(tensor)
        return True

    def count_on_device(self, bundle: int) -> int:
        """Of its segments, those whose state is there."""
        there = sum(self.segments[s].tier is Tier.DEVICE for s in self.layout.bundles[bundle].segments)
        self.states_on_device[bundle] = there
        return there

    def _on_device(self, segment: Segment, parts: int) -> OptimizerState | None:
        """Room on the device for a segment's state, of any content; None if there is not enough now."""
        numel = segment.shard_numel
        allocation = self.device.pool.allocate(numel * 4 * parts, f"optimizer state of segment {segment.index}")
        if allocation is None:
            return None
        new = [allocation.view(torch.float32, i * numel, numel) for i in range(parts)]
        accumulator = new[3] if parts == 4 else None
        return OptimizerState(Tier.DEVICE, new[0], new[1], new[2], accumulator, allocation.memory, allocation)

    def state_to_host(self, index: int) -> None:
        """The way back, when the device's room is needed for something else; the slot gets the parameters again."""
        stored = self.segments[index]
        old, new = stored.state, stored.at_home
        assert isinstance(old, OptimizerState) and new is not None and old.allocation is not None
        for name, tensor in _on_host(new):
            self._mappings[name].reclaim(tensor)
        targets, memories = new.tensors(), [new.memory]
        move = of_bundle(self.layout, Work.STATE_TO_HOST, LaneKind.D2H, self.layout.bundle_of_segment[index], index)
        if isinstance(new, DiskState):
            assert self.disk is not None
            buffer = self.disk.buffers[new.place.buffer]
            targets, memories = [*buffer.views(new.place), *targets], [new.memory, buffer.memory]

        def copy() -> None:
            for target, source in zip(targets, old.tensors(), strict=True):
                target.copy_(source, non_blocking=True)

        self.device.log.count("d2h_bytes", old.allocation.nbytes)
        try:
            self.device.transfers.issue(move, copy, reads=[old.memory], writes=memories).wait()
            if isinstance(new, DiskState):
                assert self.disk is not None
                self.disk.write(new.place, self.device.transfers).wait()
        except BaseException:  # it is on the device still
            for name, tensor in _on_host(new):
                self._mappings[name].discard(tensor)
            raise
        stored.slot_holds_gradient = True  # or what it had before the state left: restored now, or by who gives up the step
        stored.state = new
        self.device.pool.free(old.allocation, f"optimizer state of segment {index}")
        self.count_on_device(self.layout.bundle_of_segment[index])
        self.restore_slots(self.layout.bundle_of_segment[index], lambda each: each is stored)

    def part(self, stored: StoredSegment, part: str) -> torch.Tensor:
        """Master or a moment of a trained segment where it is, from the disk as a copy."""
        state = stored.state
        if isinstance(state, DiskState):
            assert self.disk is not None
            return self.disk.load(state.place, part)
        found: torch.Tensor = getattr(state, part)
        return found

    def overwrite_part(self, stored: StoredSegment, part: str, values: torch.Tensor, place: Placement | None = None) -> None:
        """Of a trained segment, all of it or a parameter's piece. Call only when drained."""
        state = stored.state
        if isinstance(state, DiskState):
            assert self.disk is not None
            if place is not None:
                whole = self.part(stored, part)
                whole[place.here].copy_(values)
                values = whole
            self.disk.save(state.place, part, values)
        else:
            found: torch.Tensor = getattr(state, part)
            found[slice(None) if place is None else place.here].copy_(values)

    def parameter_values(self, parameter: int, shape: tuple[int, ...]) -> torch.Tensor:
        """The parameter's fp32 master (or its slot's value, if frozen) as a CPU copy. Call only when drained."""
        pieces = self.pieces_of(parameter)
        values = [(stored.slot if stored.state is None else self.part(stored, "master"))[p.here] for stored, p in pieces]
        return torch.cat([value.float().cpu() for value in values]).view(shape)

    def moment(self, parameter: int, which: Literal["exp_avg", "exp_avg_sq"]) -> torch.Tensor:
        """Adam's first or second of a trained parameter, as a flat CPU copy. Call only when drained."""
        return torch.cat([self.part(stored, which)[p.here].cpu() for stored, p in self.pieces_of(parameter)])

    def overwrite_moments(self, parameter: int, first: torch.Tensor, second: torch.Tensor) -> None:
        """Flat and of the whole parameter, which is trained. Call only when drained."""
        for stored, p in self.pieces_of(parameter):
            self.overwrite_part(stored, "exp_avg", first[p.piece], p)
            self.overwrite_part(stored, "exp_avg_sq", second[p.piece], p)

    def pieces_of(self, parameter: int) -> list[tuple[StoredSegment, Placement]]:
        segments = [self.segments[s] for s in self.layout.bundles[self.layout.places[parameter].bundle].segments]
        return [(stored, p) for stored in segments for p in stored.segment.placements if p.parameter == parameter]

    @property
    def pinned_bytes(self) -> int:
        return sum(m.nbytes for m in self._mappings.values() if m.pinned)

    def close(self) -> None:
        for stored in self.segments:
            if isinstance(stored.state, OptimizerState) and stored.state.allocation is not None:
                self.device.pool.free(stored.state.allocation, f"close segment {stored.segment.index}")
            stored.state = stored.at_home = None  # tensors would keep the mappings alive
            stored.slot = torch.empty(0, dtype=self.dtype)
        self._runs.clear()
        for mapping in self._mappings.values():
            mapping.close()


def _on_host(state: OptimizerState | DiskState) -> list[tuple[str, torch.Tensor]]:
    """Its tensors there, each with its mapping."""
    names = STATE_PARTS[3:] if isinstance(state, DiskState) else STATE_PARTS
    return list(zip(names, state.tensors(), strict=False))


def take_rest(store: Store) -> None:
    """Once nothing of the model's own memory is held any more: see Note [When memory is taken] in host.py."""
    release_freed()
    for part, mapping in store._mappings.items():
        if part not in TAKEN_FIRST:
            mapping.touch()
