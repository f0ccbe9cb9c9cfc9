"""What each option of a system means, in words: its field's description, else what its class's docstring says of it.

There an option stands with a colon at the beginning of a sentence, alone or with others (`chunk_min, chunk_max: bytes of`),
with a paper's word behind it where it has one (`scatter (S_FLAG): `).
"""

from __future__ import annotations

import inspect
import re
from collections.abc import Iterable

from pydantic import BaseModel


def option_texts(options: type[BaseModel]) -> dict[str, str]:
    """Of each option that is described anywhere; what a class says goes before what those say that it derives from."""
    found: dict[str, str] = {}
    for each in options.__mro__:
        if isinstance(each, type) and issubclass(each, BaseModel) and each is not BaseModel:
            for name, text in _said(each.__dict__.get("__doc__") or "", options.model_fields).items():
                found.setdefault(name, text)
    described = {name: field.description for name, field in options.model_fields.items() if field.description}
    return found | described


def _said(docstring: str, names: Iterable[str]) -> dict[str, str]:
    known = "|".join(map(re.escape, names))
    one = rf"(?:{known})(?: \(\w+\))?"
    text = " ".join(inspect.cleandoc(docstring).split())
    heads = list(re.finditer(rf"(?:^|(?<=[.;] ))({one}(?:, {one})*): ", text)) if known else []
    ends = [head.start() for head in heads[1:]] + [len(text)] * bool(heads)
    return {
        name: text[head.end() : end].strip().rstrip(".")
        for head, end in zip(heads, ends, strict=True)
        for name in re.findall(rf"\b({known})\b", head[1])
    }
