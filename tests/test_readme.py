"""The README's example of an own loop runs as shown, with the installed library, whatever the user's own folders are called."""

from __future__ import annotations

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

ROOT = Path(__file__).resolve().parent.parent
PACKAGES = ("models", "systems", "harness", "paper_figures")
BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"
WENT_ON = """
assert [group["lr"] for group in optimizer.param_groups] == [group["lr"] for group in groups] == schedule.get_last_lr()
assert schedule.last_epoch == 5 and all(group["params"] for group in optimizer.param_groups)
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
    shutil.copy(ROOT / "pyproject.toml", tree)
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


def test_own_loop_runs_as_shown(wheel: Path, tmp_path: Path) -> None:
    """Beside folders called as this project's are, and an installed library needs no more than its own name."""
    blocks = re.findall(r"```python\n(.*?)```", (ROOT / "README.md").read_text(), flags=re.DOTALL)
    assert len(blocks) == 2, "training, and going on from its checkpoint"
    site, own = tmp_path / "site", tmp_path / "own"
    with zipfile.ZipFile(wheel) as archive:
        archive.extractall(site)
    own.mkdir()
    script = own / "own_loop.py"
    script.write_text("".join(blocks) + WENT_ON + ALL_OF_IT)
    for name in ("models", "harness", "tests", "paper_figures"):
        (own / name).mkdir()
        (own / name / "__init__.py").write_text("raise ImportError('these are the user\\'s own')")
    for folder in (site, own):
        (folder / "pyproject.toml").write_text("[project]\nname = 'theirs'\n")
    packages = os.pathsep.join([str(site), *filter(None, [os.environ.get("PYTHONPATH", "").replace(str(ROOT), "")])])
    environment = {"PYTHONPATH": packages, "PATH": "/usr/bin:/bin", "HOME": str(tmp_path), "OMP_NUM_THREADS": "1"}
    environment["XDG_CACHE_HOME"] = str(cache_directory().parent)  # what is compiled once is not compiled again for this HOME
    done = subprocess.run(
        [sys.executable, str(script)],
        cwd=own,
        env=environment,
        capture_output=True,
        text=True,
        timeout=250,
        check=False,
    )
    assert done.returncode == 0, done.stderr[-2000:]
    trained = transformers.GPT2LMHeadModel.from_pretrained(own / "trained")
    masters = torch.load(own / "weights.pt")
    assert trained.dtype == torch.bfloat16
    assert all(torch.equal(value, masters[name].bfloat16()) for name, value in trained.state_dict().items())
    assert str(trained.float().load_state_dict(masters)) == "<All keys matched successfully>"
    peak = int(done.stdout.split()[-1])
    assert 0 < peak <= 8 << 20
