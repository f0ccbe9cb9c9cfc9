"""What a run, a search and a plan say, to a person on a terminal and to a program; where records go; what is never said."""

from __future__ import annotations

import io
import json
import os
import pty
import re
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from rich.console import Console

from harness import cli, launch, scale, store, summary
from harness.live import StepLine
from harness.output import Tolerant, json_asked, say_json
from harness.record import Record
from harness.spec import BadInputError, RunSpec
from tests.harness.conftest import make_record, make_spec
from tests.harness.processes import LIGHT, ROOT, START_S, command_line, dummy, environment

RUN = ("run", "--system", "dummy", "--model", "opt-tiny", "--device", "cpu")
MARKED = "[red]tag[/red] \x1b[31m=1+1"
FULL = {
    "resolved": {
        "device": "cpu", "device_label": "cpu-emulated", "parameters": 1255680, "tokens_per_step": 32, "timed_steps": 3,
    },
    "metrics": {
        "step_time_s": [0.2, 0.1, 0.4], "median_step_time_s": 0.2,
        "mean_step_time_s": 0.25, "tokens_per_s": 137.5, "loss": [6.0, None, 5.25],
    },
    "memory": {
        "device_peak_bytes": 5 << 20, "device_budget_bytes": 6 << 20, "host_peak_bytes": 1 << 30,
        "host_budget_bytes": 2 << 30, "disk_peak_bytes": 7 << 20,
    },
    "traffic": {"h2d_bytes": 3 << 20, "d2h_bytes": 0, "gather_bytes": None},
    "plan": {"predicted_step_time_s": 0.15},
    "doubts": [{"code": "step_time_spread", "seen": "0.1 to 0.4 s", "cause": "other load", "advice": "free the machine"}],
}  # fmt: skip


def shown(draw: Callable[[Console], None], *, terminal: bool = False) -> str:
    out = io.StringIO()
    draw(Console(file=out, width=160, force_terminal=terminal, highlight=False, emoji=False))
    return out.getvalue()


def on_terminal(*arguments: str, cwd: Path) -> tuple[int, str]:
    """Exit code and all that a run of the stand-in shows on a terminal that is its stdout and stderr."""
    ours, theirs = pty.openpty()
    env = environment(more={"PYTHONPATH": str(ROOT), "TERM": "xterm", "COLUMNS": "160"})
    process = subprocess.Popen(command_line(*arguments, light=True), cwd=cwd, env=env, stdout=theirs, stderr=theirs)
    os.close(theirs)
    told = b""
    while True:
        try:
            data = os.read(ours, 1 << 16)
        except OSError:  # as a terminal says that nobody writes any more
            break
        if not data:
            break
        told += data
    os.close(ours)
    return process.wait(timeout=START_S), told.decode()


# ---- one rule for JSON


def test_a_person_on_a_terminal_reads_a_summary_and_a_line_that_moves(tmp_path: Path) -> None:
    code, told = on_terminal(*dummy(tmp_path, options=("step_time_s=0.6",)), cwd=ROOT)
    assert code == 0, told
    assert "schema_version" not in told and "Traceback" not in told
    (kept,) = tmp_path.iterdir()
    assert "model" in told and "opt-tiny" in told and str(kept) in told
    assert re.search(r"step 4/4 .*s/step.* 0:00:00 left", told) and "\x1b[?25l" in told and told.count("\x1b[?25h")


def test_with_json_asked_for_a_terminal_gets_the_line_too(tmp_path: Path) -> None:
    code, told = on_terminal(*dummy(tmp_path, "--json"), cwd=ROOT)
    assert code == 0, told
    assert json.loads(told.splitlines()[-1])["status"] == "ok"


def test_a_pipe_gets_the_line_and_plain_progress(tmp_path: Path) -> None:
    command = command_line(*dummy(tmp_path), light=True)
    done = subprocess.run(command, cwd=ROOT, env=environment(), capture_output=True, text=True, timeout=START_S)
    assert json.loads(done.stdout)["status"] == "ok"
    assert "step 4/4  loss 1.0000" in done.stderr.splitlines()
    assert "\x1b" not in done.stderr


