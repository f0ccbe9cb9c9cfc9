"""The README's and the documents' examples of an own loop run as shown, with the installed library, whatever the user's own
folders are called; the README's results are those of the records that it names.
"""

from __future__ import annotations

import json
import os
import re
import shutil
import subprocess
import sys
import tomllib
import zipfile
from pathlib import Path

import pytest
import torch
import transformers

from systems.native.build import PROJECT, cache_directory
from systems.sizes import parse_size
from tests.test_commands import FENCED, alike
from tests.test_docs import DOCUMENTS, README, ROOT, text_of

OWN_LOOP, PLAN = ROOT / "docs" / "own-loop.md", ROOT / "docs" / "plan.md"
ELSEWHERE = {ROOT / "docs" / "losses.md": 2, ROOT / "docs" / "trainer.md": 2}  # systems/test_losses.py, integrations
BF16 = 2**-6
RESULTS = ("resident", "elixir", "deepspeed-zero2-offload", "elixir")
COUNTED = {3: "three"}
PACKAGES = ("models", "systems", "harness", "paper_figures")
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
WENT_ON = """
resumed = schedule.optimizer.param_groups
assert [group["lr"] for group in resumed] == [group["lr"] for group in groups] == schedule.get_last_lr()
assert schedule.last_epoch == loop["step"] == 5 and all(group["params"] for group in resumed)
went_on = {name: value.bfloat16() for name, value in torch.load("weights.pt").items()}
assert all(torch.equal(value, went_on[name]) for name, value in model.state_dict().items())
"""
ALL_OF_IT = """
import importlib, pathlib, pkgutil
assert pathlib.Path(systems.__file__).parents[1].name == "site"
for module in pkgutil.walk_packages(systems.__path__, "systems."):
    importlib.import_module(module.name)
"""


def sources(folder: Path) -> set[str]:
    """Relative paths of all files of the packages, but for what Python leaves there."""
    paths = (path for package in PACKAGES for path in (folder / package).rglob("*"))
    return {p.relative_to(folder).as_posix() for p in paths if p.is_file() and p.suffix != ".pyc"}


