"""Work in a process of its own, which leaves nothing behind on a device and may break off without harm."""

from __future__ import annotations

import signal
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from multiprocessing import get_context, resource_tracker
from multiprocessing.connection import Connection
from typing import Any, TypeVar

_Asked = TypeVar("_Asked")
_Found = TypeVar("_Found")
LOOK_S = 0.2


def apart(work: Callable[[_Asked], _Found], asked: _Asked, stopped: Callable[[], bool]) -> _Found | None:
    """work(asked), both of which can be pickled; None where it broke off, or nobody wants it any more."""
    found = each_apart(partial(_once, work), asked, stopped)
    return found[0] if found else None


def each_apart(work: Callable[[_Asked], Iterable[_Found]], asked: _Asked, stopped: Callable[[], bool]) -> list[_Found]:
    """All that work(asked) yields: up to where it broke off, or nobody wants more."""
    context = get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(theirs, work, asked), daemon=True)
    with _unasked():
        process.start()
    theirs.close()
    found: list[_Found] = []
    try:
        while not stopped():
            if mine.poll(LOOK_S):
                found.append(mine.recv())
    except EOFError:
        pass
    finally:
        process.kill()
        process.join()
        mine.close()
    return found


@contextmanager
def _unasked() -> Iterator[None]:
    """A process begun now never hears of Ctrl-C, from its first moment on: the terminal tells all, and its parent ends it."""
    resource_tracker.ensure_running()  # else it is begun with this process, and takes the block away
    before = signal.pthread_sigmask(signal.SIG_BLOCK, {signal.SIGINT})
    try:
        yield
    finally:
        signal.pthread_sigmask(signal.SIG_SETMASK, before)


def _once(work: Callable[[Any], Any], asked: Any) -> Sequence[Any]:
    return (work(asked),)


def _tell(to: Connection, work: Callable[[Any], Iterable[Any]], asked: Any) -> None:
    for each in work(asked):
        to.send(each)
    to.close()  # that all is told is known before this process has ended
