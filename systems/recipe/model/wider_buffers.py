"""Buffers keep the type that they came with, and torch's errors about types do not say so.

`model.to(torch.bfloat16)` converts them, an engine's dtype does not: an fp32 table of angles would be wrong far out, and who
wants it in 16 bits converts the model before `initialize`. Where a model adds such a table to what it computes, torch finds two
types in one operation, and says neither where they come from nor what to do.
"""

from __future__ import annotations

import torch
from torch import nn

WORDS = ("dtype", "scalar type", "same type")  # of torch, where types of one operation differ
NAMED = 3  # buffers that a note lists


def explain_types(error: BaseException, model: nn.Module, dtype: torch.dtype) -> None:
    """A note on torch's error about types, where buffers may be why: their names, and what to do. dtype: of weights."""
    if not isinstance(error, RuntimeError) or not any(word in str(error).lower() for word in WORDS):
        return
    others = {name: each.dtype for name, each in model.named_buffers() if each.is_floating_point() and each.dtype != dtype}
    if not others:
        return
    listed = ", ".join(f"{name} ({str(kind).removeprefix('torch.')})" for name, kind in list(others.items())[:NAMED])
    more = f" and {len(others) - NAMED} more" if len(others) > NAMED else ""
    error.add_note(
        f"weights are computed with in {dtype}, and buffers keep the type that they came with: {listed}{more}. If the model "
        f"adds them to what it computes, convert it before initialize (model.to({dtype})): masters are in fp32 all the same"
    )