@pytest.fixture(scope="module")
def wheel(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Built of a copy, since a build leaves folders in its tree, and takes up what an earlier one has left."""
    tree, out = tmp_path_factory.mktemp("tree"), tmp_path_factory.mktemp("wheel")
    for name in ("pyproject.toml", "README.md"):
        shutil.copy(ROOT / name, tree)
    for package in PACKAGES:
        shutil.copytree(ROOT / package, tree / package, ignore=shutil.ignore_patterns("__pycache__"))
    command = [sys.executable, "-c", BUILD, str(out)]
    built = subprocess.run(command, cwd=tree, capture_output=True, text=True, timeout=100, check=False)
    assert built.returncode == 0, built.stderr[-2000:]
    return next(out.iterdir())


def test_the_wheel_has_every_file(wheel: Path) -> None:
    with zipfile.ZipFile(wheel) as archive:
        packed = {name for name in archive.namelist() if ".dist-info/" not in name}
    assert packed == sources(ROOT)
    assert tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["name"] == PROJECT


class Own:
    """A folder of a user's, with folders called as this project's are, beside the installed library."""

    def __init__(self, root: Path, wheel: Path) -> None:
        self.root, self.site, self.folder = root, root / "site", root / "own"
        with zipfile.ZipFile(wheel) as archive:
            archive.extractall(self.site)
        for name in ("models", "harness", "tests", "paper_figures"):
            (self.folder / name).mkdir(parents=True)
            (self.folder / name / "__init__.py").write_text("raise ImportError('these are the user\\'s own')")
        for folder in (self.site, self.folder):
            (folder / "pyproject.toml").write_text("[project]\nname = 'theirs'\n")

    def run(self, text: str) -> str:
        """What a program of the user's prints. An installed library needs no more than its own name."""
        script = self.folder / "own_loop.py"
        script.write_text(text)
        packages = [str(self.site), *filter(None, [os.environ.get("PYTHONPATH", "").replace(str(ROOT), "")])]
        environment = {"PYTHONPATH": os.pathsep.join(packages), "PATH": "/usr/bin:/bin", "HOME": str(self.root)}
        environment["OMP_NUM_THREADS"] = "1"
        environment["XDG_CACHE_HOME"] = str(
            cache_directory().parent
        )  # what is compiled once is not compiled again for this HOME
        command = [sys.executable, str(script)]
        done = subprocess.run(
            command, cwd=self.folder, env=environment, capture_output=True, text=True, timeout=250, check=False
        )
        assert done.returncode == 0, done.stderr[-2000:]
        return done.stdout


@pytest.fixture
def own(wheel: Path, tmp_path: Path) -> Own:
    return Own(tmp_path, wheel)


def blocks(path: Path, language: str = "python") -> list[str]:
    return [block for found, block in FENCED.findall(text_of(path)) if found == language]


def test_every_block_of_python_is_run() -> None:
    """In the README and docs/own-loop.md by the tests below; a file that a command takes, by the tests of commands."""
    found = {path: blocks(path) for path in DOCUMENTS if blocks(path)}
    assert {path: len(those) for path, those in found.items()} == {README: 1, OWN_LOOP: 3, PLAN: 2, **ELSEWHERE}
    file, _ = found[PLAN]
    assert file.startswith("# mine.py\n") and "--model mine:build" in text_of(PLAN)


def test_the_loop_of_the_readme_prints_what_is_shown(own: Own) -> None:
    """Losses to what other kernels in bf16 make of them."""
    (block,) = blocks(README)
    (shown,) = (block for block in blocks(README, "") if block.startswith("step 0: loss "))
    printed = own.run(block + ALL_OF_IT)
    numbers = [[float(number.replace(",", "")) for number in re.findall(r"[\d.,]*\d", text)] for text in (shown, printed)]
    assert re.sub(r"[\d.,]*\d", "0", shown) == re.sub(r"[\d.,]*\d", "0", printed)
    assert numbers[0] == pytest.approx(numbers[1], rel=BF16)


@pytest.mark.long
def test_the_estimate_prints_what_is_shown(own: Own) -> None:
    """Line by line, figures to what another build of torch observes."""
    (block,) = (block for block in blocks(PLAN) if "systems.estimate(" in block)
    (shown,) = (block for block in blocks(PLAN, "") if block.startswith("LlamaForCausalLM"))
    printed = own.run(block)
    assert len(shown.splitlines()) == len(printed.splitlines()) > 5, printed
    for mine, other in zip(shown.splitlines(), printed.splitlines(), strict=True):
        assert alike(mine, other), other


@pytest.mark.long
def test_own_loop_runs_as_shown(own: Own) -> None:
    printed = own.run("".join(blocks(OWN_LOOP)) + WENT_ON + ALL_OF_IT)
    trained = transformers.GPT2LMHeadModel.from_pretrained(own.folder / "trained")
    masters = torch.load(own.folder / "weights.pt")
    assert trained.dtype == torch.bfloat16
    folders = [own.folder / name / "model.safetensors" for name in ("trained", "again")]
    assert folders[0].read_bytes() == folders[1].read_bytes(), "what came in goes out"
    assert all(torch.equal(value, masters[name].bfloat16()) for name, value in trained.state_dict().items())
    assert str(trained.float().load_state_dict(masters)) == "<All keys matched successfully>"
    (peak,) = map(int, re.findall(r"^\[[^\]]*\] (\d+)$", printed, flags=re.MULTILINE))
    assert 0 < peak <= 8 << 20


def test_the_results_of_the_readme_are_those_of_its_records() -> None:
    """Of runs with default options on the device that the table names."""
    (device, *_), *shown = results()
    parameters = 0
    assert len(shown) == len(RESULTS)
    for (what, peak, step, rate, run), system in zip(shown, RESULTS, strict=True):
        record = json.loads((ROOT / "results" / f"{run.strip('`')}.json").read_text())
        spec, resolved, metrics = record["spec"], record["resolved"], record["metrics"]
        assert (record["status"], spec["system"], spec["option"]) == ("ok", system, []) and f"`{system}`" in what
        assert (spec["dtype"], spec["recompute"], resolved["tokens_per_step"]) == ("bf16", "full", 16 << 10)
        assert device == f"bf16, 16K tokens a step, recomputation, one {resolved['device_label'].removeprefix('NVIDIA ')}"
        assert f"{record['memory']['device_peak_bytes'] / (1 << 30):.2f}GiB" == peak
        assert f"{metrics['mean_step_time_s']:.3f} s" == step  # with the work behind the last boundary, as in the rate
        assert f"{metrics['tokens_per_s']:,.0f}" == rate
        if given := re.match(r"\d+\.(\d+) billion parameters", what):
            parameters = resolved["parameters"]
            assert given[0] == f"{parameters / 1e9:.{len(given[1])}f} billion parameters"
        else:
            assert what.startswith("the same ") and resolved["parameters"] == parameters
        budget = re.search(r"in (\w+GiB)$", what)
        assert system == "resident" or spec["device_memory"] == (parse_size(budget[1]) if budget else None)
        assert (len(metrics["step_time_s"]) == 1) == what.endswith("one timed step")
    assert f"the last with {round(record['memory']['host_budget_bytes'] / (1 << 30))}GiB of host memory" in text_of(README)


def test_what_two_gpus_do_is_what_its_record_says() -> None:
    found = re.search(r"On two (\w+) and (\d+)GiB (\S+) takes (\S+) s a step: `(\S+)`, (\w+) steps", text_of(README))
    assert found
    device, host, model, step, run, steps = found.groups()
    record = json.loads((ROOT / "results" / f"{run}.json").read_text())
    spec, resolved = record["spec"], record["resolved"]
    assert (record["status"], spec["ranks"], spec["model"], spec["option"]) == ("ok", 2, model, [])
    assert resolved["device_label"] == f"NVIDIA {device}"
    assert round(resolved["host_budget_bytes"] / (1 << 30)) == int(host)
    assert f"{record['metrics']['mean_step_time_s']:.3f}" == step and steps == COUNTED[resolved["timed_steps"]]


def results() -> list[list[str]]:
    """The first table of the README: its head, and its rows."""
    lines = re.findall(r"^\|.*\|$", text_of(README).partition("\n## ")[0], flags=re.MULTILINE)
    return [[cell.strip() for cell in line.strip("|").split("|")] for number, line in enumerate(lines) if number != 1]
