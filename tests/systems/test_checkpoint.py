"""Checkpoints (invariant 14; cases C17 and C33): what any system saved, any other restores, bit for bit."""

from __future__ import annotations

import fcntl
import hashlib
import json
import os
import shutil
import sys
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import systems
from systems import checkpoint
from systems.checkpoint import CheckpointError, SaveError
from systems.errors import BudgetError, UnsupportedError
from systems.system import Engine
from tests.paged import paged
from tests.systems import every, models_small
from tests.systems.models_small import tokens
from tests.systems.running import (
    AMPLE,
    Run,
    adam_states,
    assert_equal,
    elixir,
    finished,
    one_step,
    parameters_of,
    settings,
    start,
)

SYSTEMS: dict[str, Any] = {**every.STRATEGIES, "pages": paged(elixir(), 5), "resident": every.RESIDENT}
LITTLE = 1_300_000
BEFORE, TOGETHER = 2, 4  # steps: the second of a run is planned


def begin(system: str, *, seed: int = 0, frozen: bool = True, **given: Any) -> Engine:
    """seed: of the first weights."""
    model = models_small.build("opt", seed=seed)
    model.model.decoder.layers[1].requires_grad_(not frozen)
    budget = AMPLE if system == "resident" else LITTLE
    return start(SYSTEMS[system], model, settings(**{"device_memory": budget} | given))


def steps_of(engine: Engine, first: int, last: int) -> list[float]:
    accumulate: int = engine.settings.accumulate
    ids = tokens(TOGETHER, accumulate)
    return [one_step(engine, ids[step]) for step in range(first, last)]


def data(folder: Path) -> Path:
    """Where a checkpoint's tensors are."""
    (found,) = folder.glob("data-*")
    return found


def contents(folder: Path) -> dict[str, bytes]:
    return {str(path.relative_to(folder)): path.read_bytes() for path in folder.rglob("*") if path.is_file()}


def whole(**given: Any) -> Run:
    engine = begin("resident", **given)
    return finished(engine, steps_of(engine, 0, TOGETHER))


PAIRS = [
    ("resident", "elixir", {"accumulate": 2, "clip": 0.5}),
    ("elixir", "patrickstar", {}),
    ("patrickstar", "h3t", {"dtype": "bf16"}),
    ("h3t", "pages", {"dtype": "fp16"}),
    ("pages", "resident", {"clip": 0.5}),
    ("elixir", "elixir", {"dtype": "fp16", "accumulate": 2}),
]
OTHERS = [name for name in SYSTEMS if name not in {row[0] for row in PAIRS}]
PAIRS += [(name, "resident", {"dtype": "bf16", "clip": 0.5}) for name in OTHERS]
PAIRS += [("resident", name, {"accumulate": 2}) for name in OTHERS]


@pytest.mark.parametrize(("before", "after", "given"), PAIRS, ids=str)
@pytest.mark.one_in(7)
def test_training_goes_on_as_if_it_had_not_stopped(before: str, after: str, given: dict[str, Any], tmp_path: Path) -> None:
    engine = begin(before, **given)
    losses = steps_of(engine, 0, BEFORE)
    systems.save_checkpoint(engine, tmp_path / "here")
    saved = parameters_of(engine), adam_states(engine)
    engine.close()
    engine = begin(after, seed=1, **given)
    systems.load_checkpoint(engine, tmp_path / "here")
    restored = parameters_of(engine), adam_states(engine)
    assert all(torch.equal(value, restored[0][name]) for name, value in saved[0].items())
    assert saved[1].keys() == restored[1].keys()
    for name, (first, second, updates) in saved[1].items():
        theirs = restored[1][name]
        assert torch.equal(first, theirs.exp_avg) and torch.equal(second, theirs.exp_avg_sq)
        assert updates == theirs.steps == BEFORE
    run, straight = finished(engine, steps_of(engine, BEFORE, TOGETHER)), whole(**given)
    assert [outcome.step for outcome in engine.outcomes] == list(range(BEFORE + 1, TOGETHER + 1))
    run.losses, straight.norms, straight.skipped = losses + run.losses, straight.norms[BEFORE:], straight.skipped[BEFORE:]
    assert_equal(straight, run)


