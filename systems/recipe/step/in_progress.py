"""Whether a pass of an engine is running, in whose midst it may be asked for something else.

That is read off the stacks of all threads: whatever one would count it with, Ctrl-C may leave standing.
"""

from __future__ import annotations

import sys
from types import FrameType

from systems.system import Engine

OF_ENGINE = frozenset({"_backward", "_finish_step"})  # what its public calls are about, once they have begun
OF_MODULE = frozenset({"_call_impl", "forward"})


def is_running(engine: Engine) -> bool:
    """Somebody up a stack runs the engine's backward pass or step, or its model."""
    modules = {id(module) for module in engine.module.modules()}
    for top in sys._current_frames().values():
        frame: FrameType | None = top
        while frame is not None:
            name = frame.f_code.co_name
            if name in OF_ENGINE or name in OF_MODULE:
                whose = frame.f_locals.get("self")
                if (whose is engine and name in OF_ENGINE) or (id(whose) in modules and name in OF_MODULE):
                    return True
            frame = frame.f_back
    return False
