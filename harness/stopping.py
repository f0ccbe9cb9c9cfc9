"""What stops a command from outside: a signal, or the end of the agent that started it."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from types import FrameType

STOP_SIGNALS = (signal.SIGINT, signal.SIGTERM, signal.SIGHUP)


@dataclass
class Stop:
    """Whether this process was told to stop, and by which signal. agent: the process of torchrun that started this one."""

    number: int | None = None
    agent: int | None = field(default_factory=lambda: os.getppid() if "TORCHELASTIC_RUN_ID" in os.environ else None)

    def look(self) -> None:
        """An agent that was killed has told nobody, and its ranks would train on without one that looks after them."""
        if self.agent is not None and os.getppid() != self.agent:
            self.number = self.number or signal.SIGHUP

    @property
    def code(self) -> int:
        """The exit code that says so, as shells give it: 130 for Ctrl-C; 0 if it was not."""
        return 0 if self.number is None else 128 + self.number


@contextmanager
def stop_signals() -> Iterator[Stop]:
    """Within, SIGINT, SIGTERM and SIGHUP are noted instead of raised: no moment is a wrong one for them."""
    stop = Stop()

    def note(number: int, frame: FrameType | None) -> None:
        stop.number = stop.number or number

    before = {number: signal.signal(number, note) for number in STOP_SIGNALS}
    try:
        yield stop
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)
