"""Lanes: ordered queues of work. Nothing here knows what is moved.

A lane is a queue and the thread that works it off. On the emulated device its jobs do the work themselves; on CUDA they queue
it on the lane's stream.
"""

from __future__ import annotations

import atexit
import contextlib
import os
import threading
import time
import weakref
from collections import deque
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import torch

from systems.device.lanes.access import Access
from systems.device.lanes.ticket import CudaTicket, HostTicket, Ticket
from systems.device.watch.labels import working
from systems.machine.device_thread import DeviceThread
from systems.planning.plan import LaneKind
from systems.planning.step.operations import LaneOperation

LOOK_S = 0.01
NOBODY_CAME = "other ranks did not come to a collective of this one any more"
PATIENCE_S = 2.0  # with collectives that other ranks may not come to any more, and with jobs at the end of the program


class _LaneJob:
    __slots__ = ("after", "operation", "priority", "ticket", "work")

    def __init__(
        self, work: Callable[[], None], after: Sequence[Ticket], ticket: Any, priority: int, operation: LaneOperation | None
    ) -> None:
        self.work, self.after, self.ticket, self.priority, self.operation = work, after, ticket, priority, operation


class Lane:
    """A thread that runs jobs one at a time, in order of submission.

    Where a job only queues work on a stream and nothing is in its way, whoever submits it does that himself: to hand it to
    the thread would cost more, and the two would fight for the interpreter.

    stream: the CUDA stream its jobs queue work on, None where jobs do the work themselves.
    jitter: called before each job; tests put random sleeps here.
    threads: that take jobs; more than one only in a lane that keeps no order.
    in_caller: False where a job may keep the thread that carries it out waiting, for other ranks.
    """

    def __init__(
        self,
        kind: LaneKind,
        *,
        stream: torch.cuda.Stream | None = None,
        jitter: Callable[[], None] | None = None,
        threads: int = 1,
        in_caller: bool = True,
    ) -> None:
        self.kind, self.stream, self._jitter = kind, stream, jitter
        self._in_caller = in_caller and stream is not None
        self._jobs: deque[_LaneJob] = deque()
        self._lock = threading.RLock()  # taken itself: a Condition's way to it is Python, where Ctrl-C may leave it taken
        self._changed = threading.Condition(self._lock)
        self._running = True
        self._access = Access()
        self._busy = 0  # threads that have a job in hand
        self.error: BaseException | None = None
        self._failed: list[Any] = []  # tickets
        name = f"lane-{kind.value}"
        self._threads = [DeviceThread(self._run, name) for _ in range(threads)]
        _open.add(self)
        for thread in self._threads:
            thread.start()

    def submit(
        self,
        work: Callable[[], None],
        after: Sequence[Ticket],
        *,
        id: int,
        priority: int = 0,
        operation: LaneOperation | None = None,
    ) -> Ticket:
        """Queue `work` to run after the tickets in `after`. priority is for lanes that choose; this one keeps order.

        operation: what a profile shows.
        """
        if os.getpid() != self._access.process:  # a lock may be held for ever, too
            self._access.check_process()
        ticket = HostTicket(id) if self.stream is None else CudaTicket(id)
        job = _LaneJob(work, after, ticket, priority, operation)
        with self._lock:
            if not self._running:
                self._fail(ticket, self.error or self._closed())
                return ticket
            free = self._in_caller and not self._busy and not self._waiting
            if free and all(earlier.at_once() for earlier in after):
                self._carry_out(job, by_caller=True)
            else:
                self._jobs.append(job)
                self._changed.notify_all()
        return ticket

    @property
    def _waiting(self) -> bool:
        return bool(self._jobs)

    def _take(self) -> _LaneJob | None:
        """The next job, or None after a sleep: look again. Called with the lock held and jobs present."""
        return self._jobs.popleft()

    def _run(self) -> None:
        torch.multiprocessing._set_thread_name(threading.current_thread().name)  # what a profile calls the thread
        try:
            self._work_off()
        except BaseException as error:  # of the lane itself: nobody may wait for what will never come
            self._give_up(error)
            raise

    def _work_off(self) -> None:
        with self._lock:
            while self._running or self._waiting:
                if not self._waiting:
                    self._changed.wait()
                elif (job := self._take()) is not None:
                    self._busy += 1
                    try:
                        with self._unlocked():
                            self._carry_out(job)
                            del job  # and with it its hold on memory, which may have to go before another job comes
                    finally:
                        self._busy -= 1
                        if not self._busy and not self._waiting:
                            self._changed.notify_all()

    @contextlib.contextmanager
    def _unlocked(self) -> Iterator[None]:
        """Jobs can be submitted, and taken by the other threads, meanwhile."""
        self._changed.release()
        try:
            yield
        finally:
            self._changed.acquire()

    def _give_up(self, error: BaseException) -> None:
        with self._lock:
            self.error, self._running = self.error or error, False
            for job in self._left():
                self._fail(job.ticket, error)
            self._changed.notify_all()

    def _left(self) -> list[_LaneJob]:
        """Takes all jobs that were not begun."""
        left = list(self._jobs)
        self._jobs.clear()
        return left

    def _fail(self, ticket: Any, error: BaseException) -> None:
        self._failed.append(ticket)
        if self.stream is None:
            ticket.finish(error)
        else:
            ticket.queued(None, error)

    def _closed(self) -> RuntimeError:
        return RuntimeError(f"the {self.kind.value} lane is closed")

    def _carry_out(self, job: _LaneJob, *, by_caller: bool = False) -> None:
        """An error is its ticket's. by_caller: what only ends programs (Ctrl-C) is not this lane's, and goes on."""
        ticket = job.ticket
        try:
            if self._jitter is not None:
                self._jitter()
            for earlier in job.after:
                earlier.order(self.stream)
            if self.stream is None:
                with working(job.operation):
                    job.work()
                ticket.finish()
                return
            with torch.cuda.stream(self.stream):
                with working(job.operation):
                    job.work()
                event = torch.cuda.Event(blocking=True)  # a host that waits for it sleeps
                event.record(self.stream)
            ticket.queued(event)
        except BaseException as error:  # handed to whoever waits for the ticket, and to drain
            if by_caller and not isinstance(error, Exception):
                raise
            self.error = self.error or error
            self._fail(ticket, error)

    def rest(self) -> None:
        """Block until every job submitted so far is finished, on the device too."""
        self._access.check_process()
        with self._lock:
            self._changed.notify_all()  # Ctrl-C may have come between a job and the word of it
            while self._waiting or self._busy:
                self._changed.wait()
        if self.stream is not None:
            self.stream.synchronize()

    def drain(self) -> None:
        """`rest`; raises the first error of any job."""
        self.rest()
        if self.error is not None:
            raise self.error

    def close(self) -> None:
        """Finish what is queued, then end the threads.

        Errors are forgotten: all frames that one went through hold memory, and may hold a step's graph, which holds the lane.
        """
        with self._lock:
            self._running = False
            self._changed.notify_all()
        for thread in self._threads:
            if thread is not threading.current_thread():
                thread.join()
        failed, self._failed, self.error = self._failed, [], None
        for ticket in failed:
            self._fail(ticket, self._closed())


