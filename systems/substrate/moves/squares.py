"""Sums of squares for the norm: left by each gradient as it leaves, and read once at the step's end."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from itertools import accumulate

import torch

from systems.adam.kernel import AdamKernel
from systems.device.device import Device
from systems.device.lanes.ticket import Ticket
from systems.device.watch.labels import labelled, working
from systems.planning.layout import Layout
from systems.planning.plan import LaneKind, Tier
from systems.planning.step.operations import Work, before_updates, of_bundle
from systems.substrate.bundle.bundle import ManagedBundle
from systems.substrate.bundle.segments import joined

Partials = tuple[tuple[int, ...], "list[float] | torch.Tensor"]


class Squares:
    """known: per bundle its parameters and their fp64 sums of squares. gradient: a parameter's on the device, flat.

    lane_left: those out of accumulators on the host, and of what is summed over ranks, which a lane leaves there when it comes
    to them. A job keeps the one of its own step.
    """

    def __init__(self, layout: Layout, device: Device, gradient: Callable[[int], torch.Tensor]) -> None:
        self._layout, self._device, self._gradient = layout, device, gradient
        self.known: dict[int, Partials] = {}
        self.lane_left: dict[int, Partials] = {}
        self._pending: list[Ticket] = []

    def leave(self, bundles: Sequence[ManagedBundle]) -> None:
        """Of gradients that are there and about to be flushed, in one pass."""
        wanted = [(bundle.index, sorted(bundle.gradients.fired)) for bundle in bundles]
        with labelled("norm of gradients"):
            self.known |= _sums(self._device.kernel, wanted, self._gradient)
        for bundle in bundles:
            bundle.gradients.sum_ahead()

    def leave_waiting(self, bundles: Iterable[ManagedBundle]) -> None:
        """Of gradients in autograd's buffers, in one pass."""
        found = [(bundle.index, sorted(bundle.gradients.waiting)) for bundle in bundles if bundle.gradients.waiting]
        with labelled("norm of adopted gradients"):
            self.known |= _sums(self._device.kernel, found, self._gradient)

    def leave_accumulated(self, bundle: ManagedBundle) -> None:
        """With several micro-batches, once nothing more is added in this step: out of the fp32 accumulators where they live."""
        gradient, segments = bundle.gradients, bundle.segments
        alone = segments[0].segment.space.ranks == 1
        fired = gradient.fired_in_step if alone else frozenset(gradient.parameters)  # or on another rank
        memories = [each.state.memory for each in segments if each.state is not None]
        on_host = segments[0].tier is not Tier.DEVICE
        kernel, left = (self._device.host_kernel, self.lane_left) if on_host else (self._device.kernel, self.known)
        lying = [(stretch.accumulator, stretch.placements) for stretch in bundle.stretches]
        if not on_host:
            lying = [(each.state.accumulator, each.counted) for each in segments if each.state is not None]
        pieces: dict[int, list[torch.Tensor]] = {}
        for accumulator, placements in lying:
            assert accumulator is not None
            for piece in placements:
                if piece.parameter in fired:
                    pieces.setdefault(piece.parameter, []).append(accumulator[piece.here])

        def work() -> None:
            sums = kernel.sum_squares_all([joined(each) for each in pieces.values()])
            left[bundle.index] = tuple(pieces), sums

        gradient.sum_ahead()
        squares = of_bundle(self._layout, Work.SQUARES, LaneKind.CPU if on_host else LaneKind.COMPUTE, bundle.index)
        if on_host:
            first = before_updates(self._layout)
            self._pending.append(self._device.transfers.issue(squares, work, reads=memories, priority=first))
            return
        self._device.transfers.compute(reads=memories, label=squares.label)
        with working(squares):
            work()

    def wait_for(self, ticket: Ticket) -> None:
        """Its job leaves some of this step's in `lane_left`, as that is now."""
        self._pending.append(ticket)

    def reader(self, *more: torch.Tensor) -> Callable[[], tuple[dict[int, float], list[float]]]:
        """Of this step. Called, it waits for the device and for what lanes leave, and gives the sums by parameter, and
        the numbers of `more` (one element each, on the device).
        """
        known, lane_left, pending = list(self.known.values()), self.lane_left, self._pending
        read = self._device.partials([*(sums for _, sums in known), *more])

        def numbers() -> tuple[dict[int, float], list[float]]:
            for ticket in pending:
                ticket.wait()
            read_now, names = read(), [parameter for parameters, _ in known for parameter in parameters]
            found = dict(zip(names, read_now[: len(names)], strict=True))
            for parameters, of_lane in lane_left.values():
                found |= zip(parameters, map(float, of_lane), strict=True)
            return found, read_now[len(names) :]

        return numbers

    def forget(self) -> None:
        """The step is over; who reads its sums later has them."""
        self.known, self.lane_left, self._pending = {}, {}, []


def _sums(
    kernel: AdamKernel, found: Sequence[tuple[int, list[int]]], flat: Callable[[int], torch.Tensor]
) -> dict[int, Partials]:
    """Of bundles with the parameters that they have gradients of, in one pass. flat: a parameter's gradient."""
    sums = kernel.sum_squares_all([flat(parameter) for _, mine in found for parameter in mine])
    ends = accumulate(len(mine) for _, mine in found)
    return {bundle: (tuple(mine), sums[end - len(mine) : end]) for (bundle, mine), end in zip(found, ends, strict=True)}
