"""Weights & Biases: what the package does, in its own process, changes nothing of the run it is told about.

A module of that name stands in for the package.
"""

from __future__ import annotations

import json
import os
import textwrap
from pathlib import Path
from typing import Any

import pytest

from harness import cli, store, wandb_log
from harness.record import Record
from tests.harness.conftest import make_record
from tests.harness.processes import ROOT

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
