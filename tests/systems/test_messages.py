"""Messages of `systems` are in the words of its arguments, in backquotes; the command line turns those into its flags."""

from __future__ import annotations

import ast
import inspect
import re
from collections.abc import Iterator
from pathlib import Path

import pytest

import systems
from harness.plan_spec import PlanSpec
from harness.spec import flag, in_flags
from systems.messages import ARGUMENT

ROOT = Path(systems.__file__).parent
ARGUMENTS = {
    *inspect.signature(systems.initialize).parameters,
    *inspect.signature(systems.estimate).parameters,
    "ranks",
    "option",
    "VALUE",
    "signal",
}  # of runs alone; any; a module


def _texts(path: Path) -> Iterator[tuple[int, str]]:
    """(line, text) of every string that is no docstring, the fixed parts of f-strings joined by what stands for a value."""
    tree = ast.parse(path.read_text())
    lone = {id(node.value) for node in ast.walk(tree) if isinstance(node, ast.Expr)}
    inside = {id(part) for node in ast.walk(tree) if isinstance(node, ast.JoinedStr) for part in node.values}
    for node in ast.walk(tree):
        if isinstance(node, ast.JoinedStr):
            yield node.lineno, "".join(str(p.value) if isinstance(p, ast.Constant) else "VALUE" for p in node.values)
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and not {id(node)} & (lone | inside):
            yield node.lineno, node.value


def test_no_message_of_systems_names_a_flag() -> None:
    flags = re.compile("|".join(rf"{flag(field)}\b" for field in PlanSpec.model_fields))
    found = [f"{path}:{line}: {text}" for path in ROOT.rglob("*.py") for line, text in _texts(path) if flags.search(text)]
    assert not found, "\n".join(found)


def test_what_messages_call_an_argument_is_one() -> None:
    named = {name[1] for path in ROOT.rglob("*.py") for _, text in _texts(path) for name in ARGUMENT.finditer(text)}
    assert {"device_memory", "host_memory", "clip", "options"} <= named <= ARGUMENTS


@pytest.mark.parametrize(
    ("said", "told"),
    [
        ("raise `device_memory`, lower the batch", "raise --device-memory, lower the batch"),
        ("use `dtype='bf16'`", "use --dtype bf16"),
        ("use `clip=0` or `accumulate=2`", "use --clip 0 or --accumulate 2"),
        ("`options=dict(nonfinite='skip')`", "--option nonfinite=skip"),
        ("`options=dict(a=1, b='x y')`: no", "--option a=1 --option b=x y: no"),
        ("a smaller cache in `options`", "a smaller cache in --option"),
        ("`ranks=5` is more", "--ranks 5 is more"),
        ("`recompute=(` odd", "--recompute ( odd"),
        ("`engine.step()` and `x=1`", "`engine.step()` and `x=1`"),
        ("unknown model '`'", "unknown model '`'"),
    ],
)
def test_arguments_become_flags(said: str, told: str) -> None:
    assert in_flags(said) == told