_open: weakref.WeakSet[Lane] = weakref.WeakSet()


@atexit.register
def _end_with_the_program() -> None:
    """Of engines that nobody closed. Python ends threads where they come back from a library, and one that comes back through
    C++ takes the process with it (std::terminate), whatever the program had come to.
    """
    lanes = [lane for lane in _open if lane._access.process == os.getpid()]
    for ends in (_take_no_more, _begin_no_more):
        for lane in lanes:
            ends(lane)
        until = time.monotonic() + PATIENCE_S
        for thread in [thread for lane in lanes for thread in lane._threads]:
            thread.join(max(0.0, until - time.monotonic()))


def _take_no_more(lane: Lane) -> None:
    with lane._lock:
        lane._running = False
        lane._changed.notify_all()


def _begin_no_more(lane: Lane) -> None:
    lane._give_up(lane._closed())


class UpdateLane(Lane):
    """The CPU lane: among jobs whose inputs have arrived it runs the one with the lowest priority number first.

    Gradients arrive last unit first, but the next forward needs the first units first, whose fetches wait for their updates:
    see Note [Derived waits] in transfers.py. Inputs arrive about in the order the jobs were submitted, so while none is there
    it sleeps until the oldest job's are.

    threads: with two, the next update waits in the queue of csrc/adam.cpp while one runs. Jobs then overlap, and nothing but
    their tickets keeps two of them in order.
    """

    def __init__(self, kind: LaneKind, *, jitter: Callable[[], None] | None = None, threads: int = 1) -> None:
        self._ready: list[_LaneJob] = []
        super().__init__(kind, jitter=jitter, threads=threads)

    def _take(self) -> _LaneJob | None:
        missing = self._missing()
        while self._jobs and missing is None:
            self._ready.append(self._jobs.popleft())
            missing = self._missing()
        if self._ready:
            job = min(self._ready, key=lambda job: job.priority)
            self._ready.remove(job)
            return job
        assert missing is not None, "a lane takes a job only while it has one"
        with self._unlocked(), contextlib.suppress(BaseException):  # its job meets the error again
            missing.wait()
        return None

    def _missing(self) -> Ticket | None:
        """What the oldest job still waits for. Tickets finish at any time, so each is asked once."""
        if not self._jobs:
            return None
        return next((earlier for earlier in self._jobs[0].after if not earlier.done()), None)

    @property
    def _waiting(self) -> bool:
        return bool(self._jobs or self._ready)

    def _left(self) -> list[_LaneJob]:
        left, self._ready = self._ready, []
        return left + super()._left()


