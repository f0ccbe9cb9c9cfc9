"""What has to end before an engine can close: a pass through its model, or weights that are lent to be edited.

That a pass is running is read off the stacks of all threads: whatever one would count it with, Ctrl-C may leave standing.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from types import FrameType
from typing import Protocol

from torch import nn

OF_ENGINE = frozenset({"__call__", "backward", "step"})
OF_MODULE = frozenset({"_call_impl", "forward"})


class Lender(Protocol):
    """An engine. _lent: blocks that are open in which weights are edited."""

    module: nn.Module
    _lent: int


@contextmanager
def lending(engine: Lender, *, write: bool) -> Iterator[None]:
    engine._lent += write
    try:
        yield
    finally:
        engine._lent -= write


def refuse_while_in_use(engine: Lender) -> None:
    """ValueError where weights are lent, and where somebody up a stack runs the engine, or its model."""
    if engine._lent:
        raise ValueError("close: engine.summon(write=True) is open: leave its with block first")
    modules = {id(module) for module in engine.module.modules()}
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            name = frame.f_code.co_name
            if name in OF_ENGINE or name in OF_MODULE:
                whose = frame.f_locals.get("self")
                if (whose is engine and name in OF_ENGINE) or (id(whose) in modules and name in OF_MODULE):
                    raise ValueError("close: a pass of this engine is running, which needs its weights: close it after that")
            frame = frame.f_back
