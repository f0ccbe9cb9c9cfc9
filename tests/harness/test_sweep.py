"""Sweeps: whose turn it is, what counts as done, and that a sweep which is killed is gone on with."""

from __future__ import annotations

import errno
import json
import os
import signal
import subprocess
import sys
import tarfile
import time
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import cli, store, sweep
from harness.cells import TableCell
from harness.output import progress_console
from harness.record import Record
from harness.run_times import START_S
from harness.spec import BadInputError, RunSpec
from harness.sweep import Sweep, SweepSpec, table_of
from harness.tables import FOLDER
from tests.harness.conftest import make_record

ROOT = Path(__file__).resolve().parents[2]
DEVICE, HERE, ELSEWHERE = "a device", "this boot", "another boot"
TABLE = """
title = "A table"
hardware = "a device"
processes = 3
work = { model = "opt-tiny", batch_size = 2, seq_len = 16 }

[[groups]]
title = "first"
reference = "resident"
rows = [{ system = "resident" }, { system = "elixir", device_memory = "1GiB" }, { system = "dummy", processes = 1 }]

[[groups]]
title = "second"
reference = "resident"
work = { recompute = "full" }
grid = { accumulate = [1, 2], clip = [0.0, 1.0] }
rows = [{ system = "resident" }]
"""


class Device:
    """What runs come to. source: of the code. statuses: by system, else ok."""

    def __init__(self, boot: str | None = HERE, source: str | None = None, **statuses: str) -> None:
        self.boot, self.source, self.statuses, self.ran = boot, source, statuses, list[tuple[str, int]]()

    def execute(self, spec: RunSpec, replicate: int) -> Record:
        self.ran.append((spec.system, replicate))
        status = self.statuses.get(spec.system, "ok")
        known = {"device_label": DEVICE, "batch_size": 2, "seq_len": 16} if status not in ("refused", "failed") else {}
        return self.record(spec, status=status, resolved=known)

    def record(self, spec: RunSpec, **given: Any) -> Record:
        number = len(self.ran)
        environment = {"hardware": {"boot_id": self.boot}, "code": {"source_sha256": self.source}}
        return make_record(run_id=f"2026-{self.boot}-{number:03}", spec=spec, wall_s=10.0, environment=environment, **given)


def done(folder: Path, text: str = TABLE, **asked: Any) -> Sweep:
    (folder / "t.toml").write_text(text)
    return Sweep(table_of(SweepSpec(table=str(folder / "t.toml"), **asked)), [], HERE)


def run(found: Sweep, device: Device, **given: Any) -> str | None:
    how: dict[str, Any] = {"minutes": None, "foreseen": lambda specs: {}, "stopped": lambda: False, "keep": lambda *_: True}
    how["execute"] = device.execute
    return sweep.sweep(found, results="r", console=progress_console(), **(how | given))


def first(found: Sweep) -> list[TableCell]:
    return list(found.table.groups[0].cells)


VARIED = ('host_memory = ["1GiB", "2GiB"]', "seed = [1, 2]", "eval_every = [2, 3]", "lr = [1e-3, 1e-4]", "steps = [3, 4]")


@pytest.mark.parametrize("grid", VARIED, ids=lambda grid: grid.split()[0])
def test_a_flag_that_a_grid_varies_makes_other_cells(tmp_path: Path, grid: str) -> None:
    found, device = done(tmp_path, TABLE.replace("accumulate = [1, 2], clip = [0.0, 1.0]", grid), group="second"), Device()
    assert run(found, device) is None
    assert len(device.ran) == 2 * 3


SPELLED = """
[[groups]]
title = "first"
reference = "h3t"
rows = [{ system = "h3t" }, { system = "h3t", option = ["nonfinite=stop", "run_ahead=true"] }]

[[groups]]
title = "second"
reference = "h3t:solver=best"
rows = [
    { system = "h3t", option = ["solver=best"] },
    { system = "h3t", option = [] },
    { system = "h3t", option = ["nonfinite=stop"] },
    { system = "h3t", option = ["no_such=1"] },
]
"""


