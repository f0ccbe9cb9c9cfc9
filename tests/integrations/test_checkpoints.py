"""Runs under Trainer that are saved go on in another process as if they had never stopped, and no pickle is written or read."""

from __future__ import annotations

import json
import os
import random
import shutil
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import safetensors.torch
import torch
from transformers import AutoModelForCausalLM, Trainer

from systems.checkpoint import CheckpointError
from systems.errors import UnsupportedError
from systems.integrations.loop_state import random_state, restore_random
from tests.integrations.training import (
    OFFLOAD,
    Ran,
    arguments,
    finished,
    logs_of,
    never_unpickled,
    offloaded,
    opt,
    plain,
    trainer_of,
)
from tests.systems.test_checkpoint import data, rehash

ROOT = Path(__file__).resolve().parents[2]
PICKLED = (".pt", ".pth", ".bin", ".pkl")


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Ran]:
    """A folder with a checkpoint after each of six steps, and the run that left them."""
    folder = tmp_path_factory.mktemp("saved")
    trainer = offloaded(folder, save_strategy="steps", save_steps=1, save_total_limit=None)
    trainer.train()
    return folder, finished(trainer)


@pytest.mark.parametrize("step", [2, 3], ids=["within an epoch", "between epochs"])
@pytest.mark.one_in(2)
def test_a_run_goes_on_in_a_fresh_process(saved: tuple[Path, Ran], tmp_path: Path, step: int) -> None:
    folder, whole = saved
    command = [sys.executable, "-m", "tests.integrations.training", str(tmp_path), str(folder / f"checkpoint-{step}")]
    alike = os.environ | {"OMP_NUM_THREADS": str(torch.get_num_threads())}  # how many there are decides bits
    done = subprocess.run(command, cwd=ROOT, env=alike, capture_output=True, text=True, timeout=200, check=False)
    assert done.returncode == 0, done.stderr[-2000:]
    assert json.loads(done.stdout.splitlines()[-1]) == whole.logs
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert weights.keys() == whole.weights.keys()
    assert all(torch.equal(value, whole.weights[name]) for name, value in weights.items())


def test_no_pickle_is_written(saved: tuple[Path, Ran]) -> None:
    folder, _ = saved
    files = [path for path in folder.rglob("*") if path.is_file()]
    assert len({path.parent for path in files if path.name == "checkpoint.json"}) == 6
    assert not [path for path in files if path.suffix in PICKLED]


def test_a_checkpoint_s_weights_are_for_from_pretrained(saved: tuple[Path, Ran]) -> None:
    folder, whole = saved
    state = AutoModelForCausalLM.from_pretrained(folder / "checkpoint-6").state_dict()
    assert all(torch.equal(value, whole.weights[name]) for name, value in state.items())


@pytest.mark.parametrize(
    "offload", [{"system": "resident"}, {"system": "h3t", "device_memory": "3MiB"}], ids=lambda o: o["system"]
)
def test_another_system_goes_on(saved: tuple[Path, Ran], tmp_path: Path, offload: dict[str, Any]) -> None:
    folder, whole = saved
    trainer = offloaded(tmp_path, offload=offload)
    trainer.train(resume_from_checkpoint=str(folder / "checkpoint-4"))
    ran = finished(trainer)
    assert ran.logs == whole.logs
    assert all(torch.equal(value, whole.weights[name]) for name, value in ran.weights.items())


def test_an_open_engine_goes_back(saved: tuple[Path, Ran], tmp_path: Path) -> None:
    """Where the model's own weights could not be loaded."""
    trainer = offloaded(tmp_path)
    trainer.train()
    trainer.train(resume_from_checkpoint=str(saved[0] / "checkpoint-4"))
    assert finished(trainer).logs == saved[1].logs


def test_the_last_checkpoint_of_the_folder_is_found(saved: tuple[Path, Ran], tmp_path: Path) -> None:
    folder, whole = saved
    shutil.copytree(folder / "checkpoint-5", tmp_path / "checkpoint-5")
    trainer = offloaded(tmp_path)
    trainer.train(resume_from_checkpoint=True)
    assert finished(trainer).logs == whole.logs


