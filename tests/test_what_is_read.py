"""Nothing that is read can run: no pickle, no code of a model's folder, no text that Python or a shell would obey."""

from __future__ import annotations

import ast
from collections.abc import Iterator, Mapping

import pytest

from tests.test_house import trees

PACKAGES = ("systems/", "harness/", "models/", "paper_figures/")
READ_PICKLES = frozenset({"dill", "cloudpickle", "joblib", "shelve", "marshal"})  # and run what these hold
RUN = frozenset(
    {
        "eval", "exec", "os.system", "os.popen", "pickle.load", "pickle.loads", "pickle.Unpickler", "pandas.read_pickle",
        "yaml.load", "yaml.unsafe_load", "yaml.full_load", "torch.hub.load", "torch.serialization.add_safe_globals",
        "torch.jit.load", "torch.export.load", "torch.distributed.broadcast_object_list",
        "torch.distributed.all_gather_object", "torch.distributed.gather_object", "torch.distributed.scatter_object_list",
        "torch.distributed.recv_object_list",
    }
)  # fmt: skip
# What must stand in a call by keyword, as a constant; and what, where it stands there, must be that constant.
REQUIRED: Mapping[str, tuple[str, object]] = {
    "torch.load": ("weights_only", True),
    "from_pretrained": ("trust_remote_code", False),
}
NEVER_ELSE: Mapping[str, object] = {
    "weights_only": True,
    "trust_remote_code": False,
    "allow_pickle": False,
    "shell": False,
}
# Where one is used all the same, and why.
ARGUED: Mapping[str, str] = {
    "systems/ranks/ranks.py: pickle.loads": (
        "what ranks of one run tell each other, through a group that their launcher made for them: each of them runs the same "
        "program, and who can write there can write its weights"
    ),
}


def full_names(tree: ast.Module) -> dict[str, str]:
    """What a name of this file stands for: `np` for numpy, `loads` for pickle.loads."""
    found: dict[str, str] = {}
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            for each in node.names:
                name = each.asname or each.name.partition(".")[0]
                found[name] = each.name if each.asname else name
        elif isinstance(node, ast.ImportFrom):
            found |= {each.asname or each.name: f"{node.module}.{each.name}" for each in node.names}
    return found


def dangers(tree: ast.Module) -> Iterator[tuple[int, str]]:
    """Line and name of whatever could run what it reads."""
    names = full_names(tree)
    for node in ast.walk(tree):
        if isinstance(node, ast.Import | ast.ImportFrom):
            modules = [each.name for each in node.names] if isinstance(node, ast.Import) else [node.module or ""]
            yield from ((node.lineno, each) for each in modules if each.partition(".")[0] in READ_PICKLES)
        if isinstance(node, ast.ImportFrom | ast.Name | ast.Attribute):
            yield from ((node.lineno, each) for each in _named(node, names) if each in RUN)
        if isinstance(node, ast.Call):
            yield from ((node.lineno, each) for each in _calls(node, names))


def _named(node: ast.ImportFrom | ast.Name | ast.Attribute, names: Mapping[str, str]) -> Iterator[str]:
    if isinstance(node, ast.ImportFrom):
        yield from (f"{node.module}.{each.name}" for each in node.names)
        return
    first, dot, rest = ast.unparse(node).partition(".")
    yield f"{names.get(first, first)}{dot}{rest}"


def _calls(node: ast.Call, names: Mapping[str, str]) -> Iterator[str]:
    given = {each.arg for each in node.keywords}
    called = next(_named(node.func, names)) if isinstance(node.func, ast.Name | ast.Attribute) else ""
    for name, (keyword, value) in REQUIRED.items():
        if (called == name or called.endswith(f".{name}")) and keyword not in given:
            yield f"{name} without {keyword}={value}"
    for each in node.keywords:
        if each.arg is None or each.arg not in NEVER_ELSE:
            continue
        if not (isinstance(each.value, ast.Constant) and each.value.value is NEVER_ELSE[each.arg]):
            yield ast.unparse(each)


def test_nothing_that_is_read_can_run() -> None:
    found = {
        f"{path}: {name}": line
        for path, tree in trees().items()
        if path.startswith(PACKAGES)
        for line, name in dangers(tree)
    }
    assert {place: line for place, line in found.items() if place not in ARGUED} == {}
    assert ARGUED.keys() <= found.keys(), "no reason outlives what it excuses"


@pytest.mark.parametrize(
    "program",
    [
        "import torch\ntorch.load(path)",
        "import torch\ntorch.load(path, weights_only=False)",
        "import torch\ntorch.load(path, weights_only=chosen)",
        "from torch import load\nload(path)",
        "import pickle\npickle.load(file)",
        "import pickle as p\np.loads(text)",
        "from pickle import loads",
        "from pickle import Unpickler as Reader\nReader(file)",
        "read = __import__\nimport pickle\nread = pickle.loads",
        "import numpy as np\nnp.load(path, allow_pickle=True)",
        "import joblib",
        "from shelve import open as get",
        "import pandas as pd\npd.read_pickle(path)",
        "import yaml\nyaml.load(text, Loader=yaml.Loader)",
        "import torch.distributed as dist\ndist.all_gather_object(found, mine)",
        "AutoConfig.from_pretrained(folder)",
        "AutoConfig.from_pretrained(folder, trust_remote_code=True)",
        "AutoModel.from_config(config, trust_remote_code=asked)",
        "subprocess.run(command, shell=True)",
        "import os\nos.system(command)",
        "eval(text)",
    ],
)
def test_what_could_run_is_seen(program: str) -> None:
    assert list(dangers(ast.parse(program)))


@pytest.mark.parametrize(
    "program",
    [
        "import torch\ntorch.load(path, weights_only=True, mmap=True)",
        "import pickle\nkept = pickle.dumps(value)\ntry: ...\nexcept pickle.UnpicklingError: ...",
        "import numpy as np\nnp.load(path)\nnp.load(path, allow_pickle=False)",
        "AutoConfig.from_pretrained(folder, trust_remote_code=False)",
        "model.eval()\njson.loads(text)\nself.load(path)",
    ],
)
def test_what_cannot_run_is_let_through(program: str) -> None:
    assert not list(dangers(ast.parse(program)))
