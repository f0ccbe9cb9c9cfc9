"""The ways a system can fail that its user should hear about in one line.

Each error carries what a record needs (tier, need, have in bytes). `assert` is for our own bugs, never for these.
"""

from __future__ import annotations


class UnsupportedError(ValueError):
    """The request is well formed, but this system or machine cannot carry it out. The message says what to change."""


class HiddenUseError(UnsupportedError, RuntimeError):
    """What only running the model shows: a use of a parameter that cannot be followed. The message says what to change."""


class BudgetError(ValueError):
    """A memory budget is too small, found by looking before acting.

    tier: "device", "host" or "disk"; need and have are bytes. final: a plan that breaks it was asked for, so that going on
    without a plan would be something else than what was asked.
    """

    def __init__(self, message: str, *, tier: str, need: int, have: int, final: bool = False) -> None:
        super().__init__(message)
        self.tier, self.need, self.have, self.final = tier, need, have, final


class OutOfMemoryError(RuntimeError):
    """A tier ran out of memory during a step, with nothing left to evict.

    tier: "device", "host" or "disk"; need is the bytes asked for, have is what the tier could still give.
    """

    def __init__(self, message: str, *, tier: str, need: int, have: int) -> None:
        super().__init__(message)
        self.tier, self.need, self.have = tier, need, have


class DivergedError(RuntimeError):
    """Too many steps in a row were skipped for a non-finite gradient, or one that may not be skipped was seen."""


class PeerGoneError(RuntimeError):
    """Another rank ended, or does not answer: all that this one knows. What befell that one is the cause."""


class UnavailableError(RuntimeError):
    """A known system that cannot run on this machine: its module, or a package or device it needs, is not there.

    install: the command that brings what is missing, None where none does. It is part of the error's text.
    """

    def __init__(self, message: str, *, install: str | None = None) -> None:
        super().__init__(f"{message}: {install}" if install else message)
        self.install = install
