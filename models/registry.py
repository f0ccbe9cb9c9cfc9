"""Finds a model by name and builds it: the entry to this package.

`resolve` turns what was given to --model into a shape, `build` turns a shape into a module without memory, and
`initial_weights` says what its parameters start as. A family is known because its file is in this folder.
"""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping
from contextlib import nullcontext
from functools import cache, lru_cache
from pathlib import Path
from typing import TYPE_CHECKING

import models
from models.family import Family, FillWeights
from models.shape import ModelShape, did_you_mean
from systems.registry import find

if TYPE_CHECKING:
    from torch import nn


@cache
def families() -> dict[str, Family]:
    """Families with a table of sizes, by name: every module of this package that defines FAMILY."""
    entries = find(Path(models.OWN[0]).parent, {"models": "FAMILY"})  # by their source: the others need not be imported
    found = [importlib.import_module(entry.module).FAMILY for entry in entries.values()]
    return {family.name: family for family in sorted(found, key=lambda family: family.name)}


@cache
def _sizes() -> dict[str, ModelShape]:
    listed = [size for family in families().values() for size in family.sizes]
    assert len({size.name for size in listed}) == len(listed), "two sizes have one name"
    return {size.name: size for size in listed}


def names() -> tuple[str, ...]:
    """Every size that `resolve` knows by name, family by family, in table order."""
    return tuple(_sizes())


def resolve(name: str, overrides: Mapping[str, object] | None = None) -> ModelShape:
    """The shape of a size by name, of a folder in transformers' format or of a user's `module:function`.

    overrides: field to value or text, as in --set. Raises ValueError, one line, for whatever cannot be.
    """
    sizes = _sizes()
    if name in sizes:
        return sizes[name].with_overrides(overrides or {})
    if is_external(name):
        from models import external

        return external.resolve_external(name, overrides or {})
    raise ValueError(
        f"unknown model '{name}': {did_you_mean(name, sizes)} (or a folder in transformers' format, or module:function)"
    )


def is_external(name: str) -> bool:
    """It names something of the user's own: a folder, or `module:function`."""
    return ":" in name or os.path.isdir(name)


def _family(shape: ModelShape) -> Family:
    if shape.family in families():
        return families()[shape.family]
    from models import external

    return {f.name: f for f in external.FAMILIES}[shape.family]


def build(shape: ModelShape) -> nn.Module:
    """The module, in training mode, its parameters on the meta device (a user's own function: wherever it put them)."""
    from systems.pretrained import parameters_on_meta

    with nullcontext() if shape.family == "module" else parameters_on_meta():
        return _family(shape).build(shape).train()


def initial_weights(shape: ModelShape, seed: int) -> FillWeights | None:
    """What fills (name, fp32 tensor) in place; None for a module that already has its weights."""
    return _family(shape).weights(shape, seed)


@lru_cache(maxsize=256)
def parameter_count(shape: ModelShape) -> int:
    """Exact number of parameters, a tied one counted once; of a family that has the formula without building it."""
    formula = _family(shape).parameters
    return built_parameter_count(shape) if formula is None else formula(shape)


@lru_cache(maxsize=256)
def built_parameter_count(shape: ModelShape) -> int:
    """The same, counted in what is built."""
    return sum(p.numel() for p in build(shape).parameters())


@lru_cache(maxsize=256)
def block_count(shape: ModelShape) -> int:
    """Exact number of blocks that --recompute can name: of both stacks, a block that is called many times counted once."""
    from systems.recipe.model.blocks import find_blocks

    return len(find_blocks(build(shape)))
