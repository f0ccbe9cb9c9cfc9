"""Odd ways to be called: closed streams, bytes that are no UTF-8, names too long, a results folder that goes away."""

from __future__ import annotations

import json
import os
import shlex
import shutil
import subprocess
from pathlib import Path
from typing import Any

import pytest

from harness import cli, store
from harness.output import Tolerant
from tests.harness.conftest import make_record
from tests.harness.processes import ROOT, START_S, command_line, dummy, environment

LONG = "n" * 300
RUN = ("run", "--system", "dummy", "--model", "opt-tiny")


@pytest.mark.parametrize("closed", ["<&-", ">&-", "2>&-", "<&- >&- 2>&-"])
def test_closed_streams_fail_no_run(tmp_path: Path, closed: str) -> None:
    script = f"{shlex.join(command_line(*dummy(tmp_path), light=True))} {closed}"
    done = subprocess.run(["bash", "-c", script], cwd=ROOT, env=environment(), timeout=START_S, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
    assert [record.status for record in store.read_all(tmp_path)[0]] == ["ok"]
    if ">&-" not in closed.split("2>&-")[0]:
        assert json.loads(done.stdout.splitlines()[-1])["status"] == "ok"


@pytest.mark.parametrize(
    "arguments",
    [
        (*RUN, "--tag", os.fsdecode(b"a\xff")),
        (*RUN, "--results", os.fsdecode(b"a\xff")),
        ("run", "--system", "dummy", "--model", os.fsdecode(b"\xff")),
        ("ls", os.fsdecode(b"\xff")),
        (*RUN, "--results", f"/tmp/{LONG}"),
        (*RUN, "--trace", f"/tmp/{LONG}.json"),
        ("run", "--system", "elixir", "--model", "opt-tiny", "--disk", f"/tmp/{LONG}"),
        ("max-batch", "--system", "elixir", "--model", "opt-tiny", "--disk", f"/tmp/{LONG}"),
        ("ls", "runs", "--results", f"/tmp/{LONG}"),
        ("compare", "--runs", "a", "b", "--results", f"/tmp/{LONG}"),
        ("tables", "--results", f"/tmp/{LONG}"),
        ("tables", "--readme", f"/tmp/{LONG}"),
        ("ledger", "--results", f"/tmp/{LONG}"),
        ("check", "--results", f"/tmp/{LONG}"),
        ("check", "--docs", f"/tmp/{LONG}"),
        ("figure", "staleness", "--results", f"/tmp/{LONG}"),
        ("sweep", "10-h200-speed", "--group", "opt-1.3b", "--archive", f"/tmp/{LONG}.tar.gz"),
        ("profile", "--device", "cpu", "--out", f"/tmp/{LONG}.json"),
        ("profile", "--device", "cpu", "--disk", f"/tmp/{LONG}"),
    ],
)
def test_arguments_that_cannot_be_are_one_line(
    arguments: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(ROOT)
    monkeypatch.setattr(cli, "launch", lambda *_, **__: pytest.fail("a process was started"))
    if "--trace" in arguments:
        arguments = (*arguments, "--results", str(tmp_path))
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert err[:-1].isprintable()


@pytest.mark.parametrize(
    "command", [RUN, ("compare", *RUN[1:], "--system", "resident"), ("max-scale", *RUN[1:]), ("max-batch", *RUN[1:])]
)
def test_one_process_of_several_is_refused_before_anything_is_made(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """As torchrun starts them."""
    monkeypatch.setattr(cli, "launch", lambda *_, **__: pytest.fail("a process was started"))
    monkeypatch.setenv("WORLD_SIZE", "2")
    assert cli.main([*command, "--results", str(tmp_path / "results")]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n"), list(tmp_path.iterdir())) == ("", 1, [])
    assert "WORLD_SIZE is 2" in err and "torchrun" in err


def test_a_results_folder_that_is_gone_is_made_again(tmp_path: Path) -> None:
    folder = tmp_path / "a" / "results"
    store.prepare(folder)
    shutil.rmtree(tmp_path / "a")
    assert store.write(make_record(), folder).exists()


@pytest.mark.parametrize("command", [RUN, ("max-scale", "--system", "dummy", "--model", "opt-tiny")])
def test_a_record_that_finds_no_folder_is_printed(
    command: tuple[str, ...], tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "results"

    def launch(*_: Any, **__: Any) -> Any:
        folder.rmdir()
        folder.write_text("a file is in its place now")
        return make_record(run_id="measured")

    monkeypatch.setattr(cli, "launch", launch)
    assert cli.main([*command, "--results", str(folder)]) == 1
    out, err = capsys.readouterr()
    assert "measured" in [json.loads(line).get("run_id") for line in out.splitlines()]
    assert f"--results {folder}" in err


def test_a_letter_that_a_stream_cannot_take_does_not_end_it(tmp_path: Path) -> None:
    with open(tmp_path / "out", "w", encoding="ascii") as file:
        stream = Tolerant(file)
        stream.write("é\n")
        stream.write("next\n")
    assert (tmp_path / "out").read_text() == "\\xe9\nnext\n"
