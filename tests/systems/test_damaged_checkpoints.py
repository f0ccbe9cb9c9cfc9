"""A checkpoint that was changed after it was saved, by a disk, a hand or somebody else, is refused by name; nothing changes."""

from __future__ import annotations

import json
import os
import shutil
import tracemalloc
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

import systems
from systems import checkpoint
from systems.checkpoint import CheckpointError, SaveError
from systems.errors import BudgetError, DivergedError
from systems.sizes import format_size
from tests.systems.running import RESIDENT, parameters_of, settings, start
from tests.systems.test_checkpoint import data, edit, rehash

EVERY = ("value", "exp_avg", "exp_avg_sq")


def model(seed: int = 0) -> torch.nn.Module:
    torch.manual_seed(seed)
    return torch.nn.Sequential(torch.nn.Linear(6, 6), torch.nn.BatchNorm1d(6), torch.nn.Linear(6, 6))


def begin(seed: int = 0) -> Any:
    return start(RESIDENT, model(seed), settings())


def step(engine: Any) -> None:
    engine.backward(engine(torch.randn(4, 6, generator=torch.Generator().manual_seed(1))).square().mean())
    engine.step()


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("checkpoints") / "good"
    with begin() as engine:
        step(engine)
        systems.save_checkpoint(engine, folder)
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    shutil.copytree(good, tmp_path / "here")
    return tmp_path / "here"


def state(folder: Path) -> Path:
    return data(folder) / "state-00000.safetensors"


