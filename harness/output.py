"""What a user sees: results on stdout, progress, notices and complaints on stderr.

A reader that goes away (`| head`), a log on a full disk or a closed stream ends no run: what it cannot take is dropped.

Note [Results for people and for programs]
    A command that has a result tells it once: to a person who reads stdout on a terminal as tables and words, to a program that
    reads stdout (a pipe, a file, or with --json) as one line of JSON, the last one. Tables are on stderr then, beside progress.
"""

from __future__ import annotations

import logging
import os
import sys
from collections.abc import Callable, Iterable, Iterator
from contextlib import contextmanager, suppress
from contextvars import ContextVar
from typing import IO, TextIO, TypeVar, cast

from rich.console import Console

from systems.messages import one_line, printable

PLAIN_WIDTH = 160  # columns of a table that goes to a file or a pipe
_T = TypeVar("_T")
_JSON_ASKED = ContextVar("json_asked", default=False)


def fill_standard_streams() -> None:
    """Whichever of stdin, stdout and stderr is closed leads nowhere, so that no pipe or file gets its number."""
    for number in range(3):
        try:
            os.fstat(number)
        except OSError:
            os.set_inheritable(os.open(os.devnull, os.O_RDWR), True)  # the lowest number that is free: this one


class Tolerant:
    """A text stream that swallows everything once it cannot be written any more. None: it was closed from the start."""

    def __init__(self, stream: TextIO | None) -> None:
        self._stream = stream
        self.encoding = getattr(stream, "encoding", None) or "utf-8"

    def write(self, text: str) -> int:
        if self._stream is not None:
            try:
                self._stream.write(text)
            except UnicodeEncodeError:  # of one text and not of the stream: the next one may be written
                return self.write(text.encode(self.encoding, "backslashreplace").decode(self.encoding))
            except (OSError, ValueError):
                self._let_go()
        return len(text)

    def flush(self) -> None:
        if self._stream is not None:
            try:
                self._stream.flush()
            except (OSError, ValueError):
                self._let_go()

    def _let_go(self) -> None:
        """What the stream still buffers goes nowhere, so that the interpreter's own flush at exit does not fail either."""
        stream, self._stream = self._stream, None
        with suppress(OSError, ValueError):
            nowhere = os.open(os.devnull, os.O_WRONLY)
            os.dup2(nowhere, cast(TextIO, stream).fileno())
            os.close(nowhere)

    def isatty(self) -> bool:
        with suppress(OSError, ValueError):
            return self._stream is not None and self._stream.isatty()
        return False

    def fileno(self) -> int:
        if self._stream is None:
            raise OSError("the stream is closed")
        return self._stream.fileno()


def _console(to: TextIO | None) -> Console:
    stream = Tolerant(to)
    width = None if stream.isatty() else PLAIN_WIDTH
    return Console(file=cast(IO[str], stream), highlight=False, emoji=False, soft_wrap=True, width=width)


def progress_console() -> Console:
    return _console(sys.stderr)


def result_console() -> Console:
    """Where tables and words of a result go: Note [Results for people and for programs]."""
    return _console(sys.stderr if gives_json() else sys.stdout)


@contextmanager
def json_asked(asked: bool) -> Iterator[None]:
    """Within, results are JSON wherever stdout leads, if that is asked for."""
    before = _JSON_ASKED.set(asked)
    try:
        yield
    finally:
        _JSON_ASKED.reset(before)


def gives_json(*, only_asked: bool = False) -> bool:
    """See Note [Results for people and for programs]. only_asked: as with `harness ls`, whose lines programs read too."""
    return _JSON_ASKED.get() or (not only_asked and not Tolerant(sys.stdout).isatty())


def say(line: str) -> None:
    """A line on stdout."""
    stream = Tolerant(sys.stdout)
    stream.write(line + "\n")
    stream.flush()


def say_json(line: str) -> None:
    """A result as JSON, unless a person reads it."""
    if gives_json():
        say(line)


def counted(items: Iterable[_T], total: int, what: Callable[[_T], str]) -> Iterator[_T]:
    """The same, each with a line on stderr when it is there: its number, of how many, and what it is."""
    console = progress_console()
    for number, item in enumerate(items, start=1):
        console.print(printable(f"{number}/{total}  {what(item)}"), markup=False)
        yield item


@contextmanager
def waiting(what: str) -> Iterator[None]:
    """While this runs a terminal's stderr says what is waited for, on a line that goes again; nothing else sees it."""
    with progress_console().status(printable(what)):
        yield


class _Notices(logging.Handler):
    """What the library has to say (a build that takes long), a line each on stderr."""

    def emit(self, record: logging.LogRecord) -> None:
        stream = Tolerant(sys.stderr)
        stream.write(printable(one_line(record.getMessage())) + "\n")
        stream.flush()


def show_notices() -> None:
    """Of `systems`, which logs and prints nothing itself. Other packages' loggers stay as they are."""
    logger = logging.getLogger("systems")
    if not any(isinstance(handler, _Notices) for handler in logger.handlers):
        logger.addHandler(_Notices())
        logger.setLevel(logging.INFO)
        logger.propagate = False


def complain(message: str) -> None:
    """One line on stderr, with nothing in it that a terminal would obey."""
    stream = Tolerant(sys.stderr)
    stream.write(f"harness: {printable(one_line(message))}\n")
    stream.flush()
