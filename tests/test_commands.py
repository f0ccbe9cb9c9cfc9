"""Every command that the documents name is one: read by the program's own parser, and, where it needs no GPU, run.

A command stands in a fenced block, or in a code span, where it may be a part of one: `harness plan --trace`.
"""

from __future__ import annotations

import importlib
import importlib.util
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
from pydantic import BaseModel
from torch.distributed.run import get_args_parser

from harness import cli
from harness.check import CheckSpec
from harness.compare import CompareSpec, StoredSpec
from harness.export import ExportSpec
from harness.figures import FigureSpec
from harness.ledger import LedgerSpec
from harness.listing import FiguresSpec, HardwareSpec, ModelsSpec, RunsSpec, SystemsSpec
from harness.plan_spec import ALL, PlanSpec
from harness.profile_spec import ProfileSpec
from harness.report.page import ReportSpec
from harness.scale import BatchSpec, ScaleSpec
from harness.spec import RunSpec, flag
from harness.sweep import SweepSpec
from harness.tables import TablesSpec
from models import registry as models_registry
from systems import registry
from systems.errors import UnavailableError
from systems.planning import hardware
from tests.test_docs import DOCUMENTS, README, ROOT, named_from, text_of

BEGINS = re.compile(r"(?:harness|make|python|torchrun) (?! )")
FENCED = re.compile(r"^```(\w*)\n(.*?)^```$", flags=re.MULTILINE | re.DOTALL)
INDENTED = re.compile(r"^    (?=(?:make|harness) )(.*)$", flags=re.MULTILINE)
SPAN = re.compile(r"`([^`]+)`")
TARGET = re.compile(r"^([\w-]+):(?!=)", flags=re.MULTILINE)
SPECS: dict[str, tuple[type[BaseModel], ...]] = {
    "run": (RunSpec,),
    "compare": (CompareSpec, StoredSpec),
    "plan": (PlanSpec,),
    "max-scale": (ScaleSpec,),
    "max-batch": (BatchSpec,),
    "sweep": (SweepSpec,),
    "tables": (TablesSpec,),
    "ledger": (LedgerSpec,),
    "report": (ReportSpec,),
    "check": (CheckSpec,),
    "export": (ExportSpec,),
    "figure": (FigureSpec,),
    "profile": (ProfileSpec,),
    "ls": (SystemsSpec, ModelsSpec, HardwareSpec, FiguresSpec, RunsSpec),
    "doctor": (cli.DoctorSpec,),
}
CALLED = (
    "harness.check.check",
    "harness.export.export",
    "harness.ledger.show_ledger",
    "harness.report.page.write_report",
    "harness.plan.plan",
    "harness.listing._tell",
    "harness.figures.show_figure",
    "harness.profile.take_profile",
    "harness.sweep.sweep_table",
    "harness.tables.write_tables",
)
DONE = 41  # what stands for a command's work gives this
LIMIT_S = 1800
STATE_BYTES = 16  # a parameter
ENDS = {"plan": {0, 1}, "compare": {0, 3}, "doctor": {0, 1}}  # of what does not fit, is no pair, or is lacking here
NEAR = 0.02  # between figures of forecasts of one model by two builds of torch


class Command(NamedTuple):
    """whole: from a block, to be called as it stands."""

    path: Path
    text: str
    whole: bool

    @property
    def words(self) -> list[str]:
        return shlex.split(self.text, comments=True)


def commands_of(path: Path) -> Iterator[Command]:
    text = text_of(path)
    lines = [line.removeprefix("$ ") for language, block in FENCED.findall(text) if not language for line in block.splitlines()]
    yield from (Command(path, line, True) for line in [*lines, *INDENTED.findall(text)] if BEGINS.match(line))
    spans = (" ".join(span.split()) for span in SPAN.findall(FENCED.sub("", text)))
    yield from (Command(path, span, False) for span in spans if BEGINS.match(span))


TABLES = [
    block for path in DOCUMENTS for kind, block in FENCED.findall(text_of(path)) if kind == "toml" and "[[groups]]" in block
]
COMMANDS = [command for path in DOCUMENTS for command in commands_of(path)]


