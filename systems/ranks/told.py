"""An error of one rank, as the others are told of it and raise it."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from systems.errors import UnavailableError
from systems.messages import in_words

DETAILS = ("tier", "need", "have", "final")  # what errors carry beside their words (systems/errors.py)


@dataclass(frozen=True)
class ToldError:
    """number, file: of an OSError. details: by name."""

    kind: type[Exception]
    words: str
    number: int | None
    file: str | None
    details: dict[str, Any]

    @classmethod
    def of(cls, error: BaseException) -> ToldError:
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
        words = f"rank {rank}: {self.words}"
        if issubclass(self.kind, OSError):
            return self.kind(words) if self.number is None else self.kind(self.number, words, self.file)
        made = self.kind.__new__(self.kind)
        made.args = (words,)
        vars(made).update(self.details)
        return made
