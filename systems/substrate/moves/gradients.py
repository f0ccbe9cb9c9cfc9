"""Gradients on their way from autograd to the optimizer's tier.

Note [Life of a gradient]
    GRAD      autograd's post-accumulate hook hands a parameter's gradient over. It is added into the bundle's range on the
              device, or, where the bundle is updated on the device anyway, kept as the tensor autograd made ('adopted').
    flushed   once every gradient expected of the bundle is there: a sum of squares a parameter is left for the norm, and the
              range is copied into the host slot of its own parameters (Note [The slot]) and freed. With several
              micro-batches the slot's content is then added to the fp32 accumulator and the parameters are restored.
              Adopted gradients stay where they are, and so are summed all at once when the norm is wanted.
    parked    room was needed before the gradient was complete: the range lies in the slot, and nothing was added yet.
    in place  where the plan says so there is no range: see Note [Written in place].
    A gradient that arrives after its bundle was flushed or parked reopens the range with what is in the slot, so that a
    parameter whose gradient fires twice has both summed in the compute dtype, as autograd would.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import torch

from systems.adam.kernel import AdamKernel
from systems.device.device import Device
from systems.device.lanes.transfers import Memory
from systems.device.watch.events import Extent
from systems.device.watch.labels import labelled
from systems.planning.layout import Layout
from systems.planning.plan import LaneKind, Tier
from systems.planning.step.operations import Work, of_bundle
from systems.substrate.bundle.store import Store
from systems.substrate.moves.accumulators import Accumulators
from systems.substrate.moves.in_place import InPlace
from systems.substrate.moves.ranges import BundleGradient, Ranges
from systems.substrate.moves.residency import Residency

Partials = tuple[tuple[int, ...], "list[float] | torch.Tensor"]


class Gradients:
    """user: a unit that reads each parameter (the only one, where gradients are written in place).

    partials: per bundle its parameters and their fp64 sums of squares.
    """

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
        self.layout, self.store, self.device = layout, store, device
        self.accumulate = accumulate
        self.partials: dict[int, Partials] = {}
        self.last_micro_step = accumulate == 1
        parameters: dict[int, list[int]] = {b.index: [] for b in layout.bundles if b.trainable}
        for parameter, place in layout.places.items():
            if place.bundle in parameters:
                parameters[place.bundle].append(parameter)
        self.bundles = {b: BundleGradient(tuple(found), frozenset(found)) for b, found in parameters.items()}
        self._summed: set[int] = set()  # bundles whose sums are left already, ahead of their flush
        self._ranges = Ranges(residency)
        self._accumulators = Accumulators(residency)
        self.in_place = InPlace(self._ranges, layout.in_place, user, lambda bundle: accumulate > 1 or self.adopts(bundle))

    def adopts(self, bundle: int) -> bool:
        """True if the bundle's gradients stay where autograd made them until the device updates them."""
        segments = self.layout.bundles[bundle].segments
        alone = self.layout.segments[segments[0]].space.ranks == 1
        return self.accumulate == 1 and alone and self.store.states_on_device[bundle] == len(segments)

    def adopted_bytes(self) -> int:
        return sum(t.nbytes for g in self.bundles.values() for t in g.adopted.values())

    def enter(self, bundle: int, unit: int) -> None:
        """A unit's backward is about to begin."""
        if bundle in self.bundles:
            self.in_place.enter(bundle, unit, self.bundles[bundle])

    def reserve(self, bundle: int) -> None:
        """A unit's backward begins: have a range for each of its gradients."""
        gradient = self.bundles.get(bundle)
        if gradient is None or gradient.range is not None or gradient.flushed or self.adopts(bundle):
            return
        if not self.in_place.takes(bundle, gradient):
            self._ranges.open(bundle, gradient)

    def exit(self, bundle: int, unit: int) -> None:
        """A unit's backward has ended, and none of its calls is still to come."""
        if bundle in self.bundles:
            self.in_place.exit(bundle, unit, self.bundles[bundle])

    def accept(self, parameter: int, gradient: torch.Tensor) -> None:
        """Take a gradient over from autograd, rounded where its parameter was read in another dtype."""
        gradient = gradient.to(self.store.dtype)
        bundle = self.layout.places[parameter].bundle
        mine = self.bundles[bundle]
        again = parameter in mine.fired
        if mine.range is None and self.adopts(bundle):
            if again:
                mine.adopted[parameter].add_(gradient)
            else:
                mine.adopted[parameter] = gradient
            mine.flushed = False
        elif self.in_place.takes(bundle, mine):
            self.in_place.keep(bundle, parameter, gradient, mine)
        else:
            block = mine.range if mine.range is not None else self._ranges.open(bundle, mine)
            target = self._ranges.view(block, parameter)
            if again:
                target.add_(gradient.reshape(-1))
            else:
                target.copy_(gradient.reshape(-1))
            self.device.meter.hand_over(gradient.nbytes)
        mine.fired.add(parameter)
        mine.fired_in_step.add(parameter)

    def complete(self, bundle: int) -> bool:
        gradient = self.bundles.get(bundle)
        return gradient is not None and gradient.open and gradient.fired >= gradient.expected

    def park(self, bundle: int) -> None:
        """Free an incomplete gradient's range if its bytes can wait elsewhere; see Note [Life of a gradient]."""
        gradient = self.bundles[bundle]
        if self.accumulate == 1 or not gradient.fired:
            self.flush(bundle)
        elif self.store.segments[self.layout.bundles[bundle].segments[0]].tier is not Tier.DEVICE:
            assert gradient.range is not None
            self.device.transfers.compute(writes=[gradient.range.memory], label=f"gradient of bundle {bundle} waits")
            self._ranges.offload(bundle, gradient.range)
            self._ranges.free(bundle, gradient)
            gradient.parked = True

    def flush(self, bundle: int) -> None:
        """The bundle's gradient leaves for its optimizer's tier; see Note [Life of a gradient]."""
        gradient = self.bundles[bundle]
        if gradient.parked:
            self._accumulators.add(bundle, gradient, last=self.last_micro_step)
            return
        if not gradient.fired:  # reserved, but nothing came: the unit's output was not used
            self._ranges.free(bundle, gradient)
            return
        if self.adopts(bundle) and gradient.range is None:
            gradient.flushed = True
            return
        self.sum_complete([bundle])
        self._summed.discard(bundle)
        on_device = self.store.segments[self.layout.bundles[bundle].segments[0]].tier is Tier.DEVICE
        if gradient.range is not None:
            self.device.transfers.compute(writes=[gradient.range.memory], label=f"gradient of bundle {bundle} ends")
        if gradient.range is None:
            gradient.flushed = True
            if self.in_place.written(bundle):
                self.in_place.offload(bundle)
            return
        if on_device and self.accumulate == 1:
            gradient.flushed = True
            return  # the range stays until the update
        if not on_device:
            self._ranges.offload(bundle, gradient.range)
        if self.accumulate > 1:
            self._accumulators.add(bundle, gradient, last=self.last_micro_step)
        self._ranges.free(bundle, gradient)
        gradient.flushed = True

    def sum_complete(self, bundles: Sequence[int]) -> None:
        """Leave the sums of squares of gradients that are about to be flushed for the norm, in one pass.

        Bringing one together may want room, for which another is sent off, with its sums: that one is left out.
        """
        together: list[int] = []
        for bundle in bundles:
            gradient = self.bundles[bundle]
            stays = self.adopts(bundle) and gradient.range is None
            if bundle in self._summed or gradient.parked or stays or not gradient.fired:
                continue
            if not self.adopts(bundle):
                self.in_place.assemble(bundle, gradient)
            together.append(bundle)
        there = [b for b in together if self.bundles[b].range is not None or self.in_place.written(b)]
        wanted = [(b, sorted(self.bundles[b].fired)) for b in there if self.accumulate == 1]
        if wanted:
            with labelled("norm of gradients"):
                self.partials |= _sums(self.device.kernel, wanted, self.on_device)
            self._summed.update(bundle for bundle, _ in wanted)

    def on_device(self, parameter: int) -> torch.Tensor:
        """The flat gradient of a parameter that is on the device: adopted, in its range, or in its own place."""
        bundle = self.layout.places[parameter].bundle
        gradient = self.bundles[bundle]
        if parameter in gradient.adopted:
            return gradient.adopted[parameter].reshape(-1)
        if gradient.range is None:
            return self.in_place.view(bundle, parameter)
        return self._ranges.view(gradient.range, parameter)

    def consumed(self, bundle: int) -> None:
        """The bundle's update was issued: what it left on the device can go."""
        gradient = self.bundles[bundle]
        self.sum_adopted([bundle])
        gradient.adopted.clear()
        self._ranges.give_up(bundle, gradient)

    def to_slot(self, bundle: int) -> None:
        """The optimizer of a bundle moves to the host while its gradients are adopted: put them into the slot."""
        gradient = self.bundles[bundle]
        if not gradient.adopted:
            return
        adopted = dict(gradient.adopted)
        made = Memory(Extent("autograd", bundle, bundle + 1))
        self.device.transfers.compute(writes=[made], label=f"adopted gradients of bundle {bundle}")
        places = [(run, p) for run in self.store.runs(bundle) for p in run.placements if p.parameter in adopted]

        def copy() -> None:
            for run, p in places:
                run.slot[p.here].copy_(adopted[p.parameter].reshape(-1)[p.piece])

        segments = [self.store.segments[s] for s in self.layout.bundles[bundle].segments]
        for stored in segments:
            stored.slot_holds_gradient = True  # even if Ctrl-C breaks off what follows: then they are restored
        self.device.log.count("d2h_bytes", sum(p.numel for _, p in places) * self.store.dtype.itemsize)
        self.device.transfers.issue(
            of_bundle(self.layout, Work.OFFLOAD_ADOPTED, LaneKind.D2H, bundle),
            copy,
            reads=[made],
            writes=[stored.slot_memory for stored in segments],
        ).wait()
        self.sum_adopted([bundle])
        gradient.adopted.clear()
        gradient.flushed = True

    def sum_adopted(self, bundles: Iterable[int] | None = None) -> None:
        """Leave the sums of squares of adopted gradients for the norm, in one pass. Of all bundles, if none are given."""
        wanted = [b for b in (self.bundles if bundles is None else bundles) if self.bundles[b].adopted]
        found = [(b, sorted(self.bundles[b].adopted)) for b in wanted]
        with labelled("norm of adopted gradients"):
            self.partials |= _sums(self.device.kernel, found, self.on_device)

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
            self._ranges.give_up(index, gradient)
            gradient.adopted.clear()
            gradient.fired.clear()
            gradient.fired_in_step.clear()
            gradient.flushed = gradient.parked = False
        self.in_place.start()
        self.partials.clear()
        self._summed.clear()

    def fired(self) -> list[int]:
        """Parameters that have a gradient in this step, in model order."""
        return sorted(p for g in self.bundles.values() for p in g.fired_in_step)

    def open_bundles(self) -> Sequence[int]:
        return [i for i, g in self.bundles.items() if g.open]


def _sums(
    kernel: AdamKernel, found: Sequence[tuple[int, list[int]]], flat: Callable[[int], torch.Tensor]
) -> dict[int, Partials]:
    """Of bundles with the parameters that they have gradients of, in one pass. flat: a parameter's gradient."""
    sums = kernel.sum_squares_all([flat(parameter) for _, mine in found for parameter in mine])
    ends = accumulate(len(mine) for _, mine in found)
    return {bundle: (tuple(mine), sums[end - len(mine) : end]) for (bundle, mine), end in zip(found, ends, strict=True)}
