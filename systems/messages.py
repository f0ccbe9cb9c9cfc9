"""How bad input is told: one line that says what was given, what is allowed and which name was probably meant.

Note [Words of arguments]
    What a message asks its reader to change it names as an argument of `systems.initialize`, in backquotes, with a value as
    Python writes it: `device_memory`, `dtype='bf16'`, `options=dict(prefetch=4)`. A command line that has flags for
    arguments finds them by ARGUMENT and says its own words.
"""

from __future__ import annotations

import difflib
import re
import unicodedata
from collections.abc import Callable, Iterable, Mapping
from types import MappingProxyType
from typing import Any

from pydantic import ValidationError

ERRNO = re.compile(r"\[Errno -?\d+\] ")
CALLED_ELSEWHERE: Mapping[str, str] = MappingProxyType(
    {
        **dict.fromkeys(("gpu", "nvidia", "cuda:0"), "cuda"),
        **dict.fromkeys(("host", "emulated", "cpu:0", "mps", "tpu", "xpu"), "cpu"),
        **dict.fromkeys(("bfloat16", "torch.bfloat16"), "bf16"),
        **dict.fromkeys(("float16", "half", "torch.float16"), "fp16"),
        **dict.fromkeys(("float32", "float", "torch.float32"), "fp32"),
    }
)
"""What others call a choice that there is here, or what is nearest to it; in lower case."""
ARGUMENT = re.compile(r"`(\w+)(?:=([^`]*))?`")
ESTIMATE = "`systems.estimate`"  # a command line says which of its commands does that
LEAST_OF_A_BATCH = f"{ESTIMATE} tells the least that a batch fits in"
"""Of refusals before there was a step, and in the first: what its activations take is known to neither."""


def unknown_name(kind: str, given: str, allowed: Iterable[str]) -> str:
    """'unknown system 'elxir': did you mean elixir? (angel, elixir, ...)'."""
    names = sorted(allowed)
    # Dashes that all flags begin with make none of them alike.
    bare = {name.lstrip("-"): name for name in names}
    close = difflib.get_close_matches(given.lstrip("-"), bare, n=3, cutoff=0.5)
    near = [bare[each] for each in close] or [n for n in names if given and given in n][:3]
    shown = ", ".join(names[:12]) + (", ..." if len(names) > 12 else "")
    if near:
        return f"unknown {kind} {given!r}: did you mean {' or '.join(near)}?"
    return f"unknown {kind} {given!r}: there is {shown or 'none'}"


def one_line(text: str) -> str:
    """Text with every run of white space, line ends included, made one blank, and bytes that are no UTF-8 as escapes.

    A number that the words beside it say too, Python's [Errno 2], is left out.
    """
    return " ".join(ERRNO.sub("", text).split()).encode("utf-8", "backslashreplace").decode()


def in_words(error: BaseException) -> str:
    """What an error says, as one line; its name where it says nothing."""
    return one_line(str(error)) or type(error).__name__


def printable(text: str) -> str:
    """Text in which escapes stand for all that a terminal obeys or cannot show: control characters, line ends, directions
    of writing, and bytes that are no UTF-8."""
    if text.isprintable():
        return text
    return "".join(one if _shows(one) else one.encode("unicode_escape").decode() for one in text)


def _shows(character: str) -> bool:
    return character.isprintable() or unicodedata.category(character) == "Zs"


def invalid_value(error: ValidationError, label: Callable[[str, Any], str]) -> str:
    """The first complaint of a pydantic error as one line. label(field, given) names the input, such as '--steps x'."""
    first = error.errors(include_url=False)[0]
    message = first["msg"].removeprefix("Value error, ").removeprefix("Assertion failed, ")
    if message.split(" ", 1)[0] not in ("None", "True", "False"):
        message = message[:1].lower() + message[1:]
    if not first["loc"]:
        return one_line(message)
    given = first["input"] if first["type"] != "missing" else None
    told = label(str(first["loc"][0]), given)
    line = message if message.startswith(told) else f"{told}: {message}"
    choices = _choices(first.get("ctx", {}).get("expected", ""))
    near = _meant(given, choices) if isinstance(given, str) else None
    return one_line(line + (f"; did you mean {near}?" if near else ""))


def _meant(given: str, choices: list[str]) -> str | None:
    """By its meaning, where that is known, before how it is spelled: gpu is near cpu in letters alone."""
    plain = re.sub(r"(?<=^cuda:)\d+$", "0", given.strip().lower())
    called = plain if plain in choices else CALLED_ELSEWHERE.get(plain)
    near = [called] if called in choices else difflib.get_close_matches(given, choices, n=1, cutoff=0.5)
    return near[0] if near else None


def _choices(expected: str) -> list[str]:
    """["cuda", "cpu"] from pydantic's \"'cuda' or 'cpu'\"."""
    return expected.split("'")[1::2]
