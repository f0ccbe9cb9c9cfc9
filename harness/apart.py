"""Work in a process of its own, which leaves nothing behind on a device and may break off without harm."""

from __future__ import annotations

from collections.abc import Callable
from multiprocessing import get_context
from multiprocessing.connection import Connection
from typing import Any, TypeVar

_Asked = TypeVar("_Asked")
_Found = TypeVar("_Found")
LOOK_S = 0.2


def apart(work: Callable[[_Asked], _Found], asked: _Asked, stopped: Callable[[], bool]) -> _Found | None:
    """work(asked), both of which can be pickled; None where it broke off, or nobody wants it any more."""
    context = get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tell, args=(theirs, work, asked), daemon=True)
    process.start()
    theirs.close()
    try:
        while not mine.poll(LOOK_S):
            if stopped():
                return None
        found: _Found = mine.recv()
        return found
    except EOFError:
        return None
    finally:
        process.kill()
        process.join()


def _tell(to: Connection, work: Callable[[Any], Any], asked: Any) -> None:
    to.send(work(asked))
