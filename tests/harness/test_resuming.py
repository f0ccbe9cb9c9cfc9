"""--checkpoint, --save-every, --resume: a run in two parts is the run in one, under whichever systems (C17, C33)."""

from __future__ import annotations

import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from safetensors import SafetensorError

from harness import cli, running
from harness.record import Record
from harness.spec import BadInputError, RunSpec
from harness.wandb_log import _curves
from models.registry import parameter_count, resolve
from systems import checkpoint
from tests.harness.conftest import make_spec

Run = Callable[..., Record]
WORK: dict[str, Any] = {
    "model": "opt-tiny",
    "set": ("num_layers=2", "dropout=0.1"),
    "seq_len": 32,
    "dtype": "fp32",
    "accumulate": 2,
    "clip": 1.0,
    "schedule": "cosine",
    "steps": 6,
    "option": (),
}


@pytest.fixture
def first_saves(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """Copies of the checkpoints that a run writes."""
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    kept: list[Path] = []
    save = checkpoint.save

    def saving(engine: Any, folder: Any, **beside: Any) -> None:
        save(engine, folder, **beside)
        kept.append(tmp_path / f"copy-{len(kept)}")
        shutil.copytree(folder, kept[-1])

    monkeypatch.setattr(running.checkpoint, "save", saving)
    return kept


@pytest.mark.parametrize(("before", "after"), [("resident", "elixir"), ("patrickstar", "h3t")])
def test_two_parts_are_the_whole(before: str, after: str, run_here: Run, first_saves: list[Path], tmp_path: Path) -> None:
    whole = run_here(make_spec(**WORK, system="resident"))
    folder = tmp_path / "kept"
    part = run_here(make_spec(**WORK, system=before, device_memory=None, checkpoint=str(folder), save_every=4))
    assert [checkpoint.position(each).steps for each in first_saves] == [4, 6]
    assert checkpoint.position(folder).steps == 6
    assert part.metrics.loss == whole.metrics.loss
    assert part.phases_s["save"] > 0 and part.phases_s["last_save"] > 0
    rest = run_here(make_spec(**WORK, system=after, resume=str(first_saves[0])))
    assert (rest.status, rest.reason) == ("ok", None)
    assert rest.metrics.loss == whole.metrics.loss[4:]
    assert rest.metrics.grad_norm_before_clip == whole.metrics.grad_norm_before_clip[4:]
    assert rest.samples.learning_rate == whole.samples.learning_rate[4:]
    steps = rest.resolved.steps, rest.resolved.steps_before, rest.resolved.warmup_steps, rest.resolved.timed_steps
    assert steps == (6, 4, 1, 1)
    assert rest.phases_s["resume"] > 0 and len(rest.metrics.step_time_s) == 1


def test_the_same_command_finishes_what_was_stopped(run_here: Run, first_saves: list[Path], tmp_path: Path) -> None:
    """Nothing more is due of its --save-every and its --eval-every; saves and validations go by the steps of the whole."""
    asked: dict[str, Any] = {"system": "resident", "steps": 6, "save_every": 4, "checkpoint": str(tmp_path / "kept")}
    whole = run_here(make_spec(**asked, eval_every=2))
    rest = run_here(make_spec(**asked, eval_every=2, resume=str(first_saves[0])))
    assert (rest.status, rest.metrics.eval_step, rest.metrics.eval_loss) == ("ok", [6], whole.metrics.eval_loss[2:])
    assert [list(row) for row in _curves(rest)] == [list(row) for row in _curves(whole)[4:]] and "eval_loss" in _curves(rest)[1]
    rest = run_here(make_spec(**asked, eval_every=4, resume=str(first_saves[0])))
    assert (rest.status, rest.metrics.eval_step, rest.metrics.loss) == ("ok", [], whole.metrics.loss[4:])


def test_requests_that_cannot_be(run_here: Run, first_saves: list[Path], tmp_path: Path) -> None:
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").write_text("")
    run_here(make_spec(system="resident", steps=2, checkpoint=str(tmp_path / "good")))
    good = str(tmp_path / "good")
    for fields, said in (
        ({"resume": str(tmp_path / "none")}, "there is no checkpoint in"),
        ({"resume": good, "steps": 2}, "has taken 2 steps, and --steps 2 counts them"),
        ({"resume": good, "steps": 4, "warmup": 2}, "nothing is left to time after --warmup 2: raise --steps or lower"),
        ({"resume": good, "steps": 5, "warmup": 1, "eval_every": 6}, "--eval-every 6 is never reached in 5 steps"),
        ({"checkpoint": good, "save_every": 9}, "--save-every 9 is never reached in 4 steps"),
        ({"checkpoint": str(tmp_path / "other")}, "is there and is no checkpoint"),
        ({"checkpoint": "/proc/none/here"}, "no checkpoint can be written in /proc/none"),
    ):
        with pytest.raises(BadInputError) as caught:
            run_here(make_spec(system="resident", **fields))
        assert said in str(caught.value) and "\n" not in str(caught.value)


def test_what_only_the_model_shows_is_refused_with_a_record(run_here: Run, first_saves: list[Path], tmp_path: Path) -> None:
    record = run_here(make_spec(checkpoint=str(tmp_path / "x")))  # of the scripted system, which has no state
    assert record.status == "refused" and record.reason is not None and "keeps its state" in record.reason.message
    run_here(make_spec(system="resident", steps=2, checkpoint=str(tmp_path / "good")))
    record = run_here(make_spec(system="elixir", resume=str(tmp_path / "good"), set=("num_layers=3",)))
    assert (record.status, record.reason and record.reason.phase) == ("refused", "resume")
    assert record.reason is not None and "is of another model" in record.reason.message


def test_a_disk_that_fills_up_at_the_end_keeps_what_was_measured(
    run_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    said = "Error while serializing: I/O error: No space left on device (os error 28)"
    monkeypatch.setattr(checkpoint.tensors, "save_file", lambda *_: (_ for _ in ()).throw(SafetensorError(said)))
    record = run_here(make_spec(system="resident", checkpoint=str(tmp_path / "x")))
    assert record.status == "oom" and record.reason is not None
    assert (record.reason.phase, record.reason.tier) == ("save", "disk")
    assert record.metrics.tokens_per_s is not None and len(record.metrics.loss) == 4
    assert list(tmp_path.iterdir()) == []


def test_room_is_looked_for_before_training(run_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """For two checkpoints where the last is replaced on the way; nothing is trained and nothing is left behind."""
    need = 12 * parameter_count(resolve("opt-tiny"))
    for every, free, said in ((2, need + need // 2, "each save writes a checkpoint of"), (4, need - 1, "the checkpoint takes")):
        monkeypatch.setattr(checkpoint.saving.shutil, "disk_usage", lambda _, f=free: shutil._ntuple_diskusage(f, 0, f))
        asked = make_spec(system="resident", model="opt-tiny", checkpoint=str(tmp_path / "x"), steps=4, save_every=every)
        record = run_here(asked)
        assert record.status == "refused" and record.reason is not None and record.metrics.loss == []
        assert (record.reason.phase, record.reason.tier, record.reason.have) == ("room", "disk", free)
        assert said in record.reason.message and str(tmp_path / "x") in record.reason.message
    assert list(tmp_path.iterdir()) == []


def test_a_folder_that_is_removed_during_a_save(
    run_here: Run, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    write = checkpoint.tensors.save_file

    def save_file(held: Any, path: Path) -> None:
        shutil.rmtree(path.parent.parent)
        write(held, path)

    monkeypatch.setattr(checkpoint.tensors, "save_file", save_file)
    record = run_here(make_spec(system="resident", checkpoint=str(tmp_path / "x")))
    assert record.status == "failed" and record.reason is not None and record.reason.phase == "save"
    assert "was not written: No such file or directory" in record.reason.message
    assert len(record.metrics.loss) == 4 and "Traceback" not in capsys.readouterr().err


@pytest.mark.parametrize(
    ("fields", "said"),
    [
        (("--save-every", "2"), "--save-every 2 needs a folder: name it with --checkpoint"),
        (("--checkpoint", "x", "--repeat", "2"), "--checkpoint is of one run: leave out --repeat 2"),
        (("--checkpoint", "x", "--save-every", "0"), "--save-every"),
        (("--checkpoint", ""), "--checkpoint"),
        (("--resume", ""), "--resume"),
    ],
)
def test_flags_that_do_not_go_together(fields: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["run", "--system", "resident", "--model", "opt-tiny", *fields]) == 2
    assert said in capsys.readouterr().err
    pair = ("compare", "--system", "resident", "--system", "elixir", "--model", "opt-tiny", "--checkpoint", "x")
    assert cli.main(pair) == 2
    assert "a checkpoint is of one run" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("steps", "warmup", "resolved"), [(None, None, (18, 3)), (8, None, (8, 2)), (8, 0, (8, 0)), (6, None, (6, 0))]
)
def test_steps_count_those_before(steps: int | None, warmup: int | None, resolved: tuple[int, int]) -> None:
    assert RunSpec(system="s", model="m", steps=steps, warmup=warmup).resolve_steps(taken=5) == resolved