def label(command: Command) -> str:
    return f"{named_from(command.path)}: {command.text}"


def of_program(program: str, *, whole: bool | None = None) -> list[Command]:
    asked = [each for each in COMMANDS if each.words[0] == program]
    return [each for each in asked if whole is None or each.whole is whole]


# ---- harness


@pytest.fixture
def parsed(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> Callable[[Sequence[str]], list[Any]]:
    """What the command line hands on, when all that would do the work is exchanged. For commands without a launcher, in a
    folder with the profile that one of them would have written, and with the kept records.
    """
    found: list[Any] = []
    (tmp_path / "machine.json").write_text(json.dumps({"like": "h100-80g-x1"}))
    (tmp_path / "results").symlink_to(ROOT / "results")
    monkeypatch.chdir(tmp_path)

    def take(*given: Any) -> int:
        found.extend(given)
        return DONE

    for name in ("run", "compare", "compare_kept", "search"):
        monkeypatch.setattr(cli, name, take)
    for place in CALLED:
        monkeypatch.setattr(place, take)
    monkeypatch.setattr("harness.doctor.examine", take)

    def parse(arguments: Sequence[str]) -> list[Any]:
        found.clear()
        assert cli.main(arguments) == DONE
        return list(found)

    return parse


def checked(spec: Any) -> None:
    """Systems, models, options and profiles are looked up."""
    systems = registry.find()
    if isinstance(spec, CompareSpec):
        assert set(spec.system) <= set(systems)
    elif isinstance(spec, RunSpec) and spec.system != ALL:
        assert spec.system in systems
        with suppress(UnavailableError):  # of a package that is not here
            registry.parse_options(registry.get(spec.system), spec.option)
    if isinstance(spec, RunSpec | CompareSpec) and ":" not in str(spec.model):
        models_registry.resolve(str(spec.model), registry.split_assignments("set", getattr(spec, "set", ())))
    if isinstance(spec, PlanSpec):
        hardware.load(spec.hardware)


@pytest.mark.parametrize("command", of_program("harness", whole=True), ids=label)
def test_harness_commands_are_understood(command: Command, parsed: Callable[[Sequence[str]], list[Any]]) -> None:
    for spec in parsed(command.words[1:]):
        checked(spec)


def hanging(words: Sequence[str], specs: Sequence[type[BaseModel]]) -> bool:
    """The last is a flag whose value is left out."""
    switches = {flag(field) for spec in specs for field, info in spec.model_fields.items() if info.annotation is bool}
    return bool(words) and words[-1].startswith("--") and words[-1] not in switches


@pytest.mark.parametrize("command", of_program("harness", whole=False), ids=label)
def test_parts_of_harness_commands_are_understood(command: Command, parsed: Callable[[Sequence[str]], list[Any]]) -> None:
    """A whole one as in a block; one that only names flags names those that there are."""
    _, name, *rest = command.words
    flags = {word.partition("=")[0] for word in rest if word.startswith("--")} - {"--help"}
    known = {flag(field) for spec in SPECS[name] for field in spec.model_fields if field not in getattr(spec, "left_out", ())}
    assert flags <= known | {"--json"}
    needed = {flag(field) for field, info in SPECS[name][0].model_fields.items() if info.is_required()}
    if needed <= flags and "--help" not in rest and not hanging(rest, SPECS[name]):
        for spec in parsed([name, *rest]):
            checked(spec)


def test_all_commands_of_the_harness_are_looked_at() -> None:
    assert SPECS.keys() == cli.COMMANDS.keys() == {command.words[1] for command in of_program("harness")}


# ---- tables of a sweep


@pytest.mark.parametrize("text", TABLES)
def test_tables_of_the_documents_can_be_swept(text: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """As they stand: every row is complete, and its system, model and options are known."""
    (tmp_path / "table.toml").write_text(text)
    code = cli.main(["sweep", str(tmp_path / "table.toml"), "--dry-run", "--results", str(tmp_path / "none")])
    assert code == 0, capsys.readouterr().err
    assert "to run" in capsys.readouterr().out


def test_there_are_tables_in_the_documents() -> None:
    assert len(TABLES) == 2


# ---- make, python, torchrun


@cache
def makefile() -> tuple[frozenset[str], frozenset[str]]:
    """Targets and variables."""
    text = (ROOT / "Makefile").read_text()
    return frozenset(TARGET.findall(text)), frozenset(re.findall(r"^(\w+) [:?]?=", text, flags=re.MULTILINE))


@pytest.mark.parametrize("command", of_program("make"), ids=label)
def test_make_targets_are_there(command: Command) -> None:
    targets, variables = makefile()
    for word in command.words[1:]:
        assert word.partition("=")[0] in (variables if "=" in word else targets)


@pytest.mark.parametrize("command", of_program("python"), ids=label)
def test_modules_are_there_and_have_these_flags(command: Command, capsys: pytest.CaptureFixture[str]) -> None:
    _, switch, module, *rest = command.words
    assert switch == "-m" and importlib.util.find_spec(module) is not None
    with suppress(SystemExit):
        importlib.import_module(module).main(["--help"])
    told = " ".join(capsys.readouterr())
    assert all(word in told for word in rest if word.startswith("--") or re.fullmatch(r"[a-z]+\d*", word)), told


@pytest.mark.parametrize("command", of_program("torchrun"), ids=label)
def test_torchrun_takes_its_flags(command: Command, parsed: Callable[[Sequence[str]], list[Any]]) -> None:
    given = get_args_parser().parse_args(command.words[1:])
    if given.training_script.endswith(".py"):
        assert not given.no_python
        return
    assert given.no_python and given.training_script == "harness"
    for spec in parsed(given.training_script_args):
        checked(spec)


@pytest.mark.parametrize(
    ("words", "told"),
    [
        (["run", "--system", "elixir", "--modell", "opt-tiny"], "--modell"),
        (["plan", "--system", "elixir", "--model", "opt-tini", "--hardware", "h100-80g-x1"], "opt-tini"),
        (["plan", "--system", "elixir", "--model", "opt-tiny", "--hardware", "h100-80g-x9"], "h100-80g-x9"),
        (["plan", "--system", "elixer", "--model", "opt-tiny", "--hardware", "h100-80g-x1"], "elixer"),
    ],
)
def test_what_is_wrong_would_be_found(
    words: list[str], told: str, parsed: Callable[[Sequence[str]], list[Any]], capsys: pytest.CaptureFixture[str]
) -> None:
    with pytest.raises(AssertionError, match="2 == 41"):
        parsed(words)
    assert told in capsys.readouterr().err


def test_targets_are_read() -> None:
    assert "tests" not in makefile()[0] and "test" in makefile()[0]


def test_the_readme_says_no_command_of_several_gpus_that_its_document_does_not() -> None:
    mine = {command.text for command in commands_of(README) if "--ranks" in command.text or command.text.startswith("torchrun")}
    assert len(mine) == 4
    pages = [ROOT / "docs" / name for name in ("several-gpus.md", "harness.md")]
    assert mine <= {command.text.partition("  #")[0].rstrip() for page in pages for command in commands_of(page)}


# ---- run


def needs_a_gpu(command: Command) -> bool:
    """Sizes that train on a GPU alone, and runs on hosts that are not here."""
    words = command.words
    return words[1] in ("run", "compare", "max-scale", "max-batch", "sweep") and "--device cpu" not in command.text


def own_files(folder: Path) -> None:
    """The files that the documents tell to write: blocks of python that begin with their name."""
    for path in DOCUMENTS:
        for language, block in FENCED.findall(text_of(path)):
            if language == "python" and (name := re.match(r"# (\w+\.py)\n", block)):
                (folder / name[1]).write_text(block)


def called(words: Sequence[str], folder: Path) -> subprocess.CompletedProcess[str]:
    """In an empty folder, as a user of this Python would call it."""
    programs = {"harness": ["-m", "harness"], "torchrun": ["-m", "torch.distributed.run"], "python": []}
    command = [sys.executable, *programs[words[0]]]
    for word in words[1:]:
        command += [sys.executable, "-m", "harness"] if word == "harness" and words[0] == "torchrun" else [word]
    told = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    return subprocess.run(command, cwd=folder, env=told, capture_output=True, text=True, timeout=LIMIT_S, check=False)


@pytest.mark.long
def test_make_run_does_what_is_said(tmp_path: Path) -> None:
    """Its recipe, but for the set-up: a budget below the states', and a record."""
    (recipe,) = re.findall(r"^run: .*\n\t\$\(BIN\)python3 (.*)$", (ROOT / "Makefile").read_text(), flags=re.MULTILINE)
    done = called(["python", *shlex.split(recipe), "--results", str(tmp_path / "kept")], tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    (kept,) = (tmp_path / "kept").iterdir()
    record = json.loads(kept.read_text())
    assert record["memory"]["device_peak_bytes"] <= record["memory"]["device_budget_bytes"]
    assert record["memory"]["device_budget_bytes"] < STATE_BYTES * record["resolved"]["parameters"]


def alike(shown: str, printed: str) -> bool:
    """Word by word; figures, with their unit, to NEAR."""
    pairs = list(zip(shown.split(), printed.split(), strict=False))
    return len(shown.split()) == len(printed.split()) and all(mine == other or near(mine, other) for mine, other in pairs)


def near(shown: str, printed: str) -> bool:
    found = [re.fullmatch(r"([\d.]+(?:e\+\d+)?)(\w*)", word) for word in (shown, printed)]
    if found[0] is None or found[1] is None or found[0][2] != found[1][2]:
        return False
    return float(found[0][1]) == pytest.approx(float(found[1][1]), rel=NEAR)


@pytest.mark.long
def test_the_plan_of_the_readme_prints_what_is_shown(tmp_path: Path) -> None:
    """Its first table. Systems may stand in another order where their times are almost the same."""
    (block,) = (block for _, block in FENCED.findall(text_of(README)) if block.startswith("$ harness plan"))
    command, *shown = block.splitlines()
    done = called(shlex.split(command.removeprefix("$ ")), tmp_path)
    assert done.returncode == 0, done.stderr[-2000:]
    printed = [line for line in done.stderr.partition("└")[0].splitlines() if line]
    rows = {line.split()[1]: line for line in printed if line.startswith("│")}
    assert len(rows) == len([line for line in shown if line.startswith("│")]) > 1
    assert all(alike(line, rows[line.split()[1]]) for line in shown if line.startswith("│")), done.stderr
    others = [line.split() for line in shown if not line.startswith(("│", "┏", "┡", "└"))]
    assert others == [line.split() for line in printed[: len(shown)] if not line.startswith(("│", "┏", "┡", "└"))]


def test_unlike_figures_are_seen() -> None:
    assert alike("│ h3t │ 1.058 │ 15.76GiB │", "│ h3t │ 1.06 │ 15.8GiB │")
    assert not alike("│ h3t │ 1.058 │ 15.76GiB │", "│ h3t │ 1.1 │ 15.76GiB │")
    assert not alike("│ h3t │ 1.058 │ 15.76GiB │", "│ h3t │ 1.058 │ 15.76MiB │")
    assert not alike("│ h3t │ yes │", "│ h3t │ no │")


@pytest.mark.slow
@pytest.mark.timeout(2 * LIMIT_S)
@pytest.mark.parametrize("path", DOCUMENTS, ids=named_from)
def test_commands_that_need_no_gpu_run(path: Path, tmp_path: Path) -> None:
    """One after the other, in one folder: a later one may go on from an earlier one's checkpoint."""
    own_files(tmp_path)
    (tmp_path / "docs").mkdir()
    for name in ("results.md", "claims.md"):
        shutil.copy(ROOT / "docs" / name, tmp_path / "docs")
    (tmp_path / "data").mkdir()
    for command in dict.fromkeys(commands_of(path)):
        if not command.whole or command.words[0] not in ("harness", "python") or needs_a_gpu(command):
            continue
        words = [word.replace("/data", str(tmp_path / "data")) for word in command.words]
        words += ["--results", str(ROOT / "results")] if words[1] in ("tables", "ledger", "report") else []
        done = called(words, tmp_path)
        assert done.returncode in ENDS.get(words[1], {0}), f"{command.text}: {done.stderr[-2000:]}"