def test_a_cell_that_is_spelled_otherwise_elsewhere_is_counted_once(tmp_path: Path) -> None:
    """A run belongs to cells by the options in force, so what is missing is counted by them too."""
    found, device = done(tmp_path, TABLE[: TABLE.index("[[groups]]")] + SPELLED), Device()
    assert found.missing == 3 * 3
    assert run(found, device) is None and found.missing == 0
    assert len(device.ran) == 3 * 3


def test_systems_take_turns_and_each_cell_gets_what_it_wants(tmp_path: Path) -> None:
    found, device = done(tmp_path), Device()
    assert found.missing == 3 + 3 + 1 + 4 * 3
    assert run(found, device) is None and found.missing == 0
    turns = ["resident", "elixir", "dummy", "resident", "elixir", "resident", "elixir"]
    assert [system for system, _ in device.ran] == [*turns, *["resident"] * 12]
    assert [number for _, number in device.ran[:7]] == [0, 0, 0, 1, 1, 2, 2]
    titles = [group.title for group in found.table.groups]
    assert titles == ["first", *(f"second, --accumulate {a}, --clip {c}" for a in (1, 2) for c in (0.0, 1.0))]


@pytest.mark.parametrize("after", range(1, 8))
def test_what_is_there_is_not_run_again(after: int, tmp_path: Path) -> None:
    """Wherever it was stopped."""
    found, device = done(tmp_path, group="first"), Device()
    assert run(found, device, stopped=lambda: len(device.ran) == after) == ("it was stopped" if after < 8 else None)
    kept = found.records + ([device.record(found.made[0].spec, status="interrupted")] if found.made else [])
    again, rest = Sweep(found.table, kept, HERE), Device()
    assert run(again, rest) is None
    assert len(found.made) + len(rest.ran) == 7
    assert Counter(record.spec.system for record in again.records if record.status == "ok") == {
        "resident": 3,
        "elixir": 3,
        "dummy": 1,
    }


@pytest.mark.parametrize(("status", "runs"), [("refused", 1), ("unavailable", 1), ("failed", 3), ("oom", 3), ("diverged", 3)])
def test_what_ends_badly_is_a_cell_too(status: str, runs: int, tmp_path: Path) -> None:
    """A refusal comes again, other ends need not. What ended before it knew its sizes has those that it was asked for."""
    found, device = done(tmp_path, group="first"), Device(elixir=status)
    assert run(found, device) is None and found.missing == 0
    assert sum(system == "elixir" for system, _ in device.ran) == runs
    assert {record.status for record in found.runs(first(found)[1])} == {status}
    known = [record.resolved for record in found.records]
    assert all((each.device_label, each.batch_size, each.seq_len) == (DEVICE, 2, 16) for each in known)


def test_what_was_unavailable_is_asked_again_by_the_next_call(tmp_path: Path) -> None:
    """It may be installed by then. A refusal stays one."""
    for status, runs in (("unavailable", 3), ("refused", 0)):
        found = done(tmp_path, group="first")
        run(found, Device(elixir=status))
        again, device = Sweep(found.table, found.records, HERE), Device()
        assert run(again, device) is None and again.missing == 0
        assert device.ran == [("elixir", number) for number in range(runs)]


def test_a_run_that_was_interrupted_puts_none_aside(tmp_path: Path) -> None:
    """Though it is the last, and of other code than those that ended."""
    found = done(tmp_path, group="first")
    assert run(found, Device(source="0" * 64)) is None
    for status, missing in (("interrupted", 0), ("ok", 2)):
        last = Device("until later", "1" * 64, resident=status).execute(first(found)[0].spec, 0)
        assert Sweep(found.table, [*found.records, last], HERE).missing == missing


def test_a_record_of_a_clock_that_was_ahead_is_told_and_not_run_against_for_ever(tmp_path: Path) -> None:
    found = done(tmp_path, group="first")
    ahead = Device("zz of next year", "1" * 64).execute(first(found)[0].spec, 0)
    device = Device(source="0" * 64)
    told = run(Sweep(found.table, [ahead], HERE), device)
    assert told is not None and ahead.run_id in told and "move that record away" in told
    assert [system for system, _ in device.ran].count("resident") == 1