@pytest.fixture
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(Tolerant, "isatty", lambda self: True)


@pytest.mark.usefixtures("terminal")
@pytest.mark.parametrize("asked", [False, True])
@pytest.mark.parametrize("command", ["run", "plan", "compare", "max-scale", "max-batch"])
def test_the_rule_is_one_for_all_commands(
    command: str, asked: bool, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    numbers = iter(range(100))

    def made(spec: RunSpec, **_: Any) -> Record:
        return make_record(**FULL, run_id=f"run-{next(numbers)}").model_copy(update={"spec": spec})

    monkeypatch.setattr(cli, "launch", made)
    monkeypatch.setattr(scale, "likely", lambda *_: None)
    kept = ["--results", str(tmp_path)]
    given = {
        "run": [*RUN, *kept],
        "plan": ["plan", "--system", "resident", "--model", "opt-tiny", "--hardware", "h100-80g-x1"],
        "compare": ["compare", "--system", "dummy", "--system", "resident", "--repeat", "1", *RUN[3:], *kept],
        "max-scale": ["max-scale", *RUN[1:], "--most", "2", *kept],
        "max-batch": ["max-batch", *RUN[1:], "--most", "2", *kept],
    }[command]
    cli.main([*given, "--json"] if asked else given)
    out, err = capsys.readouterr()
    lines = out.splitlines()
    word = {"run": "ok", "compare": "mark: resident"}.get(command, "opt-tiny")
    if asked:
        assert len(lines) == 1 and json.loads(lines[0])
        assert word in err
    else:
        assert word in out and not any(line.startswith("{") for line in lines)


def test_profile_keeps_to_the_rule(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    from harness import profile

    monkeypatch.setattr(profile, "measure_host", lambda figures, *_: figures.put("host_memory_bytes", 5, "[counted]"))
    monkeypatch.setattr(profile.host, "rebind_s", lambda *_: 1e-6)
    assert cli.main(["profile", "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["host_memory_bytes"]["value"] == 5
    monkeypatch.setattr(Tolerant, "isatty", lambda self: True)
    assert cli.main(["profile", "--device", "cpu"]) == 0
    out = capsys.readouterr().out
    assert "host_memory_bytes" in out and "[counted]" in out and not out.startswith("{")


def test_a_record_that_cannot_be_kept_is_told_even_to_a_person(
    tmp_path: Path, terminal: None, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = make_record()
    store.write(record, tmp_path)
    monkeypatch.setattr(cli, "launch", lambda *_, **__: record)
    assert cli.main([*RUN, "--results", str(tmp_path)]) == 1
    assert json.loads(capsys.readouterr().out)["run_id"] == record.run_id


# ---- what is said


def test_a_summary_has_what_a_person_asks_for(tmp_path: Path) -> None:
    record = make_record(**FULL)
    told = shown(lambda console: summary.show(record, tmp_path / "x.json", console))
    for part in (
        "ok", "opt-tiny, 1,255,680 parameters", "dummy", "on cpu-emulated",
        "0.25 s (mean; median 0.2 s, 0.1 to 0.4 s in 3 timed steps)",
        "137.5 tokens/s", "6.0000 to 5.2500", "5MiB at most of 6MiB", "1GiB at most of 2GiB", "7MiB at most",
        "3MiB to the device, a step", "0.15 s a step by simulation", "step_time_spread: 0.1 to 0.4 s", "x.json",
    ):  # fmt: skip
        assert part in told, part


@pytest.mark.parametrize("status", ["refused", "oom", "diverged", "failed", "timeout", "unavailable", "interrupted"])
def test_a_summary_of_any_end_says_why_and_leaves_out_what_is_not_known(status: str, tmp_path: Path) -> None:
    reason = {"message": "why [not]", "advice": ["harness run --x"]}
    record = make_record(status=status, reason=reason, memory={"disk_peak_bytes": 0})
    told = shown(lambda console: summary.show(record, tmp_path / "x.json", console))
    assert f"{status}: why [not]" in told and "try" in told and "harness run --x" in told
    assert not {"step", "speed", "traffic", "plan", "disk"} & {line.split()[0] for line in told.splitlines()}


@given(tag=st.text(max_size=20))
@example(MARKED)
def test_no_tag_is_markup_or_obeyed(tag: str) -> None:
    record = make_record(spec=make_spec(tag=tag.encode("utf-8", "replace").decode()))
    told = shown(lambda console: summary.show(record, Path("x"), console))
    assert "\x1b" not in told
    if tag.isprintable() and tag.strip() == tag and tag and len(tag) == len(tag.encode()):
        assert tag in told


def test_nor_is_a_name_in_lists_and_searches(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    spec = make_spec(tag=MARKED, model="[red]m[/red]:f")
    store.write(make_record(spec=spec), tmp_path)
    assert cli.main(["ls", "runs", "--results", str(tmp_path)]) == 0
    assert "[red]tag[/red] \\x1b[31m=1+1" in capsys.readouterr().out
    trial = scale._trial(1, make_record(spec=spec))
    found = scale.Found(
        spec={}, searched="samples", largest=trial, smallest_too_large=None, bounded_by="most", failed=None, trials=[trial]
    )
    assert shown(lambda console: scale.show(found, console)).count("[red]m[/red]:f") == 2


class Clock:
    now = 0.0

    def __call__(self) -> float:
        return self.now


def test_the_line_that_moves_has_speed_and_time_left() -> None:
    clock, out = Clock(), io.StringIO()
    line = StepLine(Console(file=out, width=120, force_terminal=True, highlight=False, _environ={"TERM": "xterm"}), clock)
    line.tokens_per_step = 1000
    for done in (1, 2, 3):
        clock.now = 0.5 * done
        line.step(done, 123, 2.5)
    line.tell("a package [says] something")
    line.close()
    line.close()
    told = out.getvalue()
    assert "step 1/123  loss 2.5000" in told
    assert "step 3/123  loss 2.5000  0.5 s/step  2,000 tokens/s  0:01:00 left" in told
    assert "a package [says] something" in told


def test_where_no_line_moves_there_is_one_for_each_telling() -> None:
    out = io.StringIO()
    line = StepLine(Console(file=out, width=120, highlight=False), Clock())
    line.step(1, 2, None)
    line.step(2, 2, 2.5)
    line.close()
    assert out.getvalue().splitlines() == ["step 1/2", "step 2/2  loss 2.5000"]


def test_a_search_says_how_each_try_ended(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    def made(spec: RunSpec, **_: Any) -> Record:
        size = spec.batch_size or 0
        short = {"status": "oom", "reason": {"message": "no room", "tier": "device"}} if size > 2 else {}
        fields = {"resolved": {"parameters": 1255680}, "wall_s": 4.06, "run_id": f"run-{size}", **short}
        return make_record(**fields).model_copy(update={"spec": spec})

    monkeypatch.setattr(cli, "launch", made)
    monkeypatch.setattr(scale, "likely", lambda *_: None)
    assert cli.main(["max-batch", *RUN[1:], "--most", "8", "--results", str(tmp_path)]) == 0
    lines = [line for line in capsys.readouterr().err.splitlines() if line.startswith("try ") and "?" not in line]
    assert lines == [
        "try 1: opt-tiny with 1 sample: 1.256M parameters, trains, 4.1 s",
        "try 2: opt-tiny with 2 samples: 1.256M parameters, trains, 4.1 s",
        "try 3: opt-tiny with 4 samples: 1.256M parameters, oom, lacks device memory, 4.1 s",
        "try 4: opt-tiny with 3 samples: 1.256M parameters, oom, lacks device memory, 4.1 s",
    ]


def test_what_the_library_has_to_say_is_shown_while_the_run_goes_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "WORKER", LIGHT)
    notice = "notice=building adam.cpp [once]"
    told = shown(lambda console: _ok(launch.launch(make_spec(notice), console=console)))
    assert "building adam.cpp [once]" in told.splitlines()


def _ok(record: Record) -> None:
    assert record.status == "ok"


# ---- where records go


@pytest.mark.parametrize(
    ("flags", "resolved", "driver", "folder"),
    [
        (["--device", "cpu"], "cpu", True, "runs"),
        ([], "cpu", False, "runs"),
        ([], "cpu", True, "runs"),
        ([], "cuda", False, "results"),
        ([], "cuda", True, "results"),
        ([], None, True, "results"),
        ([], None, False, "runs"),
        (["--device", "cpu"], None, True, "runs"),
        (["--device", "cuda"], None, False, "runs"),
        (["--results", "mine"], "cuda", True, "mine"),
        (["--results", "mine"], "cpu", False, "mine"),
    ],
)
def test_records_of_an_emulated_device_are_trial_runs(
    flags: list[str],
    resolved: str | None,
    driver: bool,
    folder: str,
    tmp_path: Path,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(store, "DRIVER", tmp_path if driver else tmp_path / "none")
    monkeypatch.setattr(cli, "launch", lambda *_, **__: make_record(resolved={"device": resolved}))
    assert cli.main(["run", "--system", "dummy", "--model", "opt-tiny", *flags]) == 0
    assert [path.parent.name for path in tmp_path.glob("*/*.json")] == [folder]


def test_runs_are_looked_for_in_both_folders_unless_one_is_named(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    for folder, name in (("results", "20260101-kept"), ("runs", "20260102-trial")):
        store.write(make_record(run_id=name), Path(folder))
    assert cli.main(["ls", "runs"]) == 0
    out, err = capsys.readouterr()
    assert [line.split()[0] for line in out.splitlines()[1:]] == ["20260102-trial", "20260101-kept"]
    assert err.splitlines() == ["1 of 1 runs in results", "1 of 1 runs in runs"]
    assert cli.main(["ls", "runs", "--results", "runs"]) == 0
    assert "kept" not in capsys.readouterr().out
    assert cli.main(["compare", "--runs", "nope", "kept"]) == 2
    assert "(in results and runs; see harness ls runs)" in capsys.readouterr().err
    assert [record.run_id for record in store.find(store.folders_of(None), ["trial", "kept"])] == [
        "20260102-trial",
        "20260101-kept",
    ]


def test_trial_runs_are_ignored_by_git() -> None:
    assert "/runs/" in (ROOT / ".gitignore").read_text().splitlines()


@pytest.fixture
def five(tmp_path: Path) -> Path:
    for number, (system, model, status, tag, step_s, rate) in enumerate(
        [
            ("elixir", "opt-tiny", "ok", "a", 0.3, 30.0),
            ("elixir", "gpt-tiny", "oom", None, None, None),
            ("h3t", "opt-tiny", "ok", "b", 0.1, 10.0),
            ("dummy", "opt-tiny", "failed", "a", None, None),
            ("elixir", "opt-tiny", "ok", "b", 0.2, 20.0),
        ]
    ):
        spec = make_spec(tag=tag).model_copy(update={"system": system, "model": model})
        metrics = {"mean_step_time_s": step_s, "tokens_per_s": rate}
        store.write(make_record(run_id=f"run-{number}", spec=spec, status=status, metrics=metrics), tmp_path)
    return tmp_path


@pytest.mark.parametrize(
    ("flags", "numbers"),
    [
        ([], "43210"),
        (["--system", "elixir"], "410"),
        (["--model", "gpt-tiny"], "1"),
        (["--status", "ok", "--tag", "b"], "42"),
        (["--sort", "step"], "24031"[:3] + "31"),
        (["--sort", "tokens/s"], "04231"),
        (["--sort", "time", "--tag", "a"], "30"),
        (["--tag", "none such"], ""),
    ],
)
def test_runs_are_filtered_and_sorted(five: Path, flags: list[str], numbers: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls", "runs", "--results", str(five), *flags]) == 0
    out = capsys.readouterr().out
    assert "".join(line.split()[0].removeprefix("run-") for line in out.splitlines()[1:]) == numbers
    assert cli.main(["ls", "runs", "--results", str(five), *flags, "--json"]) == 0
    listed = json.loads(capsys.readouterr().out)
    assert "".join(each["run_id"].removeprefix("run-") for each in listed) == numbers
    assert all(Path(each["path"]).is_file() for each in listed)


# ---- help, and odd input


def commands() -> Iterator[list[str]]:
    yield []
    yield from ([name] for name in cli.COMMANDS)
    yield from (["ls", what] for what in ("systems", "models", "hardware", "figures", "runs"))


@pytest.mark.parametrize("command", list(commands()), ids=" ".join)
@pytest.mark.parametrize("word", ["--help", "-h"])
def test_every_command_has_help_with_an_example(
    command: list[str], word: str, capsys: pytest.CaptureFixture[str]
) -> None:
    try:
        code = cli.main([*command, word])
    except SystemExit as ended:
        code = ended.code if isinstance(ended.code, int) else 1
    out, err = capsys.readouterr()
    assert (code, err) == (0, "")
    assert len(re.findall(r"[Ee]xample: harness ", out)) == 1


WORDS = (
    "systems", "models", "hardware", "runs", "elixir", "opt-tiny", "h100-80g-x1", "--json", "--sort", "--status", "--tag",
    "--system", "--model", "--family", "--results", "ok", "time", "=", "--", "-", "",
    "--json=1", "--tag=x", "[red]", "\x1b[31m",
)  # fmt: skip
TEXT = st.text(st.characters(codec="utf-8", exclude_characters=":/."), max_size=8)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(arguments=st.lists(st.sampled_from(WORDS) | TEXT, max_size=5), command=st.sampled_from(["ls", "run", "plan", "tables"]))
@example(arguments=["systems", "--", "x"], command="ls")
@example(arguments=["hardware", "\x1b[31m"], command="ls")
@example(arguments=["systems", "\x85=\u2028"], command="ls")
def test_odd_input_is_a_line_and_no_traceback(
    arguments: list[str], command: str, tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    def refuse(*_: Any, **__: Any) -> Record:
        raise BadInputError("a process would be started")

    monkeypatch.chdir(tmp_path_factory.getbasetemp())
    monkeypatch.setattr(cli, "launch", refuse)
    err = io.StringIO()
    monkeypatch.setattr(sys, "stderr", err)
    monkeypatch.setattr(sys, "stdout", io.StringIO())
    code = cli.main([command, *arguments])
    assert code in (0, 2)
    complaints = [line for line in err.getvalue().splitlines() if line.startswith("harness: ")]
    assert "\x1b" not in err.getvalue()
    assert code == 0 or len(complaints) == 1


def test_json_asked_for_holds_within_alone(capsys: pytest.CaptureFixture[str], terminal: None) -> None:
    with json_asked(True):
        say_json("1")
    say_json("2")
    assert capsys.readouterr().out == "1\n"


def test_one_run_is_told_by_a_part_of_its_id(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As at its end; with --json its record. The page on the harness says of every list that a name tells all of one."""
    for run_id in ("20261128T101530.123456Z-dummy-opt-tiny-9f3a61", "20261128T101530.123456Z-dummy-opt-tiny-77aa77"):
        store.write(make_record(run_id=run_id, **FULL), tmp_path)
    asked = ["ls", "runs", "--results", str(tmp_path)]
    assert cli.main([*asked, "9f3a61"]) == 0
    told = capsys.readouterr().out
    for part in ("20261128T101530.123456Z-dummy-opt-tiny-9f3a61", "ok", "137.5 tokens/s", "step_time_spread", "9f3a61.json"):
        assert part in told, part
    assert cli.main([*asked, "9f3a61", "--json"]) == 0
    assert json.loads(capsys.readouterr().out)["metrics"]["tokens_per_s"] == 137.5
    unlike = {"opt-tiny": "fits 2 runs", "none": "is not there", "9f3a61 --tag x": "--tag is of a list"}
    for more, said in ((words.split(), said) for words, said in unlike.items()):
        assert cli.main([*asked, *more]) == 2
        assert said in capsys.readouterr().err


def test_one_figure_is_told_in_words(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["ls", "figures", "staleness"]) == 0
    assert len(capsys.readouterr().out.splitlines()) == 2
    assert cli.main(["ls", "figures", "stalenes"]) == 2
    assert "did you mean staleness?" in capsys.readouterr().err