def test_a_run_goes_on_after_it_has_saved_and_may_go_back(tmp_path: Path) -> None:
    """With a plan in force, optimizer states on the device, and updates during backward still to be taken in."""
    options = SYSTEMS["elixir"].Options(nonfinite="stop")
    engine = start(SYSTEMS["elixir"], models_small.build("opt"), settings(device_memory=LITTLE), options)
    steps_of(engine, 0, BEFORE)
    systems.save_checkpoint(engine, tmp_path / "here")
    first = steps_of(engine, BEFORE, TOGETHER)
    systems.load_checkpoint(engine, tmp_path / "here")
    assert steps_of(engine, BEFORE, TOGETHER) == first
    systems.save_checkpoint(engine, tmp_path / "here")
    manifest = json.loads((tmp_path / "here" / checkpoint.MANIFEST).read_text())
    assert manifest["steps"] == TOGETHER and {entry["updates"] for entry in manifest["parameters"].values()} == {TOGETHER}
    assert os.listdir(tmp_path) == ["here"], "what was written before it was complete is gone, and so is what it replaced"
    engine.close()


def test_the_loss_scale_and_skips_go_on(tmp_path: Path) -> None:
    engine: Any = begin("elixir", frozen=False, dtype="fp16")
    handle = engine.module.model.decoder.layers[0].fc1.weight.register_hook(lambda gradient: gradient * torch.inf)
    steps_of(engine, 0, 2)
    handle.remove()
    steps_of(engine, 2, 3)
    engine.drain()
    assert [outcome.skipped for outcome in engine.outcomes] == [True, True, False]
    systems.save_checkpoint(engine, tmp_path / "here")
    engine.close()
    with begin("resident", frozen=False, dtype="fp16") as other:
        loop, beside, _ = checkpoint.load(other, tmp_path / "here")
        assert (loop.steps, loop.skipped_steps, loop.loss_scale, loop.good_steps, loop.skips_in_a_row) == (3, 2, 2.0**14, 1, 0)
        assert beside == {}
        steps_of(other, 3, 4)
        assert (other.outcomes[0].step, other.outcomes[0].loss_scale) == (4, 2.0**14)