class Forecasts:
    """Of elixir alone a refusal. together: how many specs are answered at once."""

    def __init__(self, together: int) -> None:
        self.together, self.asked = together, list[list[str]]()

    def __call__(self, specs: Sequence[RunSpec]) -> dict[RunSpec, str | None]:
        answered = specs[: self.together]
        self.asked.append([spec.system for spec in answered])
        return {spec: "more `device_memory` is needed" if spec.system == "elixir" else None for spec in answered}


@pytest.mark.parametrize("together", [1, 2, 9])
def test_what_a_forecast_refuses_is_not_run(together: int, tmp_path: Path) -> None:
    """Whoever forecasts may answer for others that come later; no cell is asked about twice."""
    found, device, forecasts = done(tmp_path, group="first"), Device(), Forecasts(together)
    assert run(found, device, foreseen=forecasts) is None
    assert {system for system, _ in device.ran} == {"resident", "dummy"}
    (record,) = found.runs(first(found)[1])
    assert record.status == "refused" and record.reason is not None and record.reason.phase == "plan"
    assert record.reason.message == "by its forecast, before any run: more --device-memory is needed"
    expected = {1: [["resident"], ["elixir"], ["dummy"]], 2: [["resident", "elixir"], ["dummy"]]}
    assert forecasts.asked == expected.get(together, [["resident", "elixir", "dummy"]])


def test_forecasts_are_asked_for_what_will_likely_run_in_time(tmp_path: Path) -> None:
    """Two runs of START_S, by a guess, in the time of two and a half."""
    found, forecasts = done(tmp_path), Forecasts(9)
    run(found, Device(), foreseen=forecasts, minutes=2.5 * START_S / 60, stopped=lambda: bool(forecasts.asked))
    assert forecasts.asked == [["resident", "elixir"]]


def test_a_row_that_a_run_calls_bad_input_is_a_cell_that_says_so(tmp_path: Path) -> None:
    found, device = done(tmp_path, group="first"), Device()

    def execute(spec: RunSpec, replicate: int) -> Record:
        record = device.execute(spec, replicate)
        if spec.system == "elixir":
            raise BadInputError("--data x.txt: there is no such file")
        return record

    assert run(found, device, execute=execute) is None and found.missing == 0
    assert Counter(system for system, _ in device.ran) == {"resident": 3, "elixir": 1, "dummy": 1}, "it would be so again"
    (record,) = found.runs(first(found)[1])
    assert record.status == "refused" and record.reason is not None
    assert record.reason.message == "bad input: --data x.txt: there is no such file"


TWICE = """
title = "A table"
hardware = "a device"
work = { model = "opt-tiny", batch_size = 2, seq_len = 16 }
[[groups]]
title = "first"
reference = "resident"
rows = [{ system = "resident", processes = 2 }, { system = "elixir" }]
[[groups]]
title = "second"
reference = "resident"
rows = [{ system = "resident", processes = 3, timeout = 60 }, { system = "resident", accumulate = 2 }]
"""


def test_a_cell_of_two_groups_is_missing_once(tmp_path: Path) -> None:
    """With as many runs as the group that wants more; its time limit makes no other work of it."""
    found, device = done(tmp_path, TWICE), Device()
    assert found.missing == 3 + 1 + 1 and found.left_s == pytest.approx(5 * START_S, rel=0.01)
    counted: list[int] = []
    while (expected := found.missing) and len(counted) < 9:
        run(found, device, stopped=iter([False, True, True]).__next__)
        counted.append(expected)
    assert counted == [5, 4, 3, 2, 1] and len(device.ran) == 5


def test_a_cell_without_a_run_likely_takes_what_its_system_took_with_other_options(tmp_path: Path) -> None:
    """Not what the others of its group did; of the same sizes and steps rather than of any."""
    found, device = done(tmp_path, group="first"), Device()
    resident, elixir, dummy = first(found)

    def took(spec: RunSpec, wall_s: float, status: str = "ok") -> None:
        known = {"device_label": DEVICE, "batch_size": spec.batch_size, "seq_len": 16}
        device.ran.append((spec.system, 0))
        found.add(device.record(spec, status=status, resolved=known).model_copy(update={"wall_s": wall_s}))

    group = found.table.groups[0]
    took(resident.spec, 500.0)
    assert found.expected_s(elixir, group) == 500.0
    took(elixir.spec.model_copy(update={"batch_size": 8, "option": ("nonfinite=stop",)}), 70.0)
    took(elixir.spec.model_copy(update={"ranks": 2}), 1000.0)
    took(elixir.spec.model_copy(update={"device_memory": 1 << 20}), 2.0, "oom")
    assert found.expected_s(elixir, group) == 70.0
    took(elixir.spec.model_copy(update={"option": ("nonfinite=stop",)}), 40.0)
    assert found.expected_s(elixir, group) == 40.0
    took(elixir.spec, 30.0)
    assert found.expected_s(elixir, group) == 30.0 and found.expected_s(dummy, group) == (500.0 + 30.0) / 2


