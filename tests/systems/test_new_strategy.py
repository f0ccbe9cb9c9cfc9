"""A file in systems/strategies is all that a new strategy takes: ls, plan, run and the tests of this folder find it."""

from __future__ import annotations

import json
import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).resolve().parents[2]
COPIED = ("systems", "models", "harness", "paper_figures", "tests")
STRATEGY = '''"""A strategy that a test adds."""

from typing import ClassVar

from systems.strategies.elixir.strategy import Elixir


class Newcomer(Elixir):
    name: ClassVar[str] = "newcomer"
    summary: ClassVar[str] = "as a test wrote it"


STRATEGY = Newcomer
'''
BROKEN = {
    "cut-short": "STRATEGY = (\n",
    "lacking": "import no_such_package\nSTRATEGY = None\n",
    "leaving": "STRATEGY = exit(3)\n",
}
TRAINED = ("--model", "opt-tiny", "--device", "cpu", "--device-memory", "6MiB", "--steps", "3", "--warmup", "1")
PLANNED = ("--model", "opt-tiny", "--hardware", "h100-80g-x1", "--device-memory", "6MiB")
LEAST = 120  # tests of a new strategy
INHERITED = [f"tests/systems/test_{name}.py" for name in ("memory", "numerics", "poison")]

pytestmark = [pytest.mark.slow, pytest.mark.timeout(900)]


class Tree:
    """A copy of the sources, to which files are added."""

    def __init__(self, root: Path) -> None:
        self.root = root
        for each in COPIED:
            shutil.copytree(ROOT / each, root / each, ignore=shutil.ignore_patterns("__pycache__"))
        for name in ("pyproject.toml", "README.md"):
            shutil.copy(ROOT / name, root)

    def add(self, file: str, text: str) -> None:
        path = self.root / "systems" / "strategies" / file
        path.parent.mkdir(exist_ok=True)
        path.write_text(text)

    def run(self, module: str, *arguments: str) -> subprocess.CompletedProcess[str]:
        told = {**os.environ, "PYTHONPATH": str(self.root), "OMP_NUM_THREADS": "1"}
        command = [sys.executable, "-m", module, *arguments]
        return subprocess.run(command, cwd=self.root, env=told, capture_output=True, text=True, timeout=600)

    def listed(self) -> dict[str, str]:
        lines = self.run("harness", "ls", "systems").stdout.splitlines()
        return {line.split()[0]: " ".join(line.split()[1:]) for line in lines}

    def trains(self, system: str) -> bool:
        ran = self.run("harness", "run", "--system", system, *TRAINED, "--results", str(self.root / "results"))
        return ran.returncode == 0 and json.loads(ran.stdout.splitlines()[-1])["status"] == "ok"


def test_a_copy_of_the_template_passes_what_it_inherits(tmp_path: Path) -> None:
    """It updates everything on the host, as no strategy of an own folder does at each of these budgets."""
    tree = Tree(tmp_path / "tree")
    tree.add("streamed.py", (ROOT / "tests" / "strategies" / "template_strategy.py").read_text())
    passed = tree.run("pytest", "-q", "-p", "no:cacheprovider", "-k", "streamed", *INHERITED)
    assert passed.returncode == 0 and int(passed.stdout.split(" passed")[0].split()[-1]) >= 10, passed.stdout[-2000:]


@pytest.mark.parametrize("file", ["newcomer.py", "newcomer/__init__.py"], ids=["file", "package"])
def test_one_file_is_found_by_ls_plan_run_and_the_tests(file: str, tmp_path: Path) -> None:
    tree = Tree(tmp_path / "tree")
    tree.add(file, STRATEGY)
    assert tree.listed()["newcomer"] == "as a test wrote it"
    planned = tree.run("harness", "plan", "--system", "newcomer", *PLANNED)
    assert planned.returncode == 0 and json.loads(planned.stdout.splitlines()[-1])["system"] == "newcomer"
    assert tree.trains("newcomer")
    collected = tree.run("pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/systems")
    mine = [line for line in collected.stdout.splitlines() if line.startswith("tests/systems/") and "newcomer" in line]
    assert collected.returncode == 0 and len(mine) >= LEAST, collected.stdout[-2000:]
    files = {line.partition("::")[0] for line in mine}
    assert len(files) >= 20, sorted(files)
    passed = tree.run("pytest", "-q", "-p", "no:cacheprovider", "-k", "newcomer", "tests/systems/test_numerics.py")
    assert passed.returncode == 0, passed.stdout[-2000:]


def test_a_broken_file_stops_nothing_but_itself(tmp_path: Path) -> None:
    tree = Tree(tmp_path / "tree")
    before = tree.listed()
    for name, text in BROKEN.items():
        tree.add(f"{name.replace('-', '_')}.py", text)
    listed = tree.listed()
    assert {name: said for name, said in listed.items() if name not in BROKEN} == before
    for name in BROKEN:
        assert listed[name].startswith("unavailable: ")
        ran = tree.run("harness", "run", "--system", name, *TRAINED, "--results", str(tree.root / "results"))
        assert ran.returncode not in (0, 3) and "Traceback" not in ran.stderr
        assert [line for line in ran.stderr.splitlines() if f"{name} is unavailable: " in line], ran.stderr
        planned = tree.run("harness", "plan", "--system", name, *PLANNED)
        assert planned.returncode == 2 and len(planned.stderr.splitlines()) == 1
    assert tree.trains("elixir")
    collected = tree.run("pytest", "--collect-only", "-q", "-p", "no:cacheprovider", "tests/systems")
    assert collected.returncode == 0 and "elixir" in collected.stdout
