"""What ranks do side by side: all bring it to an end, or none, and what went wrong on one is told on all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any

from systems.errors import UnavailableError
from systems.messages import in_words
from systems.ranks.ranks import Ranks

DETAILS = ("tier", "need", "have", "final")  # what errors carry beside their words (systems/errors.py)


@contextmanager
def together(ranks: Ranks, what: str) -> Iterator[None]:
    """Around what each rank does alone, without a collective in it; all ranks come to its end.

    Where it raises, so it does on all ranks: its own error on each that has one, on the others the first one's, of the same
    class where that is one that is told in a line (ValueError, OSError, this project's own), else a RuntimeError. what: as in
    Ranks.exchange.
    """
    if ranks.size == 1:
        yield
        return
    mine: BaseException | None = None
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - it is raised below, once the others know
        mine = error
    with contextlib.suppress(Exception) if mine is not None else contextlib.nullcontext():
        told = ranks.exchange(what, None if mine is None else _ToldError.of(mine))
    if mine is not None:
        raise mine
    for rank, theirs in enumerate(told):
        if theirs is not None:
            raise theirs.of_rank(rank)


@dataclass(frozen=True)
class _ToldError:
    """number, file: of an OSError. details: by name."""

    kind: type[Exception]
    words: str
    number: int | None
    file: str | None
    details: dict[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> _ToldError:
        words = in_words(error)
        if not isinstance(error, ValueError | OSError | RuntimeError) or isinstance(error, UnicodeError | UnavailableError):
            return cls(RuntimeError, f"{type(error).__name__}: {words}", None, None, {})
        kind: type[Exception] = type(error)
        if kind.__module__ != "builtins" and not kind.__module__.startswith("systems."):
            kind = next(each for each in (ValueError, OSError, RuntimeError) if issubclass(kind, each))
        number = error.errno if isinstance(error, OSError) else None
        file = error.filename if isinstance(error, OSError) and isinstance(error.filename, str) else None
        if isinstance(error, OSError) and error.strerror:
            words = error.strerror
        details = {name: vars(error)[name] for name in DETAILS if name in vars(error)}
        return cls(kind, words, number, file, details)

    def of_rank(self, rank: int) -> Exception:
        """As it is raised on the others."""
        words = f"{self.words} (rank {rank})"
        if issubclass(self.kind, OSError):
            return self.kind(words) if self.number is None else self.kind(self.number, words, self.file)
        made = self.kind.__new__(self.kind)
        made.args = (words,)
        vars(made).update(self.details)
        return made
