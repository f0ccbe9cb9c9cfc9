"""Whether a pass of an engine is running, in whose midst it may be asked for something else.

That is read off the stack of who asks: whatever one would count it with, Ctrl-C may leave standing. Other threads' stacks
change while they are read, over which Python 3.11 may end the process: of them the engine says what they have begun.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

from systems.system import Engine

OF_ENGINE = frozenset({"_backward", "_finish_step"})  # what its public calls are about, once they have begun
OF_MODULE = frozenset({"_call_impl", "forward"})


def is_running(engine: Engine, begun_in: int | None) -> bool:
    """Somebody up this stack runs the engine's backward pass or step, or its model; or another thread the first two. What
    another thread runs of the model alone is not seen.

    begun_in: the thread that began a backward pass or a step and has not left it, if there is one; in this one that may be
    what Ctrl-C left standing.
    """
    if begun_in not in (None, threading.get_ident()):
        return True
    modules = {id(module) for module in engine.module.modules()}
    frame: FrameType | None = sys._getframe()
    while frame is not None:
        name = frame.f_code.co_name
        if name in OF_ENGINE or name in OF_MODULE:
            whose = frame.f_locals.get("self")
            if (whose is engine and name in OF_ENGINE) or (id(whose) in modules and name in OF_MODULE):
                return True
        frame = frame.f_back
    return False
