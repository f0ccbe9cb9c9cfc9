"""Weights & Biases: what the package does, in its own process, changes nothing of the run it is told about.

A module of that name stands in for the package.
"""

from __future__ import annotations

import ast
import importlib.util
import json
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest

from harness import cli, store, wandb_log
from harness.record import Record
from tests.harness.conftest import make_record
from tests.harness.processes import ROOT, wait_for

GOOD = ("run", "--system", "dummy", "--model", "opt-tiny", "--wandb", "online")
TAKES = """
    import json, os

    class Run:
        summary = {}
        def __init__(self, **started):
            self.told = {"started": started, "rows": []}
        def log(self, row, step):
            self.told["rows"].append([step, row])
        def __enter__(self):
            return self
        def __exit__(self, *_):
            with open(os.environ["TOLD"], "a") as file:
                file.write(json.dumps(self.told | {"summary": self.summary}) + "\\n")

    init = Run
"""
ENDS = {
    "without a key": "class UsageError(Exception): pass\ndef init(**_): raise UsageError('No API key\\nconfigured')",
    "in its own words": "import sys\ndef init(**_): sys.exit('no network')",
    "at once": "import os\ndef init(**_): print('a last word', flush=True); os._exit(7)",
    "at its import": "raise ImportError('half of it is missing')",
    "too late": "import time\ndef init(**_): time.sleep(60)",
}
SAID = {
    "without a key": "UsageError: No API key configured",
    "in its own words": "SystemExit: no network",
    "at once": "a last word",
    "at its import": "ImportError: half of it is missing",
    "too late": "no answer within 0.5 s",
}


@pytest.fixture
def package(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Any:
    """Puts a package of that name, with this program, in the place of the real one. Gives what it was told, a line a run."""
    folder, told = tmp_path / "packages", tmp_path / "told"
    folder.mkdir()
    monkeypatch.setenv("PYTHONPATH", os.pathsep.join([str(ROOT), str(folder), os.environ.get("PYTHONPATH", "")]))
    monkeypatch.setenv("TOLD", str(told))
    monkeypatch.syspath_prepend(str(folder))

    def put(program: str) -> Path:
        (folder / "wandb.py").write_text(textwrap.dedent(program))
        return told

    return put


def launches(monkeypatch: pytest.MonkeyPatch, **fields: Any) -> None:
    numbers = iter(range(100))

    def launch(spec: Any, **_: Any) -> Record:
        return make_record(run_id=f"run-{next(numbers)}", spec=spec, **fields)

    monkeypatch.setattr(cli, "launch", launch)


def test_a_kept_record_is_logged(package: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    told = package(TAKES)
    launches(monkeypatch, metrics={"loss": [2.0, None, 1.0], "tokens_per_s": 5.0, "eval_step": [2], "eval_loss": [1.5]})
    assert cli.main([*GOOD, "--results", str(tmp_path / "results")]) == 0
    (line,) = told.read_text().splitlines()
    made = json.loads(line)
    assert made["rows"] == [[1, {"loss": 2.0}], [2, {"eval_loss": 1.5}], [3, {"loss": 1.0}]]
    assert (made["summary"]["tokens_per_s"], made["summary"]["status"]) == (5.0, "ok")
    assert (made["started"]["mode"], made["started"]["name"]) == ("online", "run-0")


LEAVES = """
    import os, subprocess

    left = subprocess.Popen(["sleep", "600"])
    with open(os.environ["TOLD"], "w") as file:
        file.write(f"{left.pid} {sorted(os.listdir(os.environ['KEPT']))}")

    def init(**_):
        raise RuntimeError("no network")
"""


def test_nothing_of_it_is_beside_the_next_run(package: Any, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It is told of a record that is kept, so after the run; what it started is ended when the command goes on."""
    told = package(LEAVES)
    launches(monkeypatch)
    monkeypatch.setenv("KEPT", str(tmp_path / "results"))
    assert cli.main([*GOOD, "--results", str(tmp_path / "results")]) == 0
    pid, _, there = told.read_text().partition(" ")
    assert there == "['run-0.json']"
    assert wait_for(lambda: not alive(int(pid)), 5.0)


def alive(pid: int) -> bool:
    """Not a zombie that nobody has waited for."""
    try:
        return "\nState:\tZ" not in Path(f"/proc/{pid}/status").read_text()
    except (FileNotFoundError, ProcessLookupError):
        return False


def exists(name: str) -> bool:
    """A module of that name, and no name in one."""
    try:
        return importlib.util.find_spec(name) is not None
    except ModuleNotFoundError:
        return False


def test_the_process_that_trains_knows_of_no_tracker() -> None:
    """What a worker imports, all the way down, has no import of the tracker in it."""
    seen, waiting = set[str](), ["harness.worker", "harness.running", "harness.measure"]
    while waiting:
        name = waiting.pop()
        spec = importlib.util.find_spec(name)
        if name in seen or spec is None or spec.origin is None or not spec.origin.endswith(".py"):
            continue
        seen.add(name)
        for node in ast.walk(ast.parse(Path(spec.origin).read_text())):
            found = [each.name for each in node.names] if isinstance(node, ast.Import) else []
            if isinstance(node, ast.ImportFrom) and node.module:
                found = [node.module, *(f"{node.module}.{each.name}" for each in node.names)]
            waiting += [each for each in found if each.startswith("harness.") and exists(each)]
    assert {"harness.running", "harness.measure", "harness.derive"} <= seen
    assert not any("wandb" in name for name in seen)


def test_the_curves_are_of_every_step_and_of_its_throughput() -> None:
    record = make_record(
        metrics={"loss": [2.0, 1.0]}, samples={"step_time_s": [0.5, 0.25]}, resolved={"tokens_per_step": 32, "steps_before": 0}
    )
    assert [row["tokens_per_s"] for row in wandb_log._curves(record)] == [64.0, 128.0]


@pytest.mark.parametrize("end", ENDS)
def test_one_that_fails_is_told_once_and_ends_nothing(
    package: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, end: str
) -> None:
    package(ENDS[end])
    if end == "too late":
        monkeypatch.setattr(wandb_log, "WAIT_S", 0.5)
    launches(monkeypatch)
    assert cli.main([*GOOD, "--repeat", "3", "--results", str(tmp_path / "results")]) == 0
    out, err = capsys.readouterr()
    assert [json.loads(line)["run_id"] for line in out.splitlines()] == ["run-0", "run-1", "run-2"]
    warned = [line for line in err.splitlines() if "--wandb" in line]
    assert len(warned) == 1
    assert SAID[end] in warned[0]
    assert "Traceback" not in err
    assert len(store.read_all(tmp_path / "results")[0]) == 3


def test_it_ends_no_comparison(
    package: Any, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    package(ENDS["at once"])
    launches(monkeypatch)
    pair = ("compare", "--system", "dummy", "--system", "resident", "--model", "opt-tiny", "--wandb", "online")
    assert cli.main([*pair, "--results", str(tmp_path / "results")]) == 0
    out, err = capsys.readouterr()
    (line,) = out.splitlines()
    assert [row["n"] for row in json.loads(line)["rows"]] == [3, 3]
    assert err.count("--wandb") == 1
