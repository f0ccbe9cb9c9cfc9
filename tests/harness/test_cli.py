"""The command line: which flags there are, and that bad input is one line and exit code 2."""

from __future__ import annotations

import dataclasses
import importlib.abc
import importlib.util
import json
import re
import subprocess
import sys
import tomllib
from pathlib import Path
from typing import Any

import pytest

from harness import __main__, cli, doctor, listing, store
from harness.compare import CompareSpec, StoredSpec
from harness.doubts import Evidence, judge
from harness.plan_spec import PlanSpec
from harness.record import Record
from harness.spec import RunSpec, flag
from models import registry as models_registry
from systems.baselines import faces
from systems.face import Abilities
from systems.registry import RegistryEntry
from tests.harness.conftest import make_record
from tests.harness.processes import ROOT

# A flag costs every user a line of help: adding one means deciding so here.
FLAGS = (
    "--system", "--model", "--set", "--device", "--device-memory", "--host-memory", "--disk", "--disk-memory", "--disk-rate",
    "--ranks", "--batch-size",
    "--seq-len", "--accumulate", "--steps", "--warmup", "--dtype", "--recompute", "--clip", "--optimizer", "--hyper",
    "--lr", "--weight-decay",
    "--schedule", "--data", "--eval-every", "--seed", "--option", "--repeat", "--timeout", "--results", "--tag",
    "--checkpoint", "--save-every", "--resume", "--weights", "--trace", "--phases", "--wandb",
)  # fmt: skip
PAIR = ("compare", "--system", "dummy", "--system", "resident", "--model", "opt-tiny")
GOOD = ("run", "--system", "dummy", "--model", "opt-tiny")


def test_the_flags_are_these() -> None:
    assert tuple(flag(field) for field in RunSpec.model_fields) == FLAGS
    assert tuple(flag(field) for field in CompareSpec.model_fields) == FLAGS  # with several --system
    assert tuple(flag(field) for field in StoredSpec.model_fields) == ("--runs", "--results")
    assert tuple(flag(field) for field in PlanSpec.model_fields) == (*FLAGS, "--hardware")


def test_a_switch_takes_no_value_and_ends_where_it_stands() -> None:
    given = ("--system", "x", "--phases", "--model", "y", "--option", "a=1", "b=2")
    spec = cli.parse(RunSpec, given, prog="harness run")
    assert (spec.phases, spec.model, spec.option) == (True, "y", ("a=1", "b=2"))
    assert not cli.parse(RunSpec, ("--system", "x", "--model", "y"), prog="harness run").phases