def test_no_run_begins_that_would_not_end_in_time(tmp_path: Path) -> None:
    """Each takes ten seconds by its record; of the first it is a guess."""
    found, device = done(tmp_path, group="first"), Device()
    assert run(found, device, minutes=START_S / 61) is not None and device.ran == []
    assert run(found, device, minutes=3.0) is None  # they take no time here
    found = done(tmp_path, group="first", processes=1)
    assert found.left_s == pytest.approx(3 * START_S, rel=0.01)
    found.add(device.execute(first(found)[0].spec, 0))
    assert found.left_s == 20.0
    assert str(run(found, device, minutes=0.1)).startswith("the next run would likely take 10 s, and 0.1 minutes")


@pytest.mark.parametrize(("boot", "more"), [(HERE, 0), (None, 0), (ELSEWHERE, 1)])
def test_on_another_machine_the_reference_has_a_turn_first(boot: str | None, more: int, tmp_path: Path) -> None:
    found, before = done(tmp_path, group="first"), Device(boot)
    run(found, before, stopped=lambda: len(before.ran) == 6)
    found, device, made = Sweep(found.table, found.records, HERE), Device(), len(found.made)
    assert run(found, device) is None
    assert [system for system, _ in device.ran][:more] == ["resident"] * more
    assert made + len(found.made) == 7 + more
    assert run(Sweep(found.table, found.records, "a third boot"), Device()) is None, "nothing is missing, so nothing is run"


def test_a_machine_whose_runs_call_it_otherwise_does_not_run_the_reference_for_ever(tmp_path: Path) -> None:
    found, before = done(tmp_path, group="first"), Device(ELSEWHERE)
    run(found, before, stopped=lambda: len(before.ran) == 4)
    device = Device("a third boot")
    assert run(Sweep(found.table, found.records, HERE), device) is None
    assert [system for system, _ in device.ran].count("resident") <= 2


def test_another_device_s_table_ends_with_its_first_run(tmp_path: Path) -> None:
    found = done(tmp_path, TABLE.replace('hardware = "a device"', 'hardware = "another"'))
    device = Device()
    with pytest.raises(BadInputError, match="the table is of another, and this run was on a device: run it there"):
        run(found, device)
    assert len(device.ran) == 1


@pytest.mark.parametrize(
    ("change", "why"),
    [
        (
            ('system = "dummy", processes = 1', 'system = "dummy", processes = 0'),
            "processes = 0 of a row: write a whole number",
        ),
        (('system = "dummy", processes = 1', 'system = "dummy", processes = true'), "processes = True of a row"),
        (("processes = 3", "processes = 0"), "processes: input should be greater than or equal to 1"),
        (
            ('system = "dummy"', 'system = "dummy", trace = "a.json"'),
            "a row of dummy has trace, which is of one run: leave it out",
        ),
        (('system = "dummy"', 'system = "dummy", repeat = 2'), "a row of dummy has repeat, which is of one run"),
        (("accumulate = [1, 2]", "accumulate = 2"), r"groups.1.grid.accumulate: input should be a valid list"),
        (("accumulate = [1, 2]", "accumulate = []"), r"groups.1.grid.accumulate: list should have at least 1 item"),
        (("accumulate = [1, 2]", "acumulate = [1]"), "acumulate"),
        (("processes = 3", "processes = true"), "processes: input should be a valid integer"),
        (
            ("accumulate = [1, 2]", f"seed = {list(range(600))}"),
            "its grid makes 1200 groups, 1000 are allowed: give fewer values",
        ),
        (("accumulate = [1, 2]", 'system = ["elixir"]'), "group 'second': 'system' is in its grid and in a row: leave it out"),
    ],
)
def test_a_wrong_table_is_told_in_a_line(change: tuple[str, str], why: str, tmp_path: Path) -> None:
    text = TABLE.replace(*change)
    assert text != TABLE
    with pytest.raises(BadInputError, match=why) as told:
        done(tmp_path, text)
    assert "\n" not in str(told.value) and "t.toml" in str(told.value)


