"""Tickets: the proof that a piece of work is done. The host can wait for one, and another job before it works."""

from __future__ import annotations

import threading
from typing import Protocol

import torch


class Ticket(Protocol):
    """id: grows in order of issue. compute: left by compute, which never waits for itself."""

    id: int
    compute: bool

    def done(self) -> bool:
        """True once the work is finished on its device."""

    def wait(self) -> None:
        """Block the host until done; raises what the work raised."""

    def order(self, stream: torch.cuda.Stream | None) -> None:
        """Make later work of the calling lane come after this: on its stream if there is one, else by waiting."""

    def at_once(self) -> bool:
        """True if `order` on a stream would not keep the host waiting."""


class DoneTicket:
    """Work that was finished when its ticket was made: compute on the emulated device, which runs in the caller."""

    compute = True

    def __init__(self, id: int) -> None:
        self.id = id

    def done(self) -> bool:
        return True

    def wait(self) -> None:
        return

    def order(self, stream: torch.cuda.Stream | None) -> None:
        return

    def at_once(self) -> bool:
        return True


class HostTicket:
    """Work done by a thread."""

    compute = False

    def __init__(self, id: int) -> None:
        self.id = id
        self._finished = threading.Event()
        self._error: BaseException | None = None

    def finish(self, error: BaseException | None = None) -> None:
        self._error = error
        self._finished.set()

    def done(self) -> bool:
        return self._finished.is_set()

    def wait(self) -> None:
        self._finished.wait()
        if self._error is not None:
            raise self._error

    def order(self, stream: torch.cuda.Stream | None) -> None:
        self.wait()

    def at_once(self) -> bool:
        return self.done()


class CudaTicket:
    """Work queued on a stream by a lane's thread, or (event and its stream given) compute already queued by the caller."""

    def __init__(self, id: int, event: torch.cuda.Event | None = None, stream: torch.cuda.Stream | None = None) -> None:
        self.id, self.compute = id, stream is not None
        self._event, self._stream = event, stream
        self._queued = threading.Event()
        self._error: BaseException | None = None
        if event is not None:
            self._queued.set()

    def queued(self, event: torch.cuda.Event | None, error: BaseException | None = None) -> None:
        self._event, self._error = event, error
        self._queued.set()

    def done(self) -> bool:
        return self._queued.is_set() and (self._event is None or self._event.query())

    def wait(self) -> None:
        self._queued.wait()
        if self._error is not None:
            raise self._error
        assert self._event is not None
        self._event.synchronize()

    def order(self, stream: torch.cuda.Stream | None) -> None:
        if stream is None:
            self.wait()
            return
        if stream == self._stream:
            return  # a stream is in order by itself
        self._queued.wait()
        if self._error is not None:
            raise self._error
        assert self._event is not None
        stream.wait_event(self._event)

    def at_once(self) -> bool:
        return self._queued.is_set()
