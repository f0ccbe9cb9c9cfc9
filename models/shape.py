"""A model's shape: everything that decides its parameters and work, as one frozen record.

Sizes are plain data, so that `--set num_layers=12` can change any of them and a record can hold them all. What a family
needs beyond the fields here it adds in a subclass beside its table of sizes. How shapes become modules: the families.
"""

from __future__ import annotations

import dataclasses
import difflib
import types
import typing
from collections.abc import Iterable, Mapping
from dataclasses import dataclass
from typing import Any, ClassVar, Literal, Self

MAX_TOKENS = 1 << 24  # of a micro-batch on a device: what no device holds, and only the looking would take long

# More than any model has, so that a slip of the hand is told and not built until memory runs out.
MAX_LAYERS = 1 << 16
MAX_SIZE = 1 << 31  # of any other number of a shape

ObjectiveName = Literal["causal", "masked", "seq2seq"]
"""What a model learns to predict: the next token, masked tokens, or one text from another (`models.objective`)."""


def did_you_mean(given: str, allowed: Iterable[str]) -> str:
    """The tail of an error line: names near `given`, or all of them where none is near and they are few."""
    names = sorted(allowed)
    near = difflib.get_close_matches(given, names, n=3, cutoff=0.5)
    if near:
        return f"did you mean {' or '.join(near)}?"
    return f"known: {', '.join(names[:40])}{', ...' if len(names) > 40 else ''}"


@dataclass(frozen=True, kw_only=True)
class ModelShape:
    """One entry of a family's table of sizes.

    objective: the kind of batch and loss this model trains on.
    num_layers: as the source counts them: blocks of each stack where there are two. hidden_size: of the residual stream.
    num_heads, ffn_size (inner width of the feed-forward): None where unknown (a user's own module).
    max_positions: longest sequence in tokens, None: no limit.
    seq_len, batch_size: what a run uses unless told otherwise; batch_size is per rank and micro-batch.
    dropout: one probability for every dropout of the model. tied: the output head is the token embedding.
    label: what the source paper calls this size. notes: where shape and label disagree, and where the shape comes from.
    """

    heads_divide_width: ClassVar[bool] = True
    fixed: ClassVar[frozenset[str]] = frozenset({"name", "family", "objective"})
    from_zero: ClassVar[frozenset[str]] = frozenset({"num_layers"})

    name: str
    family: str
    objective: ObjectiveName = "causal"
    num_layers: int
    hidden_size: int
    num_heads: int | None
    ffn_size: int | None
    vocab_size: int
    max_positions: int | None
    seq_len: int = 1024
    batch_size: int = 16
    dropout: float = 0.0
    tied: bool = True
    label: str = ""
    notes: str = ""

    def __post_init__(self) -> None:
        for field in dataclasses.fields(self):
            value = getattr(self, field.name)
            least = 0 if field.name in self.from_zero else 1
            if type(value) is int and value < least:
                raise ValueError(f"{self.name}: {field.name} must be at least {least}, not {value}")
            most = MAX_LAYERS if field.name == "num_layers" else MAX_SIZE
            if type(value) is int and value > most:
                raise ValueError(f"{self.name}: {field.name} must be at most {most}, not {value}")
        if not 0.0 <= self.dropout < 1.0:
            raise ValueError(f"{self.name}: dropout must lie in [0, 1), not {self.dropout}")
        if self.heads_divide_width and self.num_heads is not None and self.hidden_size % self.num_heads:
            raise ValueError(
                f"{self.name}: hidden_size {self.hidden_size} does not divide by num_heads {self.num_heads}: "
                f"the nearest width that does is {_nearest_multiple(self.hidden_size, self.num_heads)}"
            )

    def with_overrides(self, overrides: Mapping[str, object]) -> Self:
        """A copy with fields replaced, as `--set field=value` asks; text is read as the field's type.

        Raises ValueError, one line, for an unknown field (with near names), a value of another type, or a shape that
        cannot be built. name, family and objective say what this entry is and stay.
        """
        hints = typing.get_type_hints(type(self))
        settable = {f.name for f in dataclasses.fields(self)} - self.fixed
        values: dict[str, Any] = {}
        for field, given in overrides.items():
            if field not in settable:
                raise ValueError(f"{self.name} has no field '{field}' to set: {did_you_mean(field, settable)}")
            values[field] = _read(field, given, hints[field])
        return dataclasses.replace(self, **values)

    def check_run(self, *, batch_size: int, seq_len: int) -> None:
        """Raises ValueError, one line, if this model cannot run on batch_size x seq_len tokens."""
        if batch_size < 1:
            raise ValueError(f"the batch size must be at least 1, not {batch_size}")
        if seq_len < 2:
            raise ValueError(f"a sequence needs at least 2 tokens to have a next one to predict, not {seq_len}")
        if batch_size * seq_len > MAX_TOKENS:
            raise ValueError(
                f"{batch_size} samples of {seq_len} tokens are {batch_size * seq_len} tokens at once on a device, at most "
                f"{MAX_TOKENS} are allowed: lower --batch-size or --seq-len, and raise --accumulate"
            )
        if self.max_positions is not None and seq_len > self.max_positions:
            raise ValueError(
                f"{self.name} has positions for {self.max_positions} tokens, the sequence length is {seq_len}: "
                f"lower --seq-len or raise the table with --set max_positions={seq_len}"
            )


def _nearest_multiple(value: int, of: int) -> int:
    return max(1, (value + of // 2) // of) * of


def _read(field: str, given: object, hint: Any) -> object:
    """`given`, a value or its text, as the type that `hint` names; ValueError where it is another."""
    wanted = next(t for t in typing.get_args(hint) if t is not type(None)) if _is_union(hint) else hint
    text = str(given).strip()
    try:
        if wanted is bool:
            return {"true": True, "1": True, "false": False, "0": False}[text.lower()]
        if wanted is int and not isinstance(given, bool | float):
            return int(text)
        if wanted is float and not isinstance(given, bool):
            return float(text)
        if wanted is str or text in typing.get_args(wanted):
            return text
    except (KeyError, ValueError):
        pass
    kinds = {bool: "true or false", int: "a whole number", float: "a number", str: "text"}
    kind = kinds.get(wanted) or " or ".join(typing.get_args(wanted))
    raise ValueError(f"{field} takes {kind}, not {given!r}")


def _is_union(hint: Any) -> bool:
    return typing.get_origin(hint) in (typing.Union, types.UnionType)