def test_a_table_that_is_not_there(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["sweep", "10-h200-sped"]) == 2
    assert "did you mean 10-h200-speed" in capsys.readouterr().err
    assert cli.main(["sweep", str(tmp_path / "no.toml")]) == 2
    assert cli.main(["sweep", "10-h200-speed", "--group", "nothing"]) == 2
    assert "--group nothing: no group is called so" in capsys.readouterr().err
    assert cli.main(["sweep", "10-h200-speed", "--for", "0"]) == 2
    assert cli.main(["sweep", "10-h200-speed", "--dry-run", "--results", str(ROOT / "results")]) == 0
    shown = capsys.readouterr().out
    assert "nothing to run" in shown and shown.splitlines()[-1].endswith("or so")


@pytest.mark.parametrize("status", ["ok", "interrupted"])
def test_the_run_in_which_it_is_stopped_is_told_and_archived_too(status: str, tmp_path: Path) -> None:
    found, device = done(tmp_path), Device(resident=status)
    assert run(found, device, stopped=lambda: bool(device.ran)) == "it was stopped"
    assert [record.status for record in found.made] == [status]
    assert len(found.runs(first(found)[0])) == (status == "ok")


OLD = 'system = "patrickstar", option = ["variant=osc", "nonfinite=stop"]'


