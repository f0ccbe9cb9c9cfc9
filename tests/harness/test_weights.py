"""--weights: a run begins with the values of a folder in transformers' format, or says by name why it does not."""

from __future__ import annotations

import math
import shutil
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from harness import cli
from harness.compare import CompareSpec
from harness.flags import parse
from harness.record import Record
from harness.spec import BadInputError, RunSpec
from models import registry
from tests.harness.conftest import make_spec

Run = Callable[..., Record]
WORK: dict[str, Any] = {"dtype": "fp32", "steps": 2, "warmup": 0, "batch_size": 2, "seq_len": 16, "option": ()}
SAFE = "model.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """opt-tiny with values of its own, in bf16."""
    shape = registry.resolve("opt-tiny")
    model: Any = registry.build(shape).to_empty(device="cpu")
    generator = torch.Generator().manual_seed(5)
    for parameter in model.parameters():
        parameter.data.normal_(0, 0.1, generator=generator)
    folder = tmp_path_factory.mktemp("opt")
    model.tie_weights()
    model.bfloat16().save_pretrained(folder)
    return folder


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


@pytest.mark.parametrize("system", ["resident", "elixir"])
def test_a_run_begins_with_them(system: str, saved: Path, run_here: Run, tmp_path: Path) -> None:
    """By a model's name, and by the folder's config.json; a rate of zero leaves them as they are."""
    drawn = run_here(make_spec(system=system, model="opt-tiny", **WORK))
    named = run_here(make_spec(system=system, model="opt-tiny", weights=str(saved), **WORK))
    kept = str(tmp_path / "kept")
    own = run_here(
        make_spec(system=system, model=str(saved), weights=str(saved), lr=0.0, weight_decay=0.0, checkpoint=kept, **WORK)
    )
    assert named.status == own.status == "ok"
    assert drawn.metrics.loss[0] != named.metrics.loss[0] == own.metrics.loss[0]
    (folder,) = (tmp_path / "kept").glob("data-*")
    values = {
        name.removeprefix("value/"): value
        for file in folder.glob("state-*.safetensors")
        for name, value in load_file(file).items()
        if name.startswith("value/")
    }
    theirs = load_file(saved / SAFE)
    assert values.keys() == theirs.keys()
    assert all(torch.equal(value, theirs[name].float()) for name, value in values.items())


def spoilt(saved: Path, to: Path, change: Callable[[Path], object]) -> str:
    shutil.copytree(saved, to)
    change(to)
    return str(to)


def pickled(folder: Path) -> None:
    torch.save(load_file(folder / SAFE), folder / "pytorch_model.bin")
    (folder / SAFE).unlink()


def test_what_cannot_be_is_one_line(saved: Path, run_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Before anything is built, and before a pickle that another flag would take is looked into."""
    monkeypatch.setattr(torch, "load", lambda *_, **__: pytest.fail("a pickle was read"))
    lacking = spoilt(saved, tmp_path / "lacking", lambda f: save_file({"x": torch.ones(1)}, f / SAFE))
    bin_only = spoilt(saved, tmp_path / "bin", pickled)
    for fields, said in (
        ({"model": "opt-tiny", "weights": "none"}, "none is no folder, and nothing is downloaded"),
        ({"model": "opt-tiny", "weights": lacking}, "holds no weights for model.decoder"),
        ({"model": "bert-tiny", "weights": str(saved)}, "holds no weights for bert."),
        ({"model": bin_only, "weights": bin_only}, "pytorch_model.bin is not read"),
        ({"model": "opt-tiny", "weights": str(saved), "set": ("hidden_size=32",)}, "has shape"),
    ):
        with pytest.raises(BadInputError) as caught:
            run_here(make_spec(system="resident", **(WORK | fields)))
        assert said in str(caught.value) and "\n" not in str(caught.value)
    with pytest.raises(ValueError, match=r"--resume here brings its weights along: leave out --weights"):
        make_spec(weights=str(saved), resume="here")


SCALED = """
import torch

class Scaled(torch.nn.Module):
    def __init__(self):
        super().__init__()
        self.embedding, self.head = torch.nn.Embedding(300, 8), torch.nn.Linear(8, 300)
        self.register_buffer("scale", torch.ones(1))

    def forward(self, input_ids, **_):
        return self.head(self.embedding(input_ids)) * self.scale
"""


def test_a_module_of_the_user_s_gets_its_buffers_too(run_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """With a scale of zero all tokens are as likely."""
    (tmp_path / "user_scaled.py").write_text(SCALED)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "user_scaled", raising=False)
    shapes = {"embedding.weight": (300, 8), "head.weight": (300, 8), "head.bias": (300,)}
    values = {name: torch.randn(shape, generator=torch.Generator().manual_seed(1)) for name, shape in shapes.items()}
    save_file(values | {"scale": torch.zeros(1)}, tmp_path / SAFE)
    given: dict[str, Any] = {"system": "resident", "model": "user_scaled:Scaled", **WORK}
    drawn, named = run_here(make_spec(**given)), run_here(make_spec(**given, weights=str(tmp_path)))
    assert drawn.status == named.status == "ok"
    assert drawn.metrics.loss[0] != named.metrics.loss[0] == pytest.approx(math.log(300), rel=1e-6)


def test_the_folder_stands_for_the_model() -> None:
    asked = parse(RunSpec, ["--system", "elixir", "--weights", "folder"], prog="run")
    assert (asked.model, asked.weights) == ("folder", "folder")
    assert parse(RunSpec, ["--system", "elixir", "--weights", "folder", "--model", "opt-tiny"], prog="run").model == "opt-tiny"
    both = parse(CompareSpec, ["--system", "elixir", "--system", "resident", "--weights", "folder"], prog="compare")
    assert both.model == "folder"
    with pytest.raises(BadInputError, match="--model is missing"):
        parse(RunSpec, ["--system", "elixir"], prog="run")
    assert cli.main(["plan", "--system", "elixir", "--weights", "folder", "--hardware", "x"]) == 2
