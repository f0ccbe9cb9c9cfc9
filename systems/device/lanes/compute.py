"""Compute as one more lane: the one that the caller's thread works off, or queues kernels of.

Nobody submits to it; it can be put behind a ticket, and gives tickets for what it has been given so far.
"""

from __future__ import annotations

from typing import Protocol

import torch

from systems.device.lanes.ticket import CudaTicket, DoneTicket, Ticket
from systems.device.watch.stopwatch import Stopwatch


class ComputeLane(Protocol):
    """The lane of the caller."""

    def order(self, ticket: Ticket) -> None:
        """Put later compute behind the ticket."""

    def mark(self, id: int) -> Ticket:
        """A ticket for all compute so far."""


class HostCompute:
    """Compute of the emulated device, which runs in the caller: it waits by itself, and is done when it returns."""

    def __init__(self, stopwatch: Stopwatch) -> None:
        self._stopwatch = stopwatch

    def order(self, ticket: Ticket) -> None:
        with self._stopwatch.waiting():
            ticket.wait()

    def mark(self, id: int) -> Ticket:
        return DoneTicket(id)


class CudaCompute:
    """The stream that is current where it is asked."""

    def __init__(self, device: torch.device, stopwatch: Stopwatch) -> None:
        self._device, self._stopwatch = device, stopwatch

    def order(self, ticket: Ticket) -> None:
        with self._stopwatch.waiting():
            ticket.order(torch.cuda.current_stream(self._device))

    def mark(self, id: int) -> Ticket:
        event, stream = torch.cuda.Event(), torch.cuda.current_stream(self._device)
        event.record(stream)
        return CudaTicket(id, event, stream)
