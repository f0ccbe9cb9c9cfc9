"""Who has a field writes it: in `systems`, no file assigns to a field of an object that another file defines.

What a program can see of that: a field is what a class assigns through `self` or declares in its body; a write is an assignment
to `x.field`, to an entry of it or its deletion, where x is not `self` and no class of the file has such a field.
"""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping
from functools import cache
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]

TORCH_S = frozenset({"data", "grad", "_parameters", "_buffers"})
"""Of torch's own objects: parameters and modules."""

ALLOWED: Mapping[tuple[str, str], str] = {
    ("systems/checkpoint/loading.py", "loop"): "a property with a setter: the position that was saved",
    ("systems/integrations/trainer.py", "backward"): "Accelerate's accelerator, which Trainer hands each loss to",
    ("systems/baselines/resident_state.py", "updates"): "counts of a checkpoint, parameter by parameter as they are read",
    ("systems/substrate/training_state.py", "updates"): "counts of a checkpoint, parameter by parameter as they are read",
    ("systems/recipe/step/optimizer_states.py", "updates"): "counts of a user's state dict, parameter by parameter",
    ("systems/recipe/step/optimizer_states.py", "state"): "torch's optimizer, which shows the user what the engine has",
    ("systems/recipe/model/parameter_watch.py", "_watched"): "a live parameter whose class is exchanged, as its identity stays",
    ("systems/substrate/hooks.py", "given"): "in every forward: what the hooks keep of a call, which is theirs",
    ("systems/substrate/step_ending.py", "updates"): "one statement that calls nothing: Note [When a step is done]",
    ("systems/substrate/step_ending.py", "begun"): "the same statement",
}
"""File and field to the reason."""


@cache
def trees() -> dict[str, ast.Module]:
    return {
        path.relative_to(ROOT).as_posix(): ast.parse(path.read_text(encoding="utf-8"))
        for path in sorted((ROOT / "systems").rglob("*.py"))
    }


def is_self(node: ast.expr) -> bool:
    return isinstance(node, ast.Name) and node.id in ("self", "cls")


def targets(node: ast.AST) -> Iterator[ast.expr]:
    """What a statement writes to, one by one."""
    found: list[ast.expr] = []
    if isinstance(node, ast.Assign | ast.Delete):
        found = list(node.targets)
    elif isinstance(node, ast.AugAssign | ast.AnnAssign):
        found = [node.target]
    elif isinstance(node, ast.withitem) and node.optional_vars is not None:
        found = [node.optional_vars]
    while found:
        target = found.pop()
        if isinstance(target, ast.Tuple | ast.List):
            found.extend(target.elts)
        else:
            yield target


def fields(tree: ast.Module) -> set[str]:
    """That the classes of a file have."""
    names: set[str] = set()
    for kind in (node for node in ast.walk(tree) if isinstance(node, ast.ClassDef)):
        for statement in kind.body:
            names.update(target.id for target in targets(statement) if isinstance(target, ast.Name))
        for node in ast.walk(kind):
            for target in targets(node):
                if isinstance(target, ast.Attribute) and is_self(target.value):
                    names.add(target.attr)
    return names


def foreign_writes(trees: Mapping[str, ast.Module]) -> Iterator[tuple[str, str, int]]:
    """File, field and line of each."""
    own = {path: fields(tree) for path, tree in trees.items()}
    ours = set().union(*own.values())
    for path, tree in trees.items():
        for node in ast.walk(tree):
            for target in targets(node):
                written = target.value if isinstance(target, ast.Subscript) else target
                if not isinstance(written, ast.Attribute) or is_self(written.value):
                    continue
                if written.attr in ours - own[path] - TORCH_S:
                    yield path, written.attr, written.lineno


def test_who_has_a_field_writes_it() -> None:
    found = [each for each in foreign_writes(trees()) if each[:2] not in ALLOWED]
    lines = [f"{path}:{line} writes .{name} of another file's object: give that a verb" for path, name, line in found]
    assert not lines, "\n".join(["", *lines])


def test_no_reason_outlives_what_it_excuses() -> None:
    written = {(path, name) for path, name, _ in foreign_writes(trees())}
    assert not ALLOWED.keys() - written


def test_a_foreign_write_is_seen() -> None:
    owner = ast.parse("class A:\n    b: int\n    def __init__(self) -> None:\n        self.c, self.d = 0, {}\n")
    its_own = "class B:\n    def f(self) -> None:\n        self.b = a.e\n"
    writer = ast.parse("a.b = 1\na.c += 1\na.d[2] = 3\ndel a.d[2]\nx, a.c = 1, 2\n" + its_own)
    assert sorted(line for _, _, line in foreign_writes({"owner": owner, "writer": writer})) == [2, 3, 4, 5]
