"""What has to end before an engine can close: a pass through its model.

That a pass is running is read off the stacks of all threads: whatever one would count it with, Ctrl-C may leave standing.
"""

from __future__ import annotations

import sys
from types import FrameType

from systems.system import Engine

OF_ENGINE = frozenset({"__call__", "backward", "step"})
OF_MODULE = frozenset({"_call_impl", "forward"})


def refuse_while_running(engine: Engine) -> None:
    """ValueError where somebody up a stack runs the engine, or its model."""
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
