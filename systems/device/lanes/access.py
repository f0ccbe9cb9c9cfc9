"""Who may use an engine when: the process that made it, and nobody while its values are out to be written."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager

from systems.errors import UnsupportedError

OTHER_PROCESS = (
    "this engine belongs to the process that it was made in, and a forked one has none of its threads: use it there, or make "
    "another engine here (start the process by 'spawn' where CUDA is used)"
)


class Access:
    def __init__(self) -> None:
        self.process = os.getpid()
        self._writes = False

    @property
    def is_foreign(self) -> bool:
        """True in a forked child."""
        return os.getpid() != self.process

    def check_process(self) -> None:
        if self.is_foreign:
            raise RuntimeError(OTHER_PROCESS)

    def check(self) -> None:
        """RuntimeError in another process; UnsupportedError within summon(write=True), whose end would undo what is done, and
        which shows what the model does not have yet."""
        self.check_process()
        if self._writes:
            raise UnsupportedError(
                "summon(write=True) is open, and its end writes all values: leave its with block before anything else is "
                "asked of the engine"
            )

    @contextmanager
    def writing(self, write: bool) -> Iterator[None]:
        self._writes = write
        try:
            yield
        finally:
            self._writes = False