class LinkLane(Lane):
    """Of several ranks, what their collectives go through. A job in it ends when all ranks have come to it, be it never. Behind
    one that failed, or that what it waits for kept away, none is begun: other ranks would take it for the one before.

    end: ends collectives that are under way on a device. patience_s: seconds that `abandon` waits, for the thread and then for
    the device. in_caller: only of a link that queues (`Link.queues`).
    """

    def __init__(
        self,
        kind: LaneKind,
        end: Callable[[], None],
        *,
        stream: torch.cuda.Stream | None = None,
        jitter: Callable[[], None] | None = None,
        in_caller: bool = False,
    ) -> None:
        self.patience_s, self._abandoned, self._end = PATIENCE_S, False, end
        self._current: _LaneJob | None = None
        super().__init__(kind, stream=stream, jitter=jitter, in_caller=in_caller)

    def abandon(self) -> None:
        """Other ranks may not come any more. What is queued has a while to end; then it fails, and who waits for it is told so.

        Nothing ends a collective that a thread is in: the thread is left there, and ends with the process. One that a device
        was given already ends with anything as its result.
        """
        with self._lock:
            at_rest = self._changed.wait_for(lambda: not (self._waiting or self._busy), self.patience_s)
            if self._abandoned or (at_rest and self._done_on_device()):
                return
            self._abandoned, self._running, self._threads = True, False, []
            error = RuntimeError(NOBODY_CAME)
            self.error = self.error or error
            under_way = [] if self._current is None else [self._current]
            for job in (*under_way, *self._left()):
                self._fail(job.ticket, error)
        with contextlib.suppress(Exception):  # what led here is the news
            self._end()

    def _done_on_device(self) -> bool:
        """Before patience is over."""
        until = time.monotonic() + self.patience_s
        while self.stream is not None:
            try:
                if self.stream.query():
                    return True
            except RuntimeError:  # the device's own, told where its results are waited for
                return False
            if time.monotonic() > until:
                return False
            time.sleep(LOOK_S)
        return True

    def _take(self) -> _LaneJob | None:
        self._current = super()._take()
        return self._current

    def _carry_out(self, job: _LaneJob, *, by_caller: bool = False) -> None:
        work = job.work

        def unless_abandoned() -> None:
            if self.error is not None:
                raise self.error
            work()
            if self._abandoned:  # who waited was told so, and nobody is to be told otherwise later
                raise RuntimeError(NOBODY_CAME)

        job.work = unless_abandoned
        super()._carry_out(job, by_caller=by_caller)
        self._current = None

    def rest(self) -> None:
        if not self._abandoned:
            super().rest()