def test_what_options_have_become_since_is_asked_of_cells_that_want_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Those that have theirs are shown still."""
    text, device = TABLE.replace('system = "elixir", device_memory = "1GiB"', OLD), Device()
    found = done(tmp_path, text)
    asked = ["sweep", str(tmp_path / "t.toml"), "--group", "first", "--dry-run", "--results", str(tmp_path / "r")]
    assert cli.main(asked) == 2
    said = capsys.readouterr().err
    assert "first: patrickstar:variant=osc,nonfinite=stop: variant=osc has nonfinite=skip, stop is given: leave" in said
    for number in range(3):
        store.write(device.execute(first(found)[1].spec, number), tmp_path / "r")
    assert cli.main(asked) == 0
    assert "patrickstar:variant=osc,nonfinite=stop: 3 ok; nothing to run" in capsys.readouterr().out


def test_cells_that_cannot_be_run_again_are_named_once_and_the_others_run(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """Also where one of them is the reference, which on another machine would have the first turn."""
    text = TABLE.replace('system = "resident" }, { system = "elixir", device_memory = "1GiB"', OLD)
    text = text.replace(
        'title = "first"\nreference = "resident"', 'title = "first"\nreference = "patrickstar:variant=osc,nonfinite=stop"'
    )
    device = Device(ELSEWHERE)
    old = done(tmp_path, text).table.groups[0].reference
    store.write(device.execute(old.spec, 0), tmp_path / "r")
    monkeypatch.setattr(sweep, "boot_id", lambda: HERE)
    monkeypatch.setattr(sweep, "foreseen", lambda specs, stopped: {})
    monkeypatch.setattr(sweep, "launch", lambda spec, *, replicate, **_: device.execute(spec, replicate))
    asked = ["sweep", str(tmp_path / "t.toml"), "--group", "first", "--results", str(tmp_path / "r")]
    assert cli.main([*asked, "--dry-run"]) == 0
    shown = capsys.readouterr().out
    assert "patrickstar:variant=osc,nonfinite=stop: 1 ok; cannot be run again: variant=osc has nonfinite=skip" in shown
    assert shown.splitlines()[-1].startswith("1 runs are missing")
    assert cli.main(asked) == 0
    told = capsys.readouterr()
    line = "first: patrickstar:variant=osc,nonfinite=stop: cannot be run again: variant=osc has nonfinite=skip"
    assert told.err.count(line) == 1
    found = json.loads(told.out.splitlines()[-1])
    assert found["missing"] == 0 and len(found["ran"]) == 1 and [each[: len(line)] for each in found["closed"]] == [line]
    assert [system for system, _ in device.ran] == ["patrickstar", "dummy"]


@pytest.mark.parametrize("table", sorted(path.stem for path in FOLDER.glob("*.toml")))
def test_a_results_table_can_be_run_where_nothing_is_yet(
    table: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """Rows of old options had their runs elsewhere; they keep no other from its own."""
    assert cli.main(["sweep", table, "--results", str(tmp_path), "--dry-run"]) == 0
    *rows, last = capsys.readouterr().out.splitlines()
    assert last.split()[1:4] == ["runs", "are", "missing:"] and int(last.split()[0]) > 0
    assert sum("cannot be run again" in row for row in rows) < sum("to run, " in row for row in rows)


def test_two_sweeps_do_not_work_at_once(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """What a table still wants may be looked at meanwhile."""
    (tmp_path / "t.toml").write_text(TABLE)
    asked = ["sweep", str(tmp_path / "t.toml"), "--for", "0.001", "--results", str(tmp_path)]
    with sweep._alone(tmp_path):
        assert cli.main(asked) == 2
        assert f"--results {tmp_path}: another sweep is at work there: wait until it has ended" in capsys.readouterr().err
        assert cli.main([*asked, "--dry-run"]) == 0
    assert cli.main(asked) == sweep.MISSING
    assert [path.name for path in tmp_path.iterdir()] == ["t.toml"], "nothing is left behind"


def test_a_folder_without_locks(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[int] = []

    def no_locks(file: int, operation: int) -> None:
        asked.append(operation)
        raise OSError(errno.ENOLCK, "no locks")

    monkeypatch.setattr(sweep.fcntl, "flock", no_locks)
    with sweep._alone(tmp_path), sweep._alone(tmp_path):
        assert len(asked) == 2, "both were refused a lock, and work"


# ---- for real

REAL = """
title = "Dummies"
hardware = "cpu-emulated"
processes = 5
work = { device = "cpu", model = "opt-tiny", seq_len = 16, steps = 4, warmup = 1 }
[[groups]]
title = "ten cells"
reference = "dummy"
rows = [{ system = "dummy", batch_size = 1 }, { system = "dummy", batch_size = 2 }]
"""


@pytest.mark.long
def test_a_sweep_that_is_killed_is_gone_on_with(tmp_path: Path) -> None:
    table, results, archive = tmp_path / "t.toml", tmp_path / "r", tmp_path / "a.tar.gz"
    table.write_text(REAL)
    command = [sys.executable, "-m", "harness", "sweep", str(table), "--results", str(results)]
    told = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    process = subprocess.Popen(command, env=told, cwd=tmp_path, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until = time.monotonic() + 240
    while not results.is_dir() or len(list(results.glob("*.json"))) < 3:
        assert process.poll() is None and time.monotonic() < until
        time.sleep(0.05)
    process.send_signal(signal.SIGKILL)
    process.wait()
    before = {path.name for path in results.glob("*.json")}
    again = subprocess.run([*command, "--archive", str(archive)], env=told, cwd=tmp_path, capture_output=True, text=True)
    assert again.returncode == 0, again.stderr
    found = json.loads(again.stdout.splitlines()[-1])
    assert len(found["ran"]) == 10 - len(before) and found["missing"] == 0 and set(found["statuses"].values()) == {"ok"}
    records, unreadable = store.read_all(results)
    assert len(records) == 10 and not unreadable
    assert Counter(record.resolved.batch_size for record in records) == {1: 5, 2: 5}
    assert len({record.environment.hardware.boot_id for record in records}) == 1
    with tarfile.open(archive) as held:
        assert sorted(held.getnames()) == sorted(f"{run}.json" for run in found["ran"])
    assert "| dummy" in again.stderr and "ten cells" in again.stderr
    nothing = subprocess.run([*command, "--dry-run"], env=told, cwd=tmp_path, capture_output=True, text=True)
    assert nothing.stdout.splitlines()[-1] == "0 runs are missing: 0 s or so"
    over = subprocess.run([*command, "--archive", str(archive)], env=told, cwd=tmp_path, capture_output=True, text=True)
    assert over.returncode == 2 and "is there already: name another" in over.stderr