def test_a_pickle_is_never_read(saved: tuple[Path, Ran], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What another Trainer saved is refused before it is looked into, and what lies beside ours stays unread."""
    theirs = trainer_of(Trainer, opt(), arguments(tmp_path, max_steps=2, save_strategy="steps", save_steps=2))
    theirs.train()
    monkeypatch.setattr(torch, "load", never_unpickled)
    with pytest.raises(ValueError, match="checkpoint-2 has no folder 'engine', .* another Trainer, whose files are pickles"):
        offloaded(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    shutil.copytree(saved[0] / "checkpoint-4" / "engine", tmp_path / "checkpoint-2" / "engine")
    shutil.copy(saved[0] / "checkpoint-4" / "trainer_state.json", tmp_path / "checkpoint-2")
    trainer = offloaded(tmp_path)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-2"))
    assert finished(trainer).logs == saved[1].logs


def test_what_is_damaged_or_not_there_is_refused(saved: tuple[Path, Ran], tmp_path: Path) -> None:
    shutil.copytree(saved[0] / "checkpoint-4", tmp_path / "checkpoint-4")
    (tmp_path / "checkpoint-4" / "engine" / "checkpoint.json").write_text("{}")
    with pytest.raises(CheckpointError):
        offloaded(tmp_path).train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    args: dict[str, Any] = {"max_steps": 2, "save_strategy": "steps", "save_steps": 2, "save_only_model": True}
    with offloaded(tmp_path / "only", **args) as trainer:
        trainer.train()
    with pytest.raises(ValueError, match="it was saved with save_only_model"):
        offloaded(tmp_path).train(resume_from_checkpoint=str(tmp_path / "only" / "checkpoint-2"))


def test_other_groups_are_refused(saved: tuple[Path, Ran], tmp_path: Path) -> None:
    model = opt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    with (
        trainer_of(
            type(offloaded(tmp_path)), model, arguments(tmp_path), offload=OFFLOAD, optimizers=(optimizer, None)
        ) as trainer,
        pytest.raises(ValueError, match="the optimizer has 1 parameter groups, in the checkpoint 2"),
    ):
        trainer.train(resume_from_checkpoint=str(saved[0] / "checkpoint-4"))


def odd_schedule(optimizer: torch.optim.Optimizer) -> Any:
    schedule: Any = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2)
    schedule.odd = {1, 2}
    return schedule


def milestones(optimizer: torch.optim.Optimizer) -> Any:
    """Counted by numbers: as strings, which JSON makes of keys, they would never be met."""
    return torch.optim.lr_scheduler.MultiStepLR(optimizer, [1])


@pytest.mark.parametrize(
    ("scheduled", "told"),
    [
        (odd_schedule, r"client_state\['schedule'\]\['odd'\] is set, which JSON does not have"),
        (milestones, r"client_state\['schedule'\]\['milestones'\] has the key 1"),
    ],
)
def test_a_schedule_that_json_does_not_hold_is_refused(scheduled: Callable[..., Any], told: str, tmp_path: Path) -> None:
    model = opt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    args = arguments(tmp_path, save_strategy="steps", save_steps=1)
    with (
        trainer_of(
            type(offloaded(tmp_path)), model, args, offload=OFFLOAD, optimizers=(optimizer, scheduled(optimizer))
        ) as trainer,
        pytest.raises(UnsupportedError, match=told),
    ):
        trainer.train()


def test_what_was_saved_before_there_were_client_states_goes_on(saved: tuple[Path, Ran], tmp_path: Path) -> None:
    folder = shutil.copytree(saved[0] / "checkpoint-4", tmp_path / "checkpoint-4") / "engine"
    path = data(folder) / "beside.safetensors"
    held = safetensors.torch.load_file(path)
    held["loop"] = held.pop("client_state")
    safetensors.torch.save_file(held, path)
    rehash(folder)
    trainer = offloaded(tmp_path)
    trainer.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert finished(trainer).logs == saved[1].logs


@pytest.mark.parametrize("kind", ["cosine_with_restarts", "reduce_lr_on_plateau", "inverse_sqrt"])
@pytest.mark.one_in(3)
def test_a_schedule_goes_on(tmp_path: Path, kind: str) -> None:
    given: dict[str, Any] = {"lr_scheduler_type": kind, "save_strategy": "steps", "save_steps": 4, "warmup_steps": 0}
    if kind == "reduce_lr_on_plateau":
        given |= {"metric_for_best_model": "loss", "lr_scheduler_kwargs": {"patience": 0, "threshold": 10.0}}
    trainer = offloaded(tmp_path, **given)
    trainer.train()
    whole = finished(trainer).logs
    again = offloaded(tmp_path / "again", **given)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert finished(again).logs == whole
    assert len({entry["learning_rate"] for entry in whole if "loss" in entry}) > 2


def test_the_best_model_is_loaded_in_the_end(tmp_path: Path) -> None:
    """The best of six steps, whose rate makes the last one worse."""
    given: dict[str, Any] = {"save_strategy": "steps", "save_steps": 1, "eval_steps": 1, "learning_rate": 0.05}
    with offloaded(tmp_path, load_best_model_at_end=True, metric_for_best_model="loss", **given) as trainer:
        trainer.train()
        losses = {entry["step"]: entry["eval_loss"] for entry in logs_of(trainer) if "eval_loss" in entry}
        best = min(losses, key=losses.__getitem__)
        assert best != 6 and trainer.state.best_model_checkpoint == str(tmp_path / f"checkpoint-{best}")
        assert trainer.evaluate()["eval_loss"] == losses[best]
        trainer.save_model()
        weights = safetensors.torch.load_file(tmp_path / "model.safetensors")
    theirs = safetensors.torch.load_file(tmp_path / f"checkpoint-{best}" / "model.safetensors")
    last = safetensors.torch.load_file(tmp_path / "checkpoint-6" / "model.safetensors")
    assert all(torch.equal(value, weights[name]) for name, value in theirs.items())
    assert not all(torch.equal(value, weights[name]) for name, value in last.items())


def test_a_plain_model_is_saved_and_goes_on(tmp_path: Path) -> None:
    given: dict[str, Any] = {"save_strategy": "steps", "save_steps": 4}
    trainer = offloaded(tmp_path, plain(), **given)
    trainer.train()
    trainer.save_model(str(tmp_path / "alone"))
    whole = finished(trainer)
    written = safetensors.torch.load_file(tmp_path / "alone" / "model.safetensors")
    assert all(torch.equal(value, written[name]) for name, value in whole.weights.items())
    again = offloaded(tmp_path / "again", plain(), **given)
    again.train(resume_from_checkpoint=str(tmp_path / "checkpoint-4"))
    assert finished(again).logs == whole.logs


def test_random_generators_come_back() -> None:
    """Each of them, also where numpy and Python have half a pair of normal numbers left."""

    def drawn() -> list[float]:
        return [random.gauss(0, 1), random.random(), np.random.randn(), np.random.rand(), torch.rand(()).item()]

    drawn()
    kept = random_state()
    first = drawn()
    assert drawn() != first
    restore_random(kept)
    assert drawn() == first
