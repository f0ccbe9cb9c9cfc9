"""Sizes in bytes as people write them: 40GiB, 64MiB or plain bytes. The one place that reads and prints them.

`Size` and `SizeOrUnlimited` are the types for pydantic fields; inside the code a size is an int.
"""

from __future__ import annotations

from typing import Annotated, Any

from pydantic import BeforeValidator, ByteSize, Field, TypeAdapter, ValidationError

_ADAPTER = TypeAdapter(ByteSize)
MAX_BYTES = 1 << 60  # 1 EiB: more than any machine has, and still a number that memory can be asked for by
_UNITS = ("TiB", 1 << 40), ("GiB", 1 << 30), ("MiB", 1 << 20), ("KiB", 1 << 10)


def parse_size(given: Any) -> int:
    """'40GiB' -> 42949672960. Binary (KiB .. TiB) or decimal (KB .. TB) units, or plain bytes. Raises ValueError."""
    if isinstance(given, int) and not isinstance(given, bool):
        return _bounded(given, given)
    try:
        return _bounded(int(_ADAPTER.validate_python(str(given).strip())), given)
    except (ValidationError, OverflowError):
        raise ValueError(f"{given!r} is not a size: write it as 40GiB, 64MiB or plain bytes") from None


def _bounded(size: int, given: Any) -> int:
    if size > MAX_BYTES:
        raise ValueError(f"{given!r} is more than any machine has: give at most {format_size(MAX_BYTES)}")
    return size


def format_size(size: int) -> str:
    """The shortest exact form (64MiB), else two decimals of the largest unit that fits (1.53GiB)."""
    for unit, factor in _UNITS:
        if abs(size) >= factor:
            return f"{size // factor}{unit}" if size % factor == 0 else f"{size / factor:.2f}{unit}"
    return f"{size}B"


def exact_size(size: int) -> str:
    """Without a fraction, so that it is read as the same number again: 64MiB, 1792KiB, 17B."""
    unit, factor = next(((unit, factor) for unit, factor in _UNITS if size and size % factor == 0), ("B", 1))
    return f"{size // factor}{unit}"


def format_need(need: int, have: int) -> str:
    """The same of a need, with what tells it from what there is where both are written alike."""
    text = format_size(need)
    return f"{text} ({need - have}B more)" if need > have and text == format_size(have) else text


def _size_or_unlimited(given: Any) -> int | None:
    return None if given is None or str(given).strip() in ("inf", "unlimited") else parse_size(given)


Size = Annotated[int, BeforeValidator(parse_size), Field(ge=0)]
SizeOrUnlimited = Annotated[Annotated[int, Field(ge=0)] | None, BeforeValidator(_size_or_unlimited)]