def flip(path: Path, bit: int) -> None:
    content = bytearray(path.read_bytes())
    content[bit // 8 % len(content)] ^= 1 << bit % 8
    path.write_bytes(content)


def refused(folder: Path, said: str | None = None) -> str:
    """Every way to a refusal: one line, and an engine that is as it was and goes on."""
    with begin(seed=1) as engine:
        before = parameters_of(engine)
        with pytest.raises(CheckpointError, match=said) as caught:
            systems.load_checkpoint(engine, folder)
        assert "\n" not in str(caught.value)
        assert all(torch.equal(value, before[name]) for name, value in parameters_of(engine).items())
        assert engine.module[1].num_batches_tracked == 0
        step(engine)
        assert engine.outcomes[0].step == 1
    return str(caught.value)


@pytest.mark.parametrize("name", ["state-00000.safetensors", checkpoint.BUFFERS, checkpoint.BESIDE, checkpoint.MANIFEST])
def test_a_flipped_bit_anywhere(name: str, folder: Path) -> None:
    path = folder / name if name == checkpoint.MANIFEST else data(folder) / name
    size = 8 * path.stat().st_size
    for bit in range(3, size, max(size // 12, 1)):
        flip(path, bit)
        refused(folder)
        flip(path, bit)
    with begin(seed=1) as engine:
        systems.load_checkpoint(engine, folder)


def test_a_manifest_is_covered_to_its_last_field(folder: Path) -> None:
    """A number that is another number, a later seal, a file of format 2 that says 1."""
    path = folder / checkpoint.MANIFEST
    text = path.read_text()
    for old, new in (
        ('"steps": 1', '"steps": 3'),
        ('"loss_scale": 1.0', '"loss_scale": 5.0'),
        ('"updates": 1', '"updates": 0'),
        ('"format": 2', '"format": 1'),
        ('"exp_avg": "state', '"exp_avg": "state'[::-1]),
        (text[-10:], text[-10:].replace(text[-5], "0" if text[-5] != "0" else "1")),
    ):
        assert old in text
        path.write_text(text.replace(old, new))
        assert "is broken" in refused(folder)
    path.write_text(text)


def change(folder: Path, edit: Callable[[dict[str, torch.Tensor]], object], *, hashed: bool) -> None:
    held = load_file(state(folder))
    edit(held)
    save_file(held, state(folder))
    if hashed:
        rehash(folder)


def swap(one: str, other: str) -> Callable[[dict[str, torch.Tensor]], None]:
    def exchange(held: dict[str, torch.Tensor]) -> None:
        held[one], held[other] = held[other], held[one]

    return exchange


@pytest.mark.parametrize("pair", [("value/0.weight", "value/2.weight"), ("exp_avg/0.bias", "exp_avg_sq/0.bias")])
def test_swapped_tensors(pair: tuple[str, str], folder: Path) -> None:
    change(folder, swap(*pair), hashed=False)
    assert "is damaged: its content is not what was saved" in refused(folder)


@pytest.mark.parametrize("part", EVERY)
@pytest.mark.parametrize("value", [float("nan"), float("inf"), -1e-30], ids=str)
def test_what_no_training_can_go_on_from(part: str, value: float, folder: Path) -> None:
    """Even where the hash is right: in format 1, or by hand."""
    change(folder, lambda held: held[f"{part}/2.bias"].__setitem__(3, value), hashed=True)
    if value < 0 and part != "exp_avg_sq":
        with begin(seed=1) as engine:
            systems.load_checkpoint(engine, folder)
        return
    said = refused(folder, "negative values" if value < 0 else "not finite")
    assert said.startswith("2.bias" if part == "value" else f"{part} of 2.bias")


@pytest.mark.parametrize("kind", ["link", "pipe", "folder", "device", "unreadable", "longer"])
@pytest.mark.parametrize("name", ["state-00000.safetensors", checkpoint.BESIDE, checkpoint.MANIFEST])
def test_only_regular_files_of_the_folder_are_read(kind: str, name: str, folder: Path, tmp_path: Path) -> None:
    path = folder / name if name == checkpoint.MANIFEST else data(folder) / name
    content = path.read_bytes()
    path.unlink()
    if kind == "link":
        (tmp_path / "outside").write_bytes(content)
        path.symlink_to(tmp_path / "outside")
    elif kind == "pipe":
        os.mkfifo(path)
    elif kind == "folder":
        path.mkdir()
    elif kind == "device":
        path.symlink_to("/dev/zero")
    elif kind == "unreadable":
        path.symlink_to(path)
    else:
        path.write_bytes(content + b" ")
    refused(folder)


def test_the_data_are_in_the_folder_itself(folder: Path, tmp_path: Path) -> None:
    data(folder).rename(tmp_path / "outside")
    (folder / json.loads((folder / checkpoint.MANIFEST).read_text())["data"]).symlink_to(tmp_path / "outside")
    refused(folder, "it is a link")


@pytest.mark.parametrize("name", ["../outside", "/{parent}/outside", "data-../../outside", "data-0123456789abcdef/..", ".", ""])
def test_the_data_are_in_no_folder_above(name: str, folder: Path) -> None:
    """Though all else of it is right."""
    data(folder).rename(folder.parent / "outside")
    edit(folder, lambda manifest: manifest.update(data=name.format(parent=folder.parent)))
    assert "is broken at data" in refused(folder)


@pytest.mark.parametrize("name", ["../outside.safetensors", "/{parent}/outside.safetensors", "../../outside.safetensors"])
def test_files_are_in_the_data_s_folder(name: str, folder: Path) -> None:
    """Named alike by the parameters and by the hashes."""
    theirs = name.format(parent=folder.parent)
    shutil.copy(state(folder), data(folder) / theirs)

    def rename(manifest: dict[str, Any]) -> None:
        for entry in manifest["parameters"].values():
            entry["files"] = dict.fromkeys(entry["files"], theirs)
        manifest["hashes"][theirs] = manifest["hashes"].pop("state-00000.safetensors")

    edit(folder, rename)
    assert "is broken at" in refused(folder)


def lying(folder: Path, change: Callable[[dict[str, Any]], None], *, length: int | None = None) -> None:
    """A header that says other sizes, with hashes that are right."""
    content = state(folder).read_bytes()
    end = 8 + int.from_bytes(content[:8], "little")
    header = json.loads(content[8:end])
    change(header)
    written = json.dumps(header).encode()
    written += b" " * (-len(written) % 8)
    state(folder).write_bytes((length or len(written)).to_bytes(8, "little") + written + content[end:])
    rehash(folder)


NAME = "value/0.weight"
LIES: dict[str, Callable[[Path], None]] = {
    "a header longer than the file": lambda f: lying(f, lambda _: None, length=1 << 40),
    "a header of no end": lambda f: lying(f, lambda _: None, length=(1 << 64) - 1),
    "values behind the file's end": lambda f: lying(f, lambda h: h[NAME].update(data_offsets=[0, 1 << 40])),
    "values before its beginning": lambda f: lying(f, lambda h: h[NAME].update(data_offsets=[-144, 0])),
    "more elements than bytes": lambda f: lying(f, lambda h: h[NAME].update(shape=[1 << 31, 1 << 31])),
    "elements that are no number": lambda f: lying(f, lambda h: h[NAME].update(shape=[1 << 62, 1 << 62, 1 << 62])),
    "two that are one": lambda f: lying(f, lambda h: h[NAME].update(data_offsets=h["value/2.weight"]["data_offsets"])),
    "a length of the file": lambda f: edit(f, lambda m: m["hashes"]["state-00000.safetensors"].update(nbytes=1 << 50)),
    "a shape of the manifest": lambda f: edit(f, lambda m: m["parameters"]["0.weight"].update(shape=[1 << 50, 1 << 50])),
}


@pytest.mark.parametrize("lie", LIES)
def test_sizes_that_are_not_true(lie: str, folder: Path) -> None:
    """Nothing is made room for before they are compared with what there is."""
    LIES[lie](folder)
    tracemalloc.start()
    try:
        said = refused(folder)
        assert tracemalloc.get_traced_memory()[1] < 2 * checkpoint.manifest.MANIFEST_BYTES
    finally:
        tracemalloc.stop()
    assert "bytes and was saved with" in said or "length of the file" not in lie
    assert "state-00000.safetensors" in said or "0.weight" in said or "is broken" in said


def test_a_manifest_without_bounds(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = folder / checkpoint.MANIFEST
    text = path.read_text()
    for broken in ("[" * 1_000_000, text.replace('"steps": 1', '"steps": ' + "9" * 5000), text.replace("1.0", "1e999"), "\x00"):
        path.write_text(broken)
        refused(folder, "is broken")
    path.write_bytes(b"\xff\xfe" + text.encode())
    refused(folder, "is broken")
    path.write_text(text)
    edit(folder, lambda manifest: manifest["parameters"].update({"a\nb\x1b": 1}))
    assert "a b?" in refused(folder, "is broken")
    path.write_text(text)
    monkeypatch.setattr(checkpoint.manifest, "MANIFEST_BYTES", len(text) - 1)
    refused(folder, "it has more than")
    with begin() as engine, pytest.raises(ValueError, match="can name"):
        systems.save_checkpoint(engine, folder.parent / "new")
    assert not (folder.parent / "new").exists()


def test_the_first_format_is_read_with_a_word(folder: Path) -> None:
    path = folder / checkpoint.MANIFEST
    manifest = json.loads(path.read_text())
    del manifest["seal"], manifest["hashes"]
    path.write_text(json.dumps(manifest | {"format": 1}))
    with begin(seed=1) as engine:
        with pytest.warns(UserWarning, match="is of format 1, without hashes"):
            systems.load_checkpoint(engine, folder)
        values = parameters_of(engine)
    held = load_file(state(folder))
    assert all(torch.equal(value, held[f"value/{name}"]) for name, value in values.items())


def test_a_run_that_diverged_keeps_its_last_checkpoint(folder: Path) -> None:
    before = {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()}
    with begin() as engine:
        with engine.summon(write=True) as values:
            values["0.weight"][1, 2] = float("inf")
        with pytest.raises(DivergedError, match=r"no checkpoint is written, for 0.weight has values that are not finite"):
            systems.save_checkpoint(engine, folder)
    assert {path: path.read_bytes() for path in folder.rglob("*") if path.is_file()} == before


def deletions(folder: Path, monkeypatch: pytest.MonkeyPatch, what: str, when: str) -> None:
    """Somebody else removes a part of the folder at some moment of a save."""
    save_one, replace = checkpoint.tensors.save_file, Path.replace

    def remove() -> None:
        fresh = max(folder.glob("data-*"), key=lambda path: path.stat().st_mtime_ns)
        shutil.rmtree({"all": folder, "new": fresh}[what]) if what != "a file" else (fresh / "state-00000.safetensors").unlink()

    def save_file(held: Any, path: Path) -> None:
        if when == "before" and path.name == checkpoint.BUFFERS:
            remove()
        save_one(held, path)
        if when == "after" and path.name == checkpoint.BESIDE:
            remove()

    def moved(path: Path, target: Path) -> Path:
        remove()
        return replace(path, target)

    monkeypatch.setattr(checkpoint.tensors, "save_file", save_file)
    if when == "last":
        monkeypatch.setattr(Path, "replace", moved)


@pytest.mark.parametrize(
    ("what", "when"),
    [
        *((what, when) for what in ("all", "new") for when in ("before", "after", "last")),
        ("a file", "before"),
        ("a file", "after"),
    ],
)
def test_a_folder_that_is_removed_during_a_save(what: str, when: str, folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    deletions(folder, monkeypatch, what, when)
    with begin() as engine:
        with pytest.raises(SaveError) as caught:
            systems.save_checkpoint(engine, folder)
        monkeypatch.undo()
        last = "there is none before it" if what == "all" else "the one before it is still there"
        assert last in str(caught.value) and "\n" not in str(caught.value)
        if what != "all":
            systems.load_checkpoint(engine, folder)
        systems.save_checkpoint(engine, folder)
        systems.load_checkpoint(engine, folder)


def test_room_is_looked_for_before_training(folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A save writes the new one beside the last. What a killed save left counts as free: the next one removes it."""
    mine, size = model(), checkpoint.saving._taken(data(folder))
    need = checkpoint.saving.need_bytes(
        ((p.numel(), p.requires_grad) for p in mine.parameters()), checkpoint.persistent_buffers(mine).values()
    )

    def with_free(free: int, target: Path, saves: int) -> str | None:
        monkeypatch.setattr(checkpoint.saving.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 5, free))
        try:
            checkpoint.check_room(mine, target, saves=saves)
        except BudgetError as error:
            return f"{error.tier}: {error}"
        return None

    new = tmp_path / "new"
    assert with_free(need, new, 1) is None
    assert f"disk: the checkpoint takes {format_size(need)} (1B more)" in (with_free(need - 1, new, 1) or "")
    assert with_free(2 * need, new, 2) is None
    assert "beside the last" in (with_free(2 * need - 1, new, 2) or "")
    assert with_free(need, folder, 1) is None and with_free(need - 1, folder, 1) is not None
    assert with_free(2 * need - size, folder, 2) is None and with_free(2 * need - size - 1, folder, 2) is not None
    left = folder / "data-0123456789abcdef"
    left.mkdir()
    (left / "state-00000.safetensors").write_bytes(bytes(size))
    assert with_free(need - size, folder, 1) is None
    assert size <= need, "void: what a checkpoint takes is more than what is asked for"
