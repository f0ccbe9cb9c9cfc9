"""`harness compare`: who runs when, what becomes of failures, the rows, and the exit code."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import cli, comparison, store
from harness.compare import CompareSpec, check_options, entries
from harness.record import Record
from harness.spec import BadInputError, RunSpec
from harness.stopping import Stop
from tests.harness.test_likeness import run as like_run

GOOD = ("compare", "--model", "opt-tiny", "--device", "cpu")
A, B, C = "dummy", "dummy:step_time_s=0.1", "resident"
Script = Callable[[RunSpec, int], dict[str, Any]]


@pytest.fixture
def scripted(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """Runs a comparison whose runs are records that a script makes up. Gives (exit code, the comparison, calls)."""
    calls: list[tuple[str, int]] = []
    said: list[str] = []

    def go(script: Script, *systems: str, flags: tuple[str, ...] = ()) -> tuple[int, Any, list[tuple[str, int]]]:
        def launch(spec: RunSpec, *, replicate: int, **_: Any) -> Record:
            calls.append((":".join([spec.system, *spec.option]), replicate))
            changes = script(spec, replicate)
            return like_run(run_id=f"run-{len(calls):02}", replicate=replicate, spec=spec, **changes)

        monkeypatch.setattr(cli, "launch", launch)
        monkeypatch.setattr(cli, "say_json", said.append)
        named = [word for system in systems for word in ("--system", system)]
        code = cli.main([*GOOD, *named, "--results", str(tmp_path), *flags])
        return code, json.loads(said[-1]), calls

    return go


def speed(tokens_per_s: float) -> dict[str, Any]:
    return {"metrics__tokens_per_s": tokens_per_s, "metrics__median_step_time_s": 32 / tokens_per_s}


def test_processes_are_interleaved_and_the_first_system_is_the_reference(scripted: Callable[..., Any], tmp_path: Path) -> None:
    rates = {"dummy": [100.0, 110.0, 105.0], "resident": [210.0, 220.0, 200.0]}
    code, made, calls = scripted(lambda spec, n: speed(rates[spec.system][n]), A, C)
    assert code == 0
    assert calls == [(A, 0), (C, 0), (A, 1), (C, 1), (A, 2), (C, 2)]
    assert made["reference"] == A
    assert [record.run_id for record in store.read_all(tmp_path)[0]] == [f"run-{n:02}" for n in range(1, 7)]
    reference, other = made["rows"]
    assert reference["speed_ratio"] is None
    assert reference["median_step_time_s"]["median"] == pytest.approx(32 / 105)
    assert other["runs"] == ["run-02", "run-04", "run-06"]
    assert other["speed_ratio"] == {
        "value": pytest.approx(2.0), "low": pytest.approx(1.69166, rel=1e-4), "high": pytest.approx(2.36454, rel=1e-4),
        "spread": "t 95 %", "verdict": "faster",
    }  # fmt: skip
    assert made["spec"]["repeat"] == 3


def test_inside_the_interval_there_is_no_difference(scripted: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    rates = {"dummy": [100.0, 120.0, 110.0], "resident": [110.0, 115.0, 120.0]}
    _, made, _ = scripted(lambda spec, n: speed(rates[spec.system][n]), A, C)
    assert made["rows"][1]["speed_ratio"]["verdict"] == "no difference"
    assert "no difference" in capsys.readouterr().err


def test_two_processes_have_a_range_and_no_verdict(scripted: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    rates = {"dummy": [100.0, 101.0], "resident": [110.0, 115.0]}
    _, made, _ = scripted(lambda spec, n: speed(rates[spec.system][n]), A, C, flags=("--repeat", "2"))
    ratio = made["rows"][1]["speed_ratio"]
    assert (ratio["spread"], ratio["verdict"]) == ("min-max", "too few runs")
    shown = capsys.readouterr().err
    assert "too few runs" in shown
    assert "fewer than 3 processes of dummy, resident" in shown


def test_a_system_that_fails_is_a_row_and_the_others_are_compared(scripted: Callable[..., Any]) -> None:
    def script(spec: RunSpec, replicate: int) -> dict[str, Any]:
        if spec.option and replicate == 1:
            return {"status": "oom", "reason": {"message": "no room", "tier": "host", "need": 2, "have": 1}, **speed(1.0)}
        return speed(100.0)

    code, made, calls = scripted(script, A, B, C)
    assert code == 1
    assert len(calls) == 9  # an oom may not come twice, and the others go on
    assert [(row["status"], row["n"]) for row in made["rows"]] == [("ok", 3), ("oom", 2), ("ok", 3)]
    assert made["rows"][1]["reason"]["need"] == 2
    assert made["rows"][1]["speed_ratio"]["value"] == made["rows"][2]["speed_ratio"]["value"] == 1.0


@pytest.mark.parametrize("status", ["refused", "unavailable"])
def test_what_is_decided_before_training_is_asked_once(scripted: Callable[..., Any], status: str) -> None:
    def script(spec: RunSpec, replicate: int) -> dict[str, Any]:
        return {"status": status, "reason": {"message": "no"}} if spec.system == "resident" else {}

    code, made, calls = scripted(script, A, C)
    assert code == 1
    assert calls == [(A, 0), (C, 0), (A, 1), (A, 2)]
    assert [row["status"] for row in made["rows"]] == ["ok", status]


def test_a_reference_that_fails_leaves_figures_without_ratios(scripted: Callable[..., Any]) -> None:
    code, made, _ = scripted(lambda spec, n: {"status": "ok" if spec.system == "resident" else "failed"}, A, C)
    assert code == 1
    assert made["rows"][1]["tokens_per_s"]["median"] == 100.0
    assert made["rows"][1]["speed_ratio"] is None


def test_an_unlike_pair_is_refused_with_exit_code_3(scripted: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    def script(spec: RunSpec, replicate: int) -> dict[str, Any]:
        unlike = {"resolved__dtypes__weights": "fp32", "environment__versions__torch": "1.0"}
        return unlike if spec.option else {}

    code, made, _ = scripted(script, A, B, C, flags=("--repeat", "1"))
    assert code == 3
    assert [row["speed_ratio"] is None for row in made["rows"]] == [True, True, False]
    assert made["refusals"] == [f"{B} is not set against dummy: dtype: weights=fp32, the reference has weights=bf16"]
    assert f"{B}: versions: torch=1.0, the reference has torch=2.13.0" in made["marks"]
    shown = capsys.readouterr().err
    assert "refused: dtype" in shown


def test_losses_lie_beside_the_speeds(scripted: Callable[..., Any]) -> None:
    losses: dict[str, list[Any]] = {"dummy": [5.0, 4.0, 2.0], "resident": [5.0, 4.0, 2.2]}

    def script(spec: RunSpec, replicate: int) -> dict[str, Any]:
        return {"metrics__loss": losses[spec.system], "memory__device_peak_bytes": 1000 + replicate}

    code, made, _ = scripted(script, A, C)
    assert code == 0
    assert made["rows"][0]["losses"] == {"first": 5.0, "last": 2.0, "max_relative_deviation": 0.0}
    assert made["rows"][1]["losses"] == {"first": 5.0, "last": 2.2, "max_relative_deviation": pytest.approx(0.1)}
    assert any("may not be the same training" in mark and mark.startswith("resident") for mark in made["marks"])
    assert made["rows"][1]["peaks"]["device_bytes"] == 1002


def test_a_region_unlike_its_median_step_is_said(scripted: Callable[..., Any]) -> None:
    def script(spec: RunSpec, replicate: int) -> dict[str, Any]:
        return {"metrics__mean_step_time_s": 0.5 if spec.system == "resident" else 0.31}

    _, made, _ = scripted(script, A, C)
    (told,) = [mark for mark in made["marks"] if "the whole region" in mark]
    assert told.startswith("resident: its timed region comes to 0.5 s a step, its median step takes 0.3 s")


def test_a_row_says_whether_the_real_package_ran(scripted: Callable[..., Any], capsys: pytest.CaptureFixture[str]) -> None:
    said = {"package": "deepspeed", "version": "0.19.2", "real_package": True, "config": {"stage": 3}, "notes": ["slow here"]}
    _, made, _ = scripted(lambda spec, n: {"strategy": said} if spec.system == "resident" else {}, A, C)
    own, outside = (row["configuration"] for row in made["rows"])
    assert (own["package"], own["real_package"]) == (None, None)
    assert (outside["package"], outside["real_package"]) == ("deepspeed 0.19.2", True)
    assert outside["statistics"]["config"] == {"stage": 3}
    assert "resident: slow here" in made["marks"]
    shown = capsys.readouterr().err
    assert "deepspeed 0.19.2, the real package" in shown
    assert "this project's own code" in shown


def test_a_stop_ends_the_runs_and_still_compares(scripted: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    stops: list[Stop] = []
    original = cli.stop_signals

    def spy() -> Any:
        manager = original()

        class Spy:
            def __enter__(self) -> Stop:
                stops.append(manager.__enter__())
                return stops[-1]

            def __exit__(self, *error: Any) -> None:
                manager.__exit__(*error)

        return Spy()

    monkeypatch.setattr(cli, "stop_signals", spy)

    def script(spec: RunSpec, replicate: int) -> dict[str, Any]:
        stops[-1].number = 15
        return {}

    code, made, calls = scripted(script, A, C)
    assert code == 128 + 15
    assert len(calls) == 1
    assert (made["rows"][1]["n"], made["rows"][1]["status"]) == (0, "failed")
    assert "was stopped before" in made["rows"][1]["reason"]["message"]


def test_a_record_that_cannot_be_kept_is_said_and_ends_the_runs(scripted: Callable[..., Any], tmp_path: Path) -> None:
    (tmp_path / "run-02.json").write_text("taken")
    code, made, calls = scripted(lambda spec, n: {}, A, C)
    assert (code, len(calls)) == (1, 2)
    assert [row["n"] for row in made["rows"]] == [1, 1]


def test_options_of_its_own_and_of_all() -> None:
    spec = CompareSpec(
        system=("elixir:prefetch=2,blocks=0,3-5", "elixir"), model="m", option=("prefetch=1", "cache=auto"), clip=1.0
    )
    first, second = entries(spec)
    assert first.label == "elixir:prefetch=2,blocks=0,3-5"
    assert (first.spec.system, first.spec.option) == ("elixir", ("prefetch=2", "cache=auto", "blocks=0,3-5"))
    assert second.spec.option == ("prefetch=1", "cache=auto")
    assert (first.spec.clip, first.spec.repeat, type(first.spec)) == (1.0, 3, RunSpec)


@pytest.mark.parametrize(
    ("systems", "said"),
    [
        (("dummy", "elixir:prefetch"), "--system elixir:prefetch: prefetch: write it as key=value"),
        (("dummy", "elixir:depth=1,depth=2"), "is given twice"),
    ],
)
def test_options_that_cannot_be_read(systems: tuple[str, ...], said: str) -> None:
    with pytest.raises(BadInputError, match=said):
        entries(CompareSpec(system=systems, model="m"))


def test_a_wrong_option_of_the_last_system_is_found_before_the_first_run() -> None:
    found = entries(CompareSpec(system=("dummy", "dummy:step_time=1"), model="m"))
    with pytest.raises(BadInputError, match="unknown option of dummy 'step_time': did you mean step_time_s"):
        check_options(found)


def keep(folder: Path, **runs: dict[str, Any]) -> None:
    for run_id, changes in runs.items():
        store.write(like_run(run_id=run_id, **changes), folder)


def test_kept_runs_are_compared_without_running_anything(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(
        tmp_path,
        first={},
        second={"spec__system": "resident", **speed(50.0)},
        third={"spec__system": "resident", **speed(52.0)},
        fourth={"environment__code__source_sha256": "f" * 64},
    )
    assert cli.main(["compare", "--runs", "first", "second", "thi", "fourth", "--results", str(tmp_path)]) == 0
    out, _ = capsys.readouterr()
    (line,) = out.splitlines()
    made = json.loads(line)
    assert made["spec"] is None
    assert [(row["label"], row["runs"]) for row in made["rows"]] == [
        ("dummy", ["first"]),
        ("resident", ["second", "third"]),
        ("dummy #2", ["fourth"]),
    ]
    assert made["rows"][1]["speed_ratio"]["verdict"] == "too few runs"
    assert any(mark.startswith("dummy #2: code: ") for mark in made["marks"])


def test_kept_runs_that_are_unlike_are_refused(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    keep(tmp_path, first={}, second={"spec__system": "resident", "resolved__seq_len": 32}, third={"status": "failed"})
    assert cli.main(["compare", "--runs", "first", "second", "--results", str(tmp_path)]) == 3
    assert "sequence length: 32, the reference has 16" in capsys.readouterr().err
    assert cli.main(["compare", "--runs", "first", "third", "second", "--results", str(tmp_path)]) == 1


@pytest.mark.parametrize(
    ("runs", "said"),
    [
        (("first", "nothing"), "run nothing is not there"),
        (("run-", "first"), "run run- fits 2 runs: run-a, run-b"),
        (("first", "firs"), "run first is named twice"),
        (("first", "cut"), "cut.json is no record"),
        (("first",), "all of them are runs of dummy"),
    ],
)
def test_kept_runs_that_cannot_be_found(
    tmp_path: Path, runs: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    keep(tmp_path, **{"first": {}, "run-a": {}, "run-b": {}})
    (tmp_path / "cut.json").write_text("{")
    assert cli.main(["compare", "--runs", *runs, "--results", str(tmp_path)]) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err


def test_a_comparison_is_strict_json_and_can_be_read_again() -> None:
    made = comparison.compare({"a": [like_run()], "b": []})
    tree = json.loads(comparison.to_json(made), parse_constant=lambda constant: pytest.fail(constant))
    assert comparison.Comparison.model_validate(tree) == made
    assert tree["kind"] == "comparison"
