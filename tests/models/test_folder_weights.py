"""A folder's weights are read, or refused by name: none trains from random ones without a word."""

from __future__ import annotations

import json
import os
import pickle
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from models import registry
from models.folder_weights import fill_buffers, stored_tensors

SAFE, PICKLED, SHARD = "model.safetensors", "pytorch_model.bin", "model-00002-of-00002.safetensors"


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    import transformers

    torch.manual_seed(3)
    folder = tmp_path_factory.mktemp("gpt2")
    config = transformers.GPT2Config(vocab_size=60, n_embd=8, n_layer=2, n_head=2, n_positions=16)
    transformers.GPT2LMHeadModel(config).save_pretrained(folder)
    return folder


@pytest.fixture
def folder(saved: Path, tmp_path: Path) -> Path:
    shutil.copytree(saved, tmp_path / "here")
    return tmp_path / "here"


def held(folder: Path) -> dict[str, torch.Tensor]:
    tensors: dict[str, torch.Tensor] = load_file(folder / SAFE)
    return tensors


def pickled(folder: Path, what: Any, **how: Any) -> Path:
    (folder / SAFE).unlink(missing_ok=True)
    torch.save(what, folder / PICKLED, **how)
    return folder / PICKLED


def filled(folder: Path) -> dict[str, torch.Tensor]:
    shape = registry.resolve(str(folder))
    fill = registry.initial_weights(shape, 0)
    assert fill is not None
    found = {name: torch.full(p.shape, torch.nan) for name, p in registry.build(shape).named_parameters()}
    for name, tensor in found.items():
        fill(name, tensor)
    return found


def shards(folder: Path, write: Callable[[dict[str, torch.Tensor], Path], None], name: str) -> Path:
    tensors, stem = held(folder), name.split(".")
    (folder / SAFE).unlink()
    places = {key: f"{stem[0]}-0000{number % 2 + 1}-of-00002.{stem[1]}" for number, key in enumerate(tensors)}
    for file in set(places.values()):
        write({key: tensors[key] for key, place in places.items() if place == file}, folder / file)
    (folder / f"{name}.index.json").write_text(json.dumps({"metadata": {}, "weight_map": places}))
    return folder / f"{name}.index.json"


def linked(folder: Path) -> None:
    (folder / SAFE).rename(folder.parent / "blob")
    (folder / SAFE).symlink_to(folder.parent / "blob")


def piped(path: Path) -> None:
    path.unlink()
    os.mkfifo(path)


def endless(path: Path) -> None:
    path.unlink()
    path.symlink_to("/dev/zero")


def without_a_shard(folder: Path) -> None:
    shards(folder, save_file, SAFE)
    next(folder.glob("*-00002-*")).unlink()


def renamed(folder: Path, change: Callable[[str], str]) -> None:
    save_file({change(name): value for name, value in held(folder).items()}, folder / SAFE)


WAYS: dict[str, Callable[[Path], object]] = {
    "safetensors": lambda f: None,
    "pickle": lambda f: pickled(f, held(f)),
    "pickle beside other files": lambda f: pickled(f, held(f)).with_name("training_args.bin").write_bytes(b""),
    "shards": lambda f: shards(f, save_file, SAFE),
    "pickled shards": lambda f: shards(f, torch.save, PICKLED),
    "another file's name": lambda f: (f / SAFE).rename(f / "weights.safetensors"),
    "a pickle beside safetensors": lambda f: torch.save({}, f / PICKLED),
    "a link, as in a cache": linked,
    "without the prefix": lambda f: renamed(f, lambda name: name.removeprefix("transformer.")),
    "a tied one under its other name": lambda f: renamed(f, lambda name: name.replace("transformer.wte", "lm_head")),
}


@pytest.mark.parametrize("way", WAYS)
def test_weights_are_read_however_they_were_saved(way: str, folder: Path) -> None:
    expected = held(folder)
    WAYS[way](folder)
    found = filled(folder)
    assert found.keys() == expected.keys()
    assert all(torch.equal(value, expected[name]) for name, value in found.items())


class Runs:
    """A pickle that would run something."""

    def __reduce__(self) -> Any:
        return os.mkdir, ("ran",)


def without(folder: Path, *names: str) -> None:
    save_file({name: value for name, value in held(folder).items() if name not in names}, folder / SAFE)


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-10])


