"""Gradients on their way from autograd to the optimizer's tier.

Note [Life of a gradient]
    GRAD      autograd's post-accumulate hook hands a parameter's gradient over. It is added into the bundle's range on the
              device, or, where the bundle is updated on the device anyway, kept as the tensor autograd made ('adopted').
    flushed   once every gradient expected of the bundle is there: a sum of squares a parameter is left for the norm, and the
              range is copied into the host slot of its own parameters (Note [The slot]) and freed. With several
              micro-batches the slot's content is then added to the fp32 accumulator and the parameters are restored.
    parked    room was needed before the gradient was complete: the range lies in the slot, and nothing was added yet.
    in place  where the plan says so there is no range: see Note [Written in place].
    A gradient that arrives after its bundle was flushed or parked reopens the range with what is in the slot, so that a
    parameter whose gradient fires twice has both summed in the compute dtype, as autograd would.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field

import torch

from systems.planning.layout import Layout
from systems.planning.plan import LaneKind, Tier
from systems.substrate.device import Device
from systems.substrate.in_place import InPlace, Place
from systems.substrate.residency import Residency
from systems.substrate.store import Store
from systems.substrate.tiers import Allocation

Partials = tuple[tuple[int, ...], "list[float] | torch.Tensor"]


@dataclass
class BundleGradient:
    """expected: parameters whose gradients make it complete. fired: those that came in this micro-step."""

    parameters: tuple[int, ...]
    expected: frozenset[int]
    range: Allocation | None = None
    adopted: dict[int, torch.Tensor] = field(default_factory=dict)
    fired: set[int] = field(default_factory=set)
    fired_in_step: set[int] = field(default_factory=set)
    flushed: bool = False
    parked: bool = False

    @property
    def open(self) -> bool:
        """There are gradients that no flush has taken yet."""
        return self.range is not None or self.parked or (bool(self.fired) and not self.flushed)


class Gradients:
    """user: a unit that reads each parameter (the only one, where gradients are written in place).

    partials: per bundle (per segment, with several micro-batches) its parameters and their fp64 sums of squares."""

    def __init__(
        self,
        layout: Layout,
        store: Store,
        residency: Residency,
        device: Device,
        *,
        accumulate: int,
        user: dict[int, int],
    ) -> None:
        self.layout, self.store, self.residency, self.device = layout, store, residency, device
        self.accumulate = accumulate
        self.partials: dict[int, Partials] = {}
        self.last_micro_step = accumulate == 1
        self.bundles: dict[int, BundleGradient] = {}
        self._places: dict[int, Place] = {}
        for bundle in layout.bundles:
            parameters, start = [], 0
            for s in bundle.segments:
                segment = layout.segments[s]
                for place in segment.placements:
                    self._places[place.parameter] = (bundle.index, start + place.offset, place)
                    parameters.append(place.parameter)
                start += segment.numel
            if bundle.trainable:
                self.bundles[bundle.index] = BundleGradient(tuple(parameters), frozenset(parameters))
        self.in_place = InPlace(residency, self._places, layout.in_place, user)

    def adopts(self, bundle: int) -> bool:
        """True if the bundle's gradients stay where autograd made them until the device updates them."""
        segments = [self.store.segments[s] for s in self.layout.bundles[bundle].segments]
        return self.accumulate == 1 and all(s.tier is Tier.DEVICE and s.segment.space.ranks == 1 for s in segments)

    def adopted_bytes(self) -> int:
        return sum(t.nbytes for g in self.bundles.values() for t in g.adopted.values())

    def reserve(self, bundle: int) -> None:
        """A unit's backward begins: have a range for each of its gradients."""
        gradient = self.bundles.get(bundle)
        if gradient is None or gradient.range is not None or gradient.flushed or self.adopts(bundle):
            return
        if not self.reuses(bundle):
            self._open_range(bundle, gradient)

    def reuses(self, bundle: int) -> bool:
        """True if gradients that come now take their parameters' place. See Note [Detours] for when they do not."""
        gradient = self.bundles[bundle]
        free = gradient.range is None and not gradient.flushed and not gradient.parked
        return self.accumulate == 1 and free and self.in_place.possible(bundle) and not self.adopts(bundle)

    def enter(self, bundle: int, unit: int) -> None:
        """A unit's backward is about to begin: if its parameters have become gradients, they must come back first."""
        if bundle in self.bundles and not self.in_place.enter(bundle, unit):
            self._detour(bundle)

    def exit(self, bundle: int, unit: int) -> None:
        """A unit's backward has ended and no call of it is left: its gradients can be written over its parameters."""
        if bundle in self.bundles and self.reuses(bundle):
            self.in_place.exit(bundle, unit, self.bundles[bundle].adopted)

    def _detour(self, bundle: int) -> None:
        gradient = self.bundles[bundle]
        size, label = self.layout.bundle_bytes(bundle), f"gradient of bundle {bundle}"
        gradient.range = self.in_place.move(bundle, lambda: self.residency.allocate(size, label))
        self._empty_buffers(bundle, gradient)

    def _empty_buffers(self, bundle: int, gradient: BundleGradient) -> None:
        """Copy what waits in autograd's buffers into the range."""
        assert gradient.range is not None
        for parameter, waiting in gradient.adopted.items():
            _, offset, place = self._places[parameter]
            gradient.range.view(self.store.dtype, offset, place.numel).copy_(waiting.reshape(-1))
        gradient.adopted.clear()

    def _open_range(self, bundle: int, gradient: BundleGradient) -> Allocation:
        block = self.residency.allocate(self.layout.bundle_bytes(bundle), f"gradient of bundle {bundle}")
        gradient.range = block
        segments = [self.store.segments[s] for s in self.layout.bundles[bundle].segments]
        if gradient.fired and any(s.slot_holds_gradient for s in segments):
            targets = self.store.pieces(bundle, block)

            def copy() -> None:
                for target, stored in zip(targets, segments, strict=True):
                    target.copy_(stored.slot, non_blocking=True)

            self.device.log.count("h2d_bytes", self.layout.bundle_bytes(bundle))
            self.device.transfers.issue(
                LaneKind.H2D,
                copy,
                reads=[s.slot_memory for s in segments],
                writes=[block.memory],
                label=f"reopen gradient of bundle {bundle}",
            )
        self.device.transfers.compute(writes=[block.memory], label=f"gradient of bundle {bundle} begins")
        gradient.flushed = gradient.parked = False
        self._empty_buffers(bundle, gradient)
        return block

    def accept(self, parameter: int, gradient: torch.Tensor) -> None:
        """Take a gradient over from autograd."""
        bundle, offset, place = self._places[parameter]
        mine = self.bundles[bundle]
        again = parameter in mine.fired
        if self.adopts(bundle) and mine.range is None:
            if again:
                mine.adopted[parameter].add_(gradient)
            else:
                mine.adopted[parameter] = gradient
            mine.flushed = False
        elif self.reuses(bundle):
            self._keep(bundle, parameter, gradient)
        else:
            block = mine.range if mine.range is not None else self._open_range(bundle, mine)
            target = block.view(self.store.dtype, offset, place.numel)
            if again:
                target.add_(gradient.reshape(-1))
            else:
                target.copy_(gradient.reshape(-1))
            self.device.hand_over(gradient.nbytes)
        mine.fired.add(parameter)
        mine.fired_in_step.add(parameter)

    def _keep(self, bundle: int, parameter: int, gradient: torch.Tensor) -> None:
        """Until the unit's backward ends; a gradient that comes later than that is written at once."""
        mine = self.bundles[bundle]
        if parameter in self.in_place.of(bundle).parameters:
            self.in_place.view(parameter).add_(gradient.reshape(-1))
        elif parameter in mine.adopted:
            mine.adopted[parameter].add_(gradient)
        else:
            mine.adopted[parameter] = gradient
            if self.in_place.done_with(bundle, parameter):
                self.in_place.write(bundle, mine.adopted, [parameter])

    def complete(self, bundle: int) -> bool:
        gradient = self.bundles.get(bundle)
        return gradient is not None and gradient.open and gradient.fired >= gradient.expected

    def park(self, bundle: int) -> None:
        """Free an incomplete gradient's range if its bytes can wait elsewhere; see Note [Life of a gradient]."""
        gradient = self.bundles[bundle]
        if self.accumulate == 1 or not gradient.fired:
            self.flush(bundle)
        elif self.store.segments[self.layout.bundles[bundle].segments[0]].tier is Tier.HOST:
            assert gradient.range is not None
            self.device.transfers.compute(writes=[gradient.range.memory], label=f"gradient of bundle {bundle} waits")
            self._offload(bundle, gradient.range)
            self._free(bundle, gradient)
            gradient.parked = True

    def flush(self, bundle: int) -> None:
        """The bundle's gradient leaves for its optimizer's tier; see Note [Life of a gradient]."""
        gradient = self.bundles[bundle]
        if gradient.parked:
            self._accumulate(bundle, gradient)
            return
        if not gradient.fired:  # reserved, but nothing came: the unit's output was not used
            self._free(bundle, gradient)
            return
        self._assemble(bundle, gradient)
        on_device = self.store.segments[self.layout.bundles[bundle].segments[0]].tier is Tier.DEVICE
        if self.accumulate == 1:
            fired = sorted(gradient.fired)
            sums = self.device.kernel.sum_squares_all([self.on_device(parameter) for parameter in fired])
            self.partials[bundle] = tuple(fired), sums
        if gradient.range is not None:
            self.device.transfers.compute(writes=[gradient.range.memory], label=f"gradient of bundle {bundle} ends")
        if gradient.range is None:
            gradient.flushed = True
            if self.in_place.written(bundle):
                self._offload_block(bundle)
            return
        if on_device and self.accumulate == 1:
            gradient.flushed = True
            return  # the range stays until the update
        if not on_device:
            self._offload(bundle, gradient.range)
        if self.accumulate > 1:
            self._accumulate(bundle, gradient)
        self._free(bundle, gradient)
        gradient.flushed = True

    def _assemble(self, bundle: int, gradient: BundleGradient) -> None:
        """Bring what waits in autograd's buffers to the rest, in the block if nothing uses it, else in a range."""
        written = self.in_place.written(bundle)
        if self.adopts(bundle) or not (written or gradient.adopted):
            return
        if gradient.range is None and self.in_place.possible(bundle) and not self.in_place.in_use(bundle):
            self.in_place.write(bundle, gradient.adopted, list(gradient.adopted))
        elif written:
            self._detour(bundle)
        else:
            self._open_range(bundle, gradient)

    def _offload_block(self, bundle: int) -> None:
        """The bundle's block, all gradient now, leaves for the host."""
        block = self.residency.bundles[bundle].block
        assert block is not None
        self.device.transfers.compute(reads=[block.memory], label=f"gradient of bundle {bundle} ends")
        self._offload(bundle, block)
        self.in_place.forget(bundle)
        self.residency.drop(bundle)

    def on_device(self, parameter: int) -> torch.Tensor:
        """The flat gradient of a parameter that is on the device: adopted, in its range, or in its own place."""
        bundle, offset, place = self._places[parameter]
        gradient = self.bundles[bundle]
        if parameter in gradient.adopted:
            return gradient.adopted[parameter].reshape(-1)
        if gradient.range is None:
            return self.in_place.view(parameter)
        return gradient.range.view(self.store.dtype, offset, place.numel)

    def _offload(self, bundle: int, block: Allocation) -> None:
        segments = [self.store.segments[s] for s in self.layout.bundles[bundle].segments]
        pieces = self.store.pieces(bundle, block)

        def copy() -> None:
            for stored, piece in zip(segments, pieces, strict=True):
                stored.slot.copy_(piece, non_blocking=True)

        self.device.log.count("d2h_bytes", self.layout.bundle_bytes(bundle))
        self.device.transfers.issue(
            LaneKind.D2H,
            copy,
            reads=[block.memory],
            writes=[s.slot_memory for s in segments],
            label=f"offload gradient of bundle {bundle}",
        )
        for stored in segments:
            stored.slot_holds_gradient = True

    def _accumulate(self, bundle: int, gradient: BundleGradient) -> None:
        """Add a complete gradient to the fp32 accumulators, from the range on the device or from the slots."""
        segments = self.layout.bundles[bundle].segments
        if self.store.segments[segments[0]].tier is Tier.DEVICE:
            self._add_on_device(bundle, gradient)
        else:
            for s in segments:
                self._add_on_host(s, frozenset(gradient.fired))
        gradient.fired.clear()  # they are in the accumulator; what comes late is added there by itself
        gradient.flushed, gradient.parked = True, False

    def _add_on_host(self, segment: int, fired: frozenset[int]) -> None:
        stored = self.store.segments[segment]
        state, slot, kernel = stored.state, stored.slot, self.device.host_kernel
        assert state is not None and state.accumulator is not None
        accumulator = state.accumulator
        wheres = [
            slice(p.offset, p.offset + p.numel) for p in stored.segment.placements if p.parameter in fired
        ]

        def work() -> None:
            for where in wheres:
                kernel.accumulate(accumulator[where], slot[where])

        self.device.transfers.issue(
            LaneKind.CPU,
            work,
            reads=[stored.slot_memory],
            writes=[state.memory],
            label=f"accumulate segment {segment}",
            priority=segment,
        )
        if not self.last_micro_step:
            self.store.restore_slot(segment)

    def _add_on_device(self, bundle: int, gradient: BundleGradient) -> None:
        assert gradient.range is not None
        for s, piece in zip(
            self.layout.bundles[bundle].segments, self.store.pieces(bundle, gradient.range), strict=True
        ):
            stored = self.store.segments[s]
            state = stored.state
            assert state is not None and state.accumulator is not None
            self.device.transfers.compute(writes=[state.memory], label=f"accumulate segment {s} begins")
            for place in stored.segment.placements:
                if place.parameter in gradient.fired:
                    where = slice(place.offset, place.offset + place.numel)
                    self.device.kernel.accumulate(state.accumulator[where], piece[where])
            self.device.transfers.compute(
                reads=[gradient.range.memory], writes=[state.memory], label=f"accumulate segment {s} ends"
            )

    def _free(self, bundle: int, gradient: BundleGradient) -> None:
        if gradient.range is not None:
            self.device.pool.free(gradient.range, f"gradient of bundle {bundle}")
            gradient.range = None

    def consumed(self, bundle: int) -> None:
        """The bundle's update was issued: what it left on the device can go."""
        gradient = self.bundles[bundle]
        gradient.adopted.clear()
        self._free(bundle, gradient)

    def to_slot(self, bundle: int) -> None:
        """The optimizer of a bundle moves to the host while its gradients are adopted: put them into the slot."""
        gradient = self.bundles[bundle]
        if not gradient.adopted:
            return
        adopted = dict(gradient.adopted)
        for s in self.layout.bundles[bundle].segments:
            stored = self.store.segments[s]
            places = [p for p in stored.segment.placements if p.parameter in adopted]

            def copy(stored=stored, places=places) -> None:  # type: ignore[no-untyped-def]
                for p in places:
                    stored.slot[p.offset : p.offset + p.numel].copy_(adopted[p.parameter].reshape(-1))

            self.device.log.count("d2h_bytes", sum(p.numel for p in places) * self.store.dtype.itemsize)
            self.device.transfers.compute(label=f"adopted gradients of bundle {bundle}")
            self.device.transfers.issue(
                LaneKind.D2H, copy, writes=[stored.slot_memory], label=f"offload adopted gradients of segment {s}"
            ).wait()
            stored.slot_holds_gradient = True
        if not gradient.flushed:
            sums = self.device.kernel.sum_squares_all([tensor.reshape(-1) for tensor in adopted.values()])
            self.partials[bundle] = tuple(adopted), sums
        gradient.adopted.clear()
        gradient.flushed = True

    def start_micro_step(self, *, last: bool) -> None:
        self.last_micro_step = last
        self.in_place.start()
        for gradient in self.bundles.values():
            gradient.fired.clear()
            gradient.flushed = gradient.parked = False

    def learn(self) -> None:
        """After a step: a bundle expects next time what it got this time (all of it, if it got nothing)."""
        for gradient in self.bundles.values():
            if gradient.fired_in_step:
                gradient.expected = frozenset(gradient.fired_in_step)

    def finish_step(self) -> None:
        """The update has taken the gradients (or they were thrown away)."""
        for index, gradient in self.bundles.items():
            self._free(index, gradient)
            gradient.adopted.clear()
            gradient.fired.clear()
            gradient.fired_in_step.clear()
            gradient.flushed = gradient.parked = False
        self.in_place.start()
        self.partials.clear()

    def fired(self) -> list[int]:
        """Parameters that have a gradient in this step, in model order."""
        return sorted(p for g in self.bundles.values() for p in g.fired_in_step)

    def open_bundles(self) -> Sequence[int]:
        return [i for i, g in self.bundles.items() if g.open]