@pytest.mark.parametrize(("command", "spec"), [("run", RunSpec), ("compare", CompareSpec), ("plan", PlanSpec)])
def test_every_flag_says_what_it_means(command: str, spec: type[RunSpec], capsys: pytest.CaptureFixture[str]) -> None:
    assert all(field.description for field in spec.model_fields.values())
    with pytest.raises(SystemExit) as ended:
        cli.main([command, "--help"])
    assert ended.value.code == 0
    shown = capsys.readouterr().out
    left_out = {flag(field) for field in getattr(spec, "left_out", ())}
    words = set(re.findall(r"--[a-z-_]+", shown))
    assert words >= set(FLAGS) - left_out and not words & left_out - {"--steps"}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("rum",), "unknown command 'rum': did you mean run?"),
        (("run", "--model", "opt-tiny"), "--system is missing: name of a system"),
        ((*GOOD, "--sytem", "x"), "unknown flag '--sytem': did you mean --system"),
        ((*GOOD, "--verbose"), "unknown flag '--verbose'"),
        ((*GOOD, "--offload"), "unknown flag '--offload': there is --accumulate, --batch-size"),  # dashes are alike in all
        ((*GOOD, "--hardware", "h100-80g-x1"), "--hardware is of harness plan: a run takes the machine that it is on"),
        ((*GOOD, "--lr"), "--lr needs a value"),
        ((*GOOD, "--option"), "--option needs a value"),
        ((*GOOD, "--steps", "3", "4"), "unexpected argument '4' after --steps"),
        ((*GOOD, "stray"), "unexpected argument 'stray' after --model"),
        ((*GOOD, "--option", "="), "harness: --option =: write it as key=value"),
        ((*GOOD, "--recompute", "0-99999999999"), "no model has a block 99999999999: name blocks below 65536"),
        ((*GOOD, "--device-memory", "99999999999999999999999TiB"), "is more than any machine has: give at most 1048576TiB"),
        ((*GOOD, "--host-memory", "9" * 400 + ".0GiB"), "is not a size"),
        ((*GOOD, "--lr", "1e308"), "--lr 1e308: input should be less than or equal to"),
        ((*GOOD, "--weight-decay", "1e308"), "--weight-decay 1e308: input should be less than or equal to"),
        ((*GOOD, "--seed", "99999999999999999999999"), "input should be less than or equal to 9223372036854775807"),
        ((*GOOD, "--phases=yes"), "--phases takes no value: leave =yes out"),
        ((*GOOD, "--phases", "yes"), "unexpected argument 'yes'"),
        (("run", "--system", "dumy", "--model", "x"), "unknown system 'dumy': did you mean dummy?"),
        ((*GOOD, "--steps", "many"), "--steps many: input should be a valid integer"),
        ((*GOOD, "--steps", "0"), "--steps 0: input should be greater than or equal to 1"),
        ((*GOOD, "--lr", "nan"), "--lr nan: input should be a finite number"),
        ((*GOOD, "--device", "gpu"), "--device gpu: input should be 'cuda' or 'cpu'; did you mean cuda?"),
        ((*GOOD, "--device", "cuda:3"), "--device cuda:3: input should be 'cuda' or 'cpu'; did you mean cuda?"),
        ((*GOOD, "--device", "CUDA"), "--device CUDA: input should be 'cuda' or 'cpu'; did you mean cuda?"),
        ((*GOOD, "--device", "nvidia"), "--device nvidia: input should be 'cuda' or 'cpu'; did you mean cuda?"),
        ((*GOOD, "--device", "mps"), "--device mps: input should be 'cuda' or 'cpu'; did you mean cpu?"),
        ((*GOOD, "--device", "cdua"), "--device cdua: input should be 'cuda' or 'cpu'; did you mean cuda?"),
        ((*GOOD, "--dtype", "half"), "--dtype half: input should be 'bf16', 'fp16' or 'fp32'; did you mean fp16?"),
        ((*GOOD, "--dtype", "BFloat16"), "--dtype BFloat16: input should be 'bf16', 'fp16' or 'fp32'; did you mean bf16?"),
        ((*GOOD, "--schedule", "half"), "--schedule half: input should be 'constant', 'linear' or 'cosine'"),
        ((*GOOD, "--dtype=fp8"), "--dtype fp8: input should be 'bf16', 'fp16' or 'fp32'; did you mean fp"),
        ((*GOOD, "--device-memory", "4QiB"), "--device-memory 4QiB: '4QiB' is not a size: write it as 40GiB"),
        ((*GOOD, "--recompute", "3-1"), "write none, full, or block numbers such as 0-3,7"),
        ((*GOOD, "--ranks", "0"), "--ranks 0: input should be greater than or equal to 1"),
        ((*GOOD, "--option", "oops"), "--option oops: write it as key=value"),
        ((*GOOD, "--steps", "5", "--warmup", "5"), "--warmup 5 leaves nothing to time in --steps 5"),
        (PAIR[:-4], "--model is missing"),
        ((*PAIR[:3], *PAIR[5:]), "--system dummy: a comparison needs two systems or more"),
        ((*PAIR, "--system", "dummy"), "the same system with the same options is given twice"),
        ((*PAIR, "--system", "elxir"), "unknown system 'elxir': did you mean elixir?"),
        ((*PAIR, "--system", "elixir:prefetch"), "--system elixir:prefetch: prefetch: write it as key=value"),
        ((*PAIR, "--system", "dummy:crash=1"), "unknown option of dummy 'crash': did you mean crash_at?"),
        ((*PAIR, "--option", "crash_at=1"), "unknown option of resident 'crash_at'"),
        ((*PAIR, "--trace", "x.json"), "--trace x.json: a trace is of one run: use harness run --trace"),
        ((*PAIR, "--refrence", "dummy"), "unknown flag '--refrence'"),
        (("compare", "--runs", "a", "--dtype", "fp32"), "unknown flag '--dtype'"),
        (("compare", "--runs"), "--runs needs a value"),
        (("ls",), "what is missing"),
        (("ls", "sistems"), "did you mean systems?"),
        (("doctor", "--fix"), "unknown flag '--fix'"),
    ],
)
def test_bad_input_is_one_line(
    arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "launch", lambda *_, **__: pytest.fail("a process was started"))
    assert cli.main(arguments) == 2
    out, err = capsys.readouterr()
    assert out == ""
    assert err.count("\n") == 1
    assert said in err