def test_large_models_take_several_files(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(checkpoint.tensors, "FILE_BYTES", 100_000)
    own, written, save_one = {"random": torch.arange(5, dtype=torch.uint8)}, [], checkpoint.tensors.save_file

    def save_file(held: dict[str, torch.Tensor], path: Path) -> None:
        written.append([tensor.nbytes for tensor in held.values()])
        save_one(held, path)

    monkeypatch.setattr(checkpoint.tensors, "save_file", save_file)
    with begin("elixir") as engine:
        checkpoint.save(engine, tmp_path / "here", beside=own)
        values = parameters_of(engine)
    assert len(list(data(tmp_path / "here").glob("state-*.safetensors"))) > 3
    assert all(sum(each) <= 100_000 or len(each) == 1 for each in written), "no file has more, and no more is held back"
    with begin("h3t", seed=2) as engine:
        beside = checkpoint.load(engine, tmp_path / "here").beside
        assert all(torch.equal(value, values[name]) for name, value in parameters_of(engine).items())
    modes = {path.stat().st_mode & 0o666 for path in (tmp_path / "here").rglob("*")}
    assert len(modes) == 1, "who may read the folder may read what is in it"
    assert beside.keys() == own.keys() and torch.equal(beside["random"], own["random"])


class Averaging(torch.nn.Module):
    """A persistent average, an integer counter, one buffer under two names, and a table that is built anew."""

    average: torch.Tensor
    again: torch.Tensor
    count: torch.Tensor
    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(8, 8)
        self.register_buffer("average", torch.zeros(8))
        self.register_buffer("again", self.average)
        self.register_buffer("count", torch.tensor(0))
        self.register_buffer("table", torch.arange(8.0), persistent=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.average.mul_(0.9).add_(x.detach().mean(0), alpha=0.1)
        self.count += 1
        return self.layer(x) + self.table + self.average


@pytest.mark.parametrize("system", ["elixir", "resident"])
def test_persistent_buffers_are_in_it(system: str, tmp_path: Path) -> None:
    def run(first: int, last: int, folder: Path | None) -> tuple[list[float], Averaging]:
        torch.manual_seed(0)
        model, losses = Averaging(), []
        with start(SYSTEMS[system], model, settings()) as engine:
            if folder is not None:
                systems.load_checkpoint(engine, folder)
            for step in range(first, last):
                loss = engine(torch.randn(4, 8, generator=torch.Generator().manual_seed(step))).square().mean()
                engine.backward(loss)
                engine.step()
                losses.append(loss.item())
            systems.save_checkpoint(engine, tmp_path / "here")
        return losses, model

    straight, _ = run(0, 4, None)
    before, _ = run(0, 2, None)
    after, model = run(2, 4, tmp_path / "here")
    assert before + after == straight and int(model.count) == 4 and model.again is model.average
    saved = load_file(data(tmp_path / "here") / checkpoint.BUFFERS)
    assert saved.keys() == {"average", "count"} and saved["count"].dtype is torch.int64
    for spoil, message in (
        (lambda: saved.pop("count"), "lacks the buffer count"),
        (lambda: saved.update(count=torch.zeros(2)), "buffer count has the shape"),
        (lambda: saved.update(count=torch.tensor(1), more=torch.zeros(1)), "has the buffer more"),
    ):
        spoil()
        save_file(saved, data(tmp_path / "here") / checkpoint.BUFFERS)
        rehash(tmp_path / "here")
        with pytest.raises(CheckpointError, match=message):
            run(2, 3, tmp_path / "here")


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "good"
    with begin("elixir") as engine:
        steps_of(engine, 0, 1)
        systems.save_checkpoint(engine, folder)
    return folder


NAME = "model.decoder.layers.0.fc1.weight"


def edit(folder: Path, change: Any) -> None:
    """Of the manifest, with a seal that is right."""
    path = folder / checkpoint.MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["seal"]
    change(manifest)
    content = json.dumps(manifest, indent=1).removesuffix("\n}")
    path.write_text(content + f',\n "seal": "{hashlib.sha256(content.encode()).hexdigest()}"\n}}')


def rehash(folder: Path) -> None:
    found = {path.name: path.read_bytes() for path in data(folder).glob("*.safetensors")}
    hashes = {name: {"nbytes": len(held), "sha256": hashlib.sha256(held).hexdigest()} for name, held in found.items()}
    edit(folder, lambda manifest: manifest.update(hashes=hashes))


def rewrite(folder: Path, change: Any) -> None:
    """Of the first file, with a hash that is right."""
    path = data(folder) / "state-00000.safetensors"
    held = load_file(path)
    change(held)
    save_file(held, path)
    rehash(folder)


def cut(folder: Path) -> None:
    path = data(folder) / "state-00000.safetensors"
    path.write_bytes(path.read_bytes()[:-1000])


BROKEN: list[tuple[str, Any, str]] = [
    ("no folder", shutil.rmtree, "there is no checkpoint in"),
    ("no manifest", lambda f: (f / checkpoint.MANIFEST).unlink(), "checkpoint.json is not there"),
    ("no json", lambda f: (f / checkpoint.MANIFEST).write_text("{"), "is broken"),
    ("later format", lambda f: edit(f, lambda m: m.update(format=3)), "broken at format: input should be 1 or 2"),
    ("negative", lambda f: edit(f, lambda m: m.update(steps=-1)), "broken at steps"),
    ("foreign file", lambda f: edit(f, lambda m: m["parameters"][NAME]["files"].update(value="../x.safetensors")), "broken at"),
    ("no parameter", lambda f: edit(f, lambda m: m["parameters"].pop(NAME)), f"lacks {NAME}"),
    ("no hashes", lambda f: edit(f, lambda m: m.pop("hashes")), "hashes are not those of its files"),
    ("another", lambda f: edit(f, lambda m: m["parameters"].update(x=m["parameters"][NAME])), "is of another model: it has x"),
    ("shape", lambda f: edit(f, lambda m: m["parameters"][NAME].update(shape=[1])), f"{NAME} has the shape"),
    (
        "frozen",
        lambda f: edit(f, lambda m: m["parameters"][NAME].update(trainable=False)),
        "is trained, and was frozen",
    ),
    ("no moment", lambda f: edit(f, lambda m: m["parameters"][NAME]["files"].pop("exp_avg")), f"lacks exp_avg of {NAME}"),
    ("no tensor", lambda f: rewrite(f, lambda held: held.pop(f"exp_avg/{NAME}")), f"lacks exp_avg/{NAME}"),
    ("its shape", lambda f: rewrite(f, lambda held: held.update({f"value/{NAME}": torch.zeros(3)})), "expected F32"),
    ("its type", lambda f: rewrite(f, lambda held: held.update({f"value/{NAME}": held[f"value/{NAME}"].half()})), "as F16"),
    ("cut", cut, "cannot be read"),
    ("no file", lambda f: (data(f) / "state-00000.safetensors").unlink(), "cannot be read"),
    ("nothing beside", lambda f: (data(f) / checkpoint.BESIDE).unlink(), "cannot be read"),
]


@pytest.mark.parametrize(("spoil", "message"), [case[1:] for case in BROKEN], ids=[case[0] for case in BROKEN])
@pytest.mark.one_in(2)
def test_what_is_broken_is_named_and_nothing_changes(spoil: Any, message: str, good: Path, tmp_path: Path) -> None:
    folder = tmp_path / "broken"
    shutil.copytree(good, folder)
    spoil(folder)
    with begin("elixir", seed=1) as engine:
        before = parameters_of(engine)
        with pytest.raises(CheckpointError) as caught:
            systems.load_checkpoint(engine, folder)
        assert message in str(caught.value) and "\n" not in str(caught.value)
        assert all(torch.equal(value, before[name]) for name, value in parameters_of(engine).items())
        steps_of(engine, 0, 1)


def test_a_folder_of_something_else_is_left_alone(tmp_path: Path) -> None:
    (tmp_path / "thesis").mkdir()
    (tmp_path / "thesis" / "chapter").write_text("")
    (tmp_path / "file").write_text("")
    with begin("elixir") as engine:
        for name in ("thesis", "file"):
            with pytest.raises(ValueError, match="is there and is no checkpoint"):
                systems.save_checkpoint(engine, tmp_path / name)
        with pytest.raises(ValueError, match="no checkpoint can be written in"):
            systems.save_checkpoint(engine, tmp_path / "file" / "below")
        with pytest.raises(ValueError, match="File name too long"):
            systems.save_checkpoint(engine, tmp_path / ("x" * 300))
    assert sorted(os.listdir(tmp_path)) == ["file", "thesis"]


def test_a_failed_write_leaves_the_last_checkpoint(tmp_path: Path, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder = tmp_path / "here"
    shutil.copytree(good, folder)
    before = contents(folder)
    with begin("elixir") as engine:
        with monkeypatch.context() as patch:
            fails = lambda *_: (_ for _ in ()).throw(OSError(28, "No space left on device"))  # noqa: E731
            patch.setattr(checkpoint.tensors, "save_file", fails)
            with pytest.raises(SaveError, match="No space left .* the one before it is still there"):
                systems.save_checkpoint(engine, folder)
            patch.setattr(checkpoint.saving.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, 5))
            with pytest.raises(BudgetError, match=r"the checkpoint takes .*, 5B are free in"):
                systems.save_checkpoint(engine, folder)
        steps_of(engine, 0, 1)
    assert contents(folder) == before and len(list(folder.iterdir())) == 2
    assert os.listdir(tmp_path) == ["here"]


def test_what_a_killed_save_left_goes_with_the_next_and_all_else_stays(
    tmp_path: Path, good: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The folder is behind a link, and has a file, a folder of data and another checkpoint in it."""
    elsewhere, link, left = tmp_path / "elsewhere", tmp_path / "link", "data-0123456789abcdef"
    link.symlink_to(elsewhere)
    with begin("elixir") as engine:
        with pytest.raises(ValueError, match="is there and is no checkpoint"):
            systems.save_checkpoint(engine, link)
        (elsewhere / left).mkdir(parents=True)
        (elsewhere / left / "state-00000.safetensors").write_text("the first save was killed here")
        systems.save_checkpoint(engine, link)
        (elsewhere / "notes").write_text("mine")
        (elsewhere / "data-train").mkdir()
        systems.save_checkpoint(engine, link / "inner")
        (elsewhere / left).mkdir()
        steps_of(engine, 0, 1)
        systems.save_checkpoint(engine, f"{link}/")
        assert link.is_symlink() and len(list(elsewhere.iterdir())) == 5
        assert not (elsewhere / left).exists() and (elsewhere / "data-train").is_dir()
        assert (elsewhere / "notes").read_text() == "mine"
        assert (checkpoint.position(link).steps, checkpoint.position(link / "inner").steps) == (1, 0)
        before = contents(elsewhere)
        for owner, name in ((Path, "replace"), (checkpoint.tensors, "save_file"), (checkpoint.tensors, "flush")):
            with monkeypatch.context() as patch:
                patch.setattr(owner, name, lambda *_: (_ for _ in ()).throw(KeyboardInterrupt))
                with pytest.raises(KeyboardInterrupt):
                    systems.save_checkpoint(engine, link)
            assert contents(elsewhere) == before
        systems.load_checkpoint(engine, link)


def test_two_may_look_at_once_whether_a_folder_will_do(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """What one tries it with is not taken for somebody's file by the other, and is gone when both are done."""
    rmdir, seen = Path.rmdir, list[str]()

    def look(path: Path) -> None:
        if not seen:
            seen.append(path.name)
            assert checkpoint.check_folder(tmp_path) == tmp_path
            checkpoint.remove_unfinished(tmp_path)
            tmp_path.mkdir()
        rmdir(path)

    monkeypatch.setattr(Path, "rmdir", look)
    assert checkpoint.check_folder(tmp_path) == tmp_path
    assert len(seen) == 1 and os.listdir(tmp_path) == []


class Interrupt:
    """Ctrl-C at the first line of a function that runs under `save`, at its call `number`."""

    def __init__(self, function: str, number: int) -> None:
        self._function, self._left = function, number

    def __call__(self, frame: FrameType, event: str, arg: object) -> None:
        if frame.f_code.co_name == self._function and frame.f_code.co_filename == checkpoint.saving.__file__:
            self._left -= 1
            if self._left == 0:
                raise KeyboardInterrupt


@pytest.mark.parametrize("first", [True, False])
def test_ctrl_c_leaves_nothing_unfinished(tmp_path: Path, good: Path, first: bool) -> None:
    """Also while what is left is being removed: once the last one was replaced, that is the one before."""
    with begin("elixir") as engine:
        for function, number in (("locked", 1), ("_tidy", 1), ("_replace", 1), ("_entries", 2), ("_tidy", 2)):
            folder = tmp_path / f"{function}-{number}"
            if not first:
                shutil.copytree(good, folder)
            before = sys.gettrace()
            sys.settrace(Interrupt(function, number))
            try:
                with pytest.raises(KeyboardInterrupt):
                    systems.save_checkpoint(engine, folder)
            finally:
                sys.settrace(before)
            assert folder.exists() is (not first or (function, number) == ("_tidy", 2))
            assert not folder.exists() or len(list(folder.iterdir())) == 2
        systems.load_checkpoint(engine, folder)


def test_one_that_is_being_read_is_not_replaced(tmp_path: Path, good: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    tried = []

    def tensor(path: Path, key: str, read: Any = checkpoint.loading.tensor) -> torch.Tensor:
        descriptor = os.open(good, os.O_RDONLY)
        try:
            fcntl.flock(descriptor, fcntl.LOCK_EX | fcntl.LOCK_NB)
        except BlockingIOError:
            tried.append(key)
        finally:
            os.close(descriptor)
        found: torch.Tensor = read(path, key)
        return found

    monkeypatch.setattr(checkpoint.loading, "tensor", tensor)
    with begin("elixir") as engine:
        systems.load_checkpoint(engine, good)
    assert f"value/{NAME}" in tried


class Odd(torch.nn.Module):
    """Buffers that most models do not have."""

    def __init__(self, sparse: bool = False) -> None:
        super().__init__()
        self.layer = torch.nn.Linear(4, 4)
        for name, buffer in (
            ("turns", torch.tensor([1 + 2j])),
            ("flag", torch.tensor([True, False])),
            ("short", torch.ones(3, dtype=torch.bfloat16)),
            ("nothing", torch.empty(0, 3)),
            ("across", torch.arange(6.0).view(2, 3).t()),
            ("same", torch.ones(2, 1).expand(2, 5)),
        ):
            self.register_buffer(name, buffer)
        if sparse:
            self.register_buffer("adjacency", torch.eye(3).to_sparse())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.layer(x)


def test_buffers_of_all_kinds(tmp_path: Path) -> None:
    model = Odd()
    for buffer in (model.turns, model.short, model.across):
        buffer.mul_(3)  # type: ignore[operator]
    model.same[:, :1].mul_(3)  # type: ignore[index]
    with start(SYSTEMS["elixir"], model, settings()) as engine:
        systems.save_checkpoint(engine, tmp_path / "here")
    other = Odd()
    with start(SYSTEMS["elixir"], other, settings()) as engine:
        systems.load_checkpoint(engine, tmp_path / "here")
    theirs = dict(model.named_buffers())
    assert all(torch.equal(buffer, theirs[name]) for name, buffer in other.named_buffers())
    sparse = start(SYSTEMS["elixir"], Odd(sparse=True), settings())
    with sparse as engine, pytest.raises(UnsupportedError, match="buffer adjacency is sparse"):
        systems.save_checkpoint(engine, tmp_path / "there")
    assert os.listdir(tmp_path) == ["here"]


@pytest.mark.parametrize("system", ["elixir", "resident"])
def test_there_is_none_within_a_step(system: str, tmp_path: Path, good: Path) -> None:
    with begin(system) as engine:
        engine.backward(models_small.next_token_loss(engine, tokens(1, 1)[0, 0], 30))
        for act in (systems.save_checkpoint, systems.load_checkpoint):
            with pytest.raises(UnsupportedError, match="a step is in progress"):
                act(engine, good)
        engine.step()
    with pytest.raises(ValueError, match="the engine is closed"):
        systems.save_checkpoint(engine, tmp_path / "x")
