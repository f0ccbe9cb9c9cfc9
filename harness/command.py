"""A spec as the command line that asks for it: what can be pasted and works."""

from __future__ import annotations

import shlex
from collections.abc import Mapping
from typing import Any

from harness.plan_spec import PlanSpec
from harness.spec import RunSpec, flag
from systems.sizes import exact_size

LAYERS = "num_layers"  # a change that is one of --set


def command(name: str, spec: RunSpec, changes: Mapping[str, int | str | tuple[str, ...]] | None = None) -> str:
    """What to type for a spec with other values in some of its fields."""
    changed = dict(changes or {})
    given: dict[str, Any] = spec.model_dump(exclude_defaults=True)
    if LAYERS in changed:
        kept = [text for text in spec.set if text.partition("=")[0].strip().replace("-", "_") != LAYERS]
        given["set"] = [*kept, f"{LAYERS}={changed.pop(LAYERS)}"]
    given |= changed
    left_out = PlanSpec.left_out if isinstance(spec, PlanSpec) else frozenset[str]()
    parts = ["harness", name]
    for field in type(spec).model_fields:
        if field in given and field not in left_out and given[field] not in ((), []):
            parts += [flag(field), *_texts(field, given[field])]
    return shlex.join(parts)


def flags(changes: Mapping[str, int | str], options: Mapping[str, Any] | None = None) -> str:
    """The same of changes alone, and of options of the system."""
    given = dict(changes)
    if LAYERS in given:
        given["set"] = f"{LAYERS}={given.pop(LAYERS)}"
    texts = [f"{flag(name)} {value}" for name, value in given.items()]
    return " ".join(texts + [f"--option {name}={value}" for name, value in (options or {}).items()])


def _texts(field: str, value: Any) -> list[str]:
    if value is True:
        return []
    if field == "recompute" and not isinstance(value, str):
        return [",".join(map(str, value))]
    if isinstance(value, list | tuple):
        return [str(each) for each in value]
    if field.endswith("_memory"):
        return [exact_size(value)]
    return [str(value)]