def test_ctrl_c_is_one_line_and_exit_code_130(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a run its record says so, see test_launch; what makes none ends as quietly."""

    def stopped(*_: Any, **__: Any) -> None:
        raise KeyboardInterrupt

    monkeypatch.setattr("harness.plan.plan", stopped)
    assert cli.main(("plan", "--system", "elixir", "--model", "opt-tiny", "--hardware", "h100-80g-x1")) == 130
    monkeypatch.setattr("harness.listing.systems", stopped)
    assert cli.main(("ls", "systems")) == 130
    assert capsys.readouterr() == ("", "harness: interrupted\n" * 2)


def test_help_has_flags_as_they_are_given(capsys: pytest.CaptureFixture[str]) -> None:
    for command in cli.EXAMPLES:
        with pytest.raises(SystemExit):
            cli.main([command, "--help"])
        shown = set(re.findall(r"--[\w-]+", capsys.readouterr().out))
        assert not any("_" in name for name in shown), command
        assert command != "sweep" or "--for" in shown


def test_ctrl_c_while_the_command_is_imported_is_as_quiet(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    class Stopped(importlib.abc.MetaPathFinder):
        def find_spec(self, name: str, *_: Any) -> None:
            if name == "harness.cli":
                raise KeyboardInterrupt

    monkeypatch.delitem(sys.modules, "harness.cli")
    monkeypatch.setattr(sys, "meta_path", [Stopped(), *sys.meta_path])
    assert __main__.main() == 130
    assert capsys.readouterr() == ("", "harness: interrupted\n")


def test_a_wrong_results_folder_is_found_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "launch", lambda *_, **__: pytest.fail("a process was started"))
    assert cli.main([*GOOD, "--results", str(tmp_path / "out.json")]) == 2
    assert capsys.readouterr().err.count("\n") == 1


def test_wandb_missing_is_found_before_the_work(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(cli, "launch", lambda *_, **__: pytest.fail("a process was started"))
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None)
    assert cli.main([*GOOD, "--results", str(tmp_path), "--wandb", "offline"]) == 2
    assert capsys.readouterr().err == "harness: --wandb needs the package wandb: pip install wandb, or use --wandb off\n"


def test_a_record_that_cannot_be_kept_is_fatal_but_printed(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    record = make_record()
    store.write(record, tmp_path)
    monkeypatch.setattr(cli, "launch", lambda *_, **__: record)
    assert cli.main([*GOOD, "--results", str(tmp_path), "--repeat", "3"]) == 1
    out, err = capsys.readouterr()
    assert out.count("\n") == 1
    assert "never overwritten" in err


def test_a_failure_does_not_end_the_replicates_and_shows_in_the_exit_code(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """Case C48."""
    statuses = ["ok", "timeout", "ok"]

    def launch(spec: RunSpec, *, replicate: int, **_: Any) -> Record:
        return make_record(run_id=f"run-{replicate}", status=statuses[replicate], reason={"message": "why"})

    monkeypatch.setattr(cli, "launch", launch)
    assert cli.main([*GOOD, "--results", str(tmp_path), "--repeat", "3"]) == 1
    out, _ = capsys.readouterr()
    assert [json.loads(line)["status"] for line in out.splitlines()] == statuses
    assert [record.status for record in store.read_all(tmp_path)[0]] == statuses


def test_values_reach_the_spec() -> None:
    spec = cli.parse(
        RunSpec,
        ["--system=elixir", "--model", "opt-tiny", "--device-memory", "64MiB", "--recompute", "0-2,5", "--lr", "1e-3"]
        + ["--option", "a=1", "b=2", "--set", "num_layers=12", "--option", "c=3"],
        prog="harness run",
    )
    assert (spec.system, spec.device_memory, spec.recompute, spec.lr) == ("elixir", 64 << 20, (0, 1, 2, 5), 1e-3)
    assert (spec.option, spec.set) == (("a=1", "b=2", "c=3"), ("num_layers=12",))
    assert RunSpec.model_validate_json(spec.model_dump_json()) == spec


@pytest.mark.parametrize(
    ("steps", "warmup", "resolved"),
    [
        (None, None, (13, 3)),
        (6, None, (6, 3)),
        (2, None, (2, 1)),
        (1, None, (1, 0)),
        (None, 20, (30, 20)),
        (5, 0, (5, 0)),
    ],
)
def test_default_steps_always_leave_some_to_time(steps: Any, warmup: Any, resolved: tuple[int, int]) -> None:
    assert RunSpec(system="s", model="m", steps=steps, warmup=warmup).resolve_steps() == resolved


@pytest.mark.parametrize("warmup", [None, 0, 1, 7])
def test_the_default_number_of_steps_is_not_doubted(warmup: Any) -> None:
    steps, left_out = RunSpec(system="s", model="m", warmup=warmup).resolve_steps()
    timed = steps - left_out
    assert [doubt.code for doubt in judge(Evidence(timed_step_s=[0.1] * timed, threads=1, cores=1))] == []
    fewer = Evidence(timed_step_s=[0.1] * (timed - 1), threads=1, cores=1)
    assert [doubt.code for doubt in judge(fewer)] == ["short_timed_region"]


def test_nothing_heavy_is_imported_to_read_a_command_line() -> None:
    code = "import sys, harness.cli; sys.exit('torch' in sys.modules or 'pandas' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], timeout=60).returncode == 0


def test_lists(tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    broken = RegistryEntry(name="broken", module="systems.baselines.broken", exposes="SYSTEM", broken="SyntaxError: oh")
    found = listing.registry.find()
    monkeypatch.setattr(listing.registry, "find", lambda: found | {"broken": broken})
    needs = Abilities(package="no_such_package", install="pip install 'offload-bench[parts]'")
    monkeypatch.setattr(faces, "RESIDENT", dataclasses.replace(faces.RESIDENT, abilities=needs))
    assert cli.main(["ls", "systems"]) == 0
    shown = {line.split()[0]: " ".join(line.split()[1:]) for line in capsys.readouterr().out.splitlines()}
    assert shown["broken"] == "unavailable: SyntaxError: oh"
    assert shown["resident"] == (
        "unavailable: the package no_such_package is not installed: pip install 'offload-bench[parts]'"
    )
    assert shown["dummy"].startswith("scripted times")
    store.write(make_record(metrics={"tokens_per_s": 12.5}), tmp_path)
    (tmp_path / "cut.json").write_text("{")
    assert cli.main(["ls", "runs", "--results", str(tmp_path)]) == 0
    out, err = capsys.readouterr()
    assert "12.5" in out
    assert "cut.json is no record" in err


def test_models_are_listed_with_their_label_and_counted_parameters(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(models_registry, "names", lambda: ("opt-tiny", "albert-tiny", "bert-1.8b"))
    assert cli.main(["ls", "models"]) == 0
    head, *rows = (line.split() for line in capsys.readouterr().out.splitlines())
    assert head[:5] == ["model", "family", "label", "size", "parameters"]
    assert rows[0][:4] == ["opt-tiny", "opt", "1.256M", "1255680"]
    assert rows[1][:4] == ["albert-tiny", "albert", "694.5K", "694528"]
    assert rows[2][:6] == ["bert-1.8b", "bert", "H3T", "BERT-1.8B", "1.846B", "1846033210"]


def test_doctor_tells_and_changes_nothing(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["doctor"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert all(line.startswith(("ok   ", "lacks")) for line in lines)
    told = {line[7:21].strip() for line in lines}
    assert {"cuda", "compiler", "ninja", "libaio", "huge pages", "host memory", "deepspeed", "roundpipe"} <= told


def test_what_brings_a_package_is_a_command_that_works_in_a_checkout(monkeypatch: pytest.MonkeyPatch) -> None:
    """By name no index has this project, and what it may have under that name some day is somebody else's."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]
    monkeypatch.setattr(doctor.importlib.util, "find_spec", lambda _: None)
    lacks = list(doctor.packages())
    assert {"deepspeed", "roundpipe", "accelerate", "wandb", "pynvml"} == {each.subject for each in lacks}
    needed = {"pynvml": "nvidia-ml-py"}
    for each in lacks:
        command = re.match(r"pip install (?:-e '\.\[(\w+)\]'|([\w-]+)) for ", each.advice)
        assert command is not None, each
        brought = project["optional-dependencies"][command[1]] if command[1] else [command[2]]
        name = needed.get(each.subject, each.subject)
        assert any(re.split(r"[<>=]", one)[0] == name for one in brought)
    by_name = re.compile(rf"(?<!\S)['\"`]?{re.escape(project['name'])}\[")
    texts = [*ROOT.glob("*.md"), *(ROOT / "docs").glob("*.md"), *ROOT.glob("systems/**/*.py"), *ROOT.glob("harness/**/*.py")]
    assert len(texts) > 200 and not [path for path in texts if by_name.search(path.read_text())]


@pytest.mark.parametrize(("compiler", "lacks"), [("true", False), ("false", True)])
def test_doctor_asks_the_compiler_for_libaio(compiler: str, lacks: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", compiler)
    found = doctor.libaio()
    assert bool(found.advice) == lacks
    assert ("libaio-dev" in found.advice) == lacks