NORM = "transformer.ln_f.weight"
REFUSED: list[tuple[str, Callable[[Path], object], str]] = [
    ("code in a pickle", lambda f: pickled(f, {"a": Runs()}), "pytorch_model.bin cannot be read"),
    ("an old pickle", lambda f: pickled(f, held(f), _use_new_zipfile_serialization=False), "pytorch_model.bin cannot be read"),
    ("no tensors", lambda f: pickled(f, {"model": held(f)}), "is no state dict of tensors"),
    ("plain pickle", lambda f: pickled(f, {}).write_bytes(pickle.dumps([1])), "cannot be read"),
    ("TensorFlow's", lambda f: (f / SAFE).rename(f / "tf_model.h5"), "tf_model.h5 cannot be read here: write it as"),
    ("llama.cpp's", lambda f: (f / SAFE).rename(f / "q4.gguf"), "q4.gguf cannot be read here"),
    ("Meta's", lambda f: (f / SAFE).rename(f / "consolidated.00.pth"), "consolidated.00.pth cannot be read here"),
    ("an adapter", lambda f: (f / "adapter_config.json").write_text("{}"), "holds an adapter: merge it"),
    ("missing", lambda f: without(f, NORM), f"holds no weights for {NORM}: save the model"),
    ("another model's", lambda f: renamed(f, lambda name: f"other.{name}"), "transformer.h.0.ln_1.weight and"),
    ("shape", lambda f: save_file({**held(f), NORM: torch.ones(9)}, f / SAFE), f"{NORM} has shape (9,)"),
    ("int8", lambda f: save_file({**held(f), NORM: torch.ones(8, dtype=torch.int8)}, f / SAFE), f"{NORM} is quantized"),
    ("fp8", lambda f: save_file({**held(f), NORM: torch.ones(8).to(torch.float8_e4m3fn)}, f / SAFE), f"{NORM} is quantized"),
    ("pickled int", lambda f: pickled(f, {**held(f), NORM: torch.ones(8, dtype=torch.uint8)}), f"{NORM} is quantized"),
    ("cut", lambda f: cut(f / SAFE), "model.safetensors cannot be read"),
    ("cut pickle", lambda f: cut(pickled(f, held(f))), "pytorch_model.bin cannot be read"),
    ("empty", lambda f: (f / SAFE).write_bytes(b""), "model.safetensors cannot be read"),
    ("Git LFS", lambda f: (f / SAFE).write_text("version https://git-lfs.github.com/spec/v1\n"), "a pointer of Git LFS"),
    ("pipe", lambda f: piped(f / SAFE), "model.safetensors cannot be read (it is no regular file)"),
    ("device", lambda f: endless(f / SAFE), "model.safetensors cannot be read (it is no regular file)"),
    ("piped pickle", lambda f: piped((f / SAFE).rename(f / PICKLED)), f"{PICKLED} cannot be read (it is no regular file)"),
    ("piped shard", lambda f: piped(shards(f, save_file, SAFE).parent / SHARD), f"{SHARD} cannot be read (it is no"),
    ("piped index", lambda f: piped(shards(f, save_file, SAFE)), "index.json cannot be read: OSError: it is no regular file"),
    ("endless index", lambda f: endless(shards(f, save_file, SAFE)), "index.json cannot be read: OSError: it is no regular"),
    ("no shard", without_a_shard, "00002-of-00002.safetensors cannot"),
    ("index", lambda f: shards(f, save_file, SAFE).write_text("[" * 100_000), "index.json cannot"),
    ("twice", lambda f: (shutil.copy(f / SAFE, f / "a.safetensors"), (f / SAFE).rename(f / "b.safetensors")), "is in"),
]


@pytest.mark.parametrize(("spoil", "said"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
def test_what_cannot_be_read_is_refused_by_name(
    spoil: Callable[[Path], object], said: str, folder: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spoil(folder)
    monkeypatch.chdir(tmp_path)
    with pytest.raises(ValueError) as refused:
        registry.initial_weights(registry.resolve(str(folder)), 0)
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert not (tmp_path / "ran").exists()


def test_a_folder_without_weights_says_that_they_are_random(folder: Path) -> None:
    assert registry.resolve(str(folder)).notes == ""
    (folder / SAFE).unlink()
    assert registry.resolve(str(folder)).notes == f"{folder} holds no weights: they start from random ones"
    torch.save({}, folder / "training_args.bin")
    assert "random" in registry.resolve(str(folder)).notes


def test_persistent_buffers_are_filled(tmp_path: Path) -> None:
    norm: Any = torch.nn.Sequential(torch.nn.BatchNorm1d(3))
    norm.register_buffer("own", torch.zeros(2), persistent=False)
    save_file({"0.running_mean": torch.ones(3), "0.running_var": torch.ones(4), "own": torch.ones(2)}, tmp_path / SAFE)
    stored = stored_tensors(tmp_path)
    assert stored is not None
    fill_buffers(norm, stored)
    assert torch.equal(norm[0].running_mean, torch.ones(3)) and norm[0].running_var.shape == (3,) and not norm.own.any()
