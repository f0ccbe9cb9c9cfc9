"""Folders that lie, lack or lead astray: refused by name, and neither the model nor anything outside the folder is touched."""

from __future__ import annotations

import json
import os
import shutil
import struct
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import save_file
from torch import nn

import systems
from systems.baselines import resident
from systems.errors import UnsupportedError
from systems.pretrained import FolderWeights, folder_weights, model_of
from systems.pretrained.files import INDEX, SINGLE
from systems.pretrained.model import GENERATION
from systems.substrate import assembly
from tests.systems.test_pretrained import FAMILIES, begin, held, same


def rewritten(folder: Path, **changed: torch.Tensor | None) -> None:
    tensors: dict[str, Any] = held(folder) | changed
    save_file({name: value for name, value in tensors.items() if value is not None}, folder / SINGLE)


def raw(folder: Path, header: Any, body: bytes, length: int | None = None) -> None:
    text = header if isinstance(header, bytes) else json.dumps(header).encode()
    (folder / SINGLE).write_bytes(struct.pack("<Q", len(text) if length is None else length) + text + body)


def entry(shape: list[int], start: int, end: int) -> dict[str, Any]:
    return {"dtype": "F32", "shape": shape, "data_offsets": [start, end]}


def index(folder: Path, change: Callable[[dict[str, Any]], object] = lambda map_: None) -> Path:
    """Two files in place of one; where their index is."""
    tensors = held(folder)
    (folder / SINGLE).unlink()
    of = {name: f"model-{number % 2}.safetensors" for number, name in enumerate(tensors)}
    for file in sorted(set(of.values())):
        save_file({name: tensors[name] for name in tensors if of[name] == file}, folder / file)
    change(of)
    (folder / INDEX).write_text(json.dumps({"metadata": {"total_size": 1 << 60}, "weight_map": of}))
    return folder / INDEX


def moved(folder: Path, to: str) -> None:
    """The weights are elsewhere, and the index names that place."""
    shutil.move(folder / SINGLE, folder.parent / "outside.safetensors")
    names = held(folder.parent)
    (folder / INDEX).write_text(json.dumps({"weight_map": dict.fromkeys(names, to)}))


def linked(path: Path) -> None:
    """It is elsewhere, as in a cache."""
    shutil.move(path, path.parent.parent / "blob")
    path.symlink_to("../blob")


def pickled(folder: Path) -> None:
    torch.save(held(folder), folder / "pytorch_model.bin")
    (folder / SINGLE).unlink()


def piped(folder: Path) -> None:
    (folder / SINGLE).unlink()
    os.mkfifo(folder / SINGLE)


def misplace(of: dict[str, Any]) -> None:
    of[NORM] = next(file for file in of.values() if file != of[NORM])


NORM, EMBEDDING = "transformer.ln_f.weight", "transformer.wte.weight"
REFUSED: list[tuple[str, Callable[[Path], object], str]] = [
    ("no weights", lambda f: (f / SINGLE).unlink(), "holds neither model.safetensors nor"),
    ("pickle", pickled, "pytorch_model.bin is not read, only model.safetensors or model.safetensors.index.json, which runs no"),
    ("adapter", lambda f: (f / "adapter_config.json").write_text("{}"), "holds an adapter: merge it"),
    ("missing", lambda f: rewritten(f, **{NORM: None}), f"holds no weights for {NORM}"),
    ("shape", lambda f: rewritten(f, **{NORM: torch.ones(3)}), f"{NORM} has shape (3,)"),
    ("integers", lambda f: rewritten(f, **{NORM: torch.ones(32, dtype=torch.int8)}), f"{NORM} is quantized"),
    ("fp8", lambda f: rewritten(f, **{NORM: torch.ones(32).to(torch.float8_e4m3fn)}), f"{NORM} is quantized"),
    ("fp64", lambda f: rewritten(f, **{NORM: torch.ones(32).double()}), f"{NORM} is F64"),
    ("nan", lambda f: rewritten(f, **{NORM: torch.full((32,), torch.nan)}), f"{NORM} has values in"),
    ("infinity", lambda f: rewritten(f, **{NORM: torch.full((32,), torch.inf).half()}), "that are not finite: no training"),
    ("tied", lambda f: rewritten(f, **{"lm_head.weight": torch.ones(64, 32)}), "and lm_head.weight are one weight of the"),
    ("no bytes", lambda f: (f / SINGLE).write_bytes(b""), "model.safetensors cannot be read"),
    ("cut", lambda f: (f / SINGLE).write_bytes((f / SINGLE).read_bytes()[:-4]), "model.safetensors cannot be read"),
    ("longer", lambda f: (f / SINGLE).write_bytes((f / SINGLE).read_bytes() + b"1234"), "model.safetensors cannot be read"),
    ("huge shape", lambda f: raw(f, {NORM: entry([1 << 40], 0, 8)}, bytes(8)), "model.safetensors cannot be read"),
    ("huge offsets", lambda f: raw(f, {NORM: entry([1 << 40], 0, 4 << 40)}, bytes(8)), "model.safetensors cannot be read"),
    ("overflow", lambda f: raw(f, {NORM: entry([1 << 62, 4, 0], 0, 0)}, b""), "model.safetensors cannot be read"),
    (
        "overlap",
        lambda f: raw(f, {NORM: entry([2], 0, 8), "b": entry([2], 0, 8)}, bytes(8)),
        "model.safetensors cannot be read",
    ),
    ("header length", lambda f: raw(f, b"{}", b"", length=1 << 60), "model.safetensors cannot be read"),
    ("Git LFS", lambda f: (f / SINGLE).write_text("version https://git-lfs.github.com/spec/v1\n"), "a pointer of Git LFS"),
    ("link", lambda f: linked(f / SINGLE), "model.safetensors is a link, as in a hub's cache, and is not followed: cp -rL"),
    ("linked shard", lambda f: linked(index(f).with_name("model-1.safetensors")), "model-1.safetensors is a link"),
    ("linked index", lambda f: linked(index(f)), "index.json is a link"),
    ("pipe", piped, "model.safetensors cannot be read: it is no regular file"),
    ("parent", lambda f: moved(f, "../outside.safetensors"), "is no safetensors file of the folder"),
    ("absolute", lambda f: moved(f, str(f.parent / "outside.safetensors")), "is no safetensors file of the folder"),
    ("hidden", lambda f: moved(f, ".outside.safetensors"), "is no safetensors file of the folder"),
    ("pickle in the index", lambda f: moved(f, "outside.bin"), "is no safetensors file of the folder"),
    ("number in the index", lambda f: index(f, lambda of: of.update({NORM: 3})), "is in 3, which is no safetensors file"),
    ("no shard", lambda f: index(f).with_name("model-1.safetensors").unlink(), "model-1.safetensors cannot be read"),
    ("wrong shard", lambda f: index(f, misplace), "names model-"),
    ("no such tensor", lambda f: index(f, lambda of: of.update(x="model-1.safetensors")), "says that x is in model-1.s"),
    ("not in the index", lambda f: index(f, lambda of: of.pop(NORM)), f"{NORM} is in"),
    ("no map", lambda f: index(f).write_text("[]"), "index.json is broken: it is no object"),
    ("empty map", lambda f: index(f).write_text("{}"), "has no weight_map"),
    ("deep index", lambda f: index(f).write_text("[" * 100_000), "index.json is broken: RecursionError"),
    ("bad text", lambda f: index(f).write_bytes(b"\xff"), "index.json is broken: UnicodeDecodeError"),
]


@pytest.fixture(scope="module")
def good(tmp_path_factory: pytest.TempPathFactory) -> Path:
    torch.manual_seed(3)
    FAMILIES["gpt2"]().save_pretrained(folder := tmp_path_factory.mktemp("gpt2"))
    return folder


@pytest.fixture
def folder(good: Path, tmp_path: Path) -> Path:
    return Path(shutil.copytree(good, tmp_path / "up" / "here"))


@pytest.mark.parametrize(("spoil", "said"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
@pytest.mark.one_in(2)
def test_weights_are_refused_by_name_and_the_model_stays(spoil: Callable[[Path], object], said: str, folder: Path) -> None:
    torch.manual_seed(1)
    model = FAMILIES["gpt2"]()
    before = {name: value.clone() for name, value in model.state_dict().items()}
    spoil(folder)
    with pytest.raises(UnsupportedError) as refused:
        systems.initialize(model, weights=folder, device="cpu", host_memory="1GiB", dtype="fp32")
    assert said in str(refused.value) and "\n" not in str(refused.value)
    assert same(before, model.state_dict())


def test_two_shards_are_read_whatever_the_index_says_of_their_size(folder: Path) -> None:
    expected = held(folder)
    index(folder)
    model = model_of(folder)
    fill = folder_weights(model, folder)
    for name, parameter in model.named_parameters():
        fill(name, out := torch.empty(parameter.shape))
        assert torch.equal(out, expected[name]), name


def test_a_name_that_would_break_a_line_does_not(folder: Path) -> None:
    index(folder, lambda of: of.update({"a\nb\x1b[31m": "model-1.safetensors"}))
    with pytest.raises(UnsupportedError) as refused:
        folder_weights(FAMILIES["gpt2"](), folder)
    assert str(refused.value).isprintable()


def test_what_the_model_has_no_place_for_is_named(folder: Path) -> None:
    """But not the tables that transformers wrote once and makes anew, nor a tied weight that is there twice."""
    values = held(folder)
    head = {"lm_head.weight": values[EMBEDDING].clone(), "score.weight": torch.ones(2)}
    save_file(values | head, folder / SINGLE)
    with pytest.warns(UserWarning, match="has score.weight, which the model has no place for: left out"):
        folder_weights(model_of(folder), folder)
    save_file(values | {"lm_head.weight": head["lm_head.weight"]}, folder / SINGLE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        folder_weights(model_of(folder), folder)


def test_a_hub_s_name_is_no_folder() -> None:
    for take in (systems.model_of, lambda name: folder_weights(FAMILIES["gpt2"](), name)):
        with pytest.raises(UnsupportedError, match="facebook/opt-125m is no folder, and nothing is downloaded"):
            take("facebook/opt-125m")


@pytest.mark.parametrize("given", ["", 5, True, [], "x" * 5000, "a\0b", b"/dev/null"], ids=lambda each: repr(each)[:10])
def test_what_names_no_folder_is_refused_and_is_not_the_current_one(given: Any, folder: Path, monkeypatch: Any) -> None:
    monkeypatch.chdir(folder)
    for take in (systems.model_of, lambda name: systems.initialize(FAMILIES["gpt2"](), weights=name, device="cpu")):
        with pytest.raises(UnsupportedError, match="is no folder, and nothing is downloaded"):
            take(given)


class Prefixed(nn.Module):
    """One of its own tensors has the name that a file may give another without the prefix."""

    base_model_prefix = "base"
    base: Any

    def __init__(self) -> None:
        super().__init__()
        self.base, self.head = nn.Linear(2, 2), nn.Linear(2, 2)
        self.base.head = nn.Linear(2, 2)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.base.head(self.base(x)))


def test_a_name_without_its_prefix_is_not_another_tensor_s(tmp_path: Path) -> None:
    values = {name: torch.full_like(value, number) for number, (name, value) in enumerate(Prefixed().state_dict().items())}
    save_file(values, tmp_path / SINGLE)
    with systems.initialize(Prefixed(), weights=tmp_path, device="cpu", host_memory="1GiB", dtype="fp32") as engine:
        assert same(engine.state_dict(), values)
    save_file({name: value for name, value in values.items() if "base.head" not in name}, tmp_path / SINGLE)
    with pytest.raises(UnsupportedError, match="holds no weights for base.head.weight, base.head.bias: save"):
        folder_weights(Prefixed(), tmp_path)
    save_file({name.removeprefix("base."): values[name] for name in values if "base.head" not in name}, tmp_path / SINGLE)
    with pytest.raises(UnsupportedError, match="holds no weights for base.head.weight, base.head.bias: save"):
        folder_weights(Prefixed(), tmp_path)


class Shared(nn.Module):
    """A persistent buffer with two names, and a module with two."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.again = nn.Sequential(self.norm)
        self.register_buffer("table", torch.arange(4.0))
        self.head.register_buffer("table", self.table)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.again(self.norm(x)) * self.table)


@pytest.mark.parametrize("kept", [("norm.", "table"), ("again.0.", "head.table")], ids=str)
def test_a_buffer_with_several_names_is_in_the_folder_under_any(kept: tuple[str, str], tmp_path: Path) -> None:
    module, table = kept
    values = {name: value + 1 for name, value in Shared().state_dict().items()}
    save_file({n: v for n, v in values.items() if n.startswith((module, "head.w", "head.b")) or n == table}, tmp_path / SINGLE)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        engine = systems.initialize(
            Shared(), system="resident", weights=tmp_path, device="cpu", host_memory="1GiB", dtype="fp32"
        )
    with engine:
        assert same(engine.state_dict(), values)


def test_a_sparse_buffer_is_refused_by_name(tmp_path: Path) -> None:
    model = nn.Linear(2, 2)
    save_file({**model.state_dict(), "edges": torch.eye(2)}, tmp_path / SINGLE)
    model.register_buffer("edges", torch.eye(2).to_sparse())
    with pytest.raises(UnsupportedError, match="buffer edges is sparse"):
        folder_weights(model, tmp_path)


class Own(nn.Module):
    """A plain module with a persistent buffer, one that is not, and a frozen part."""

    def __init__(self) -> None:
        super().__init__()
        self.norm, self.head = nn.BatchNorm1d(4), nn.Linear(4, 2)
        self.head.bias.requires_grad_(False)
        self.register_buffer("table", torch.arange(3.0), persistent=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head(self.norm(x))


def test_buffers_and_frozen_weights_come_with_the_rest(tmp_path: Path) -> None:
    torch.manual_seed(0)
    theirs = Own()
    theirs(torch.randn(8, 4))
    values = {name: value.clone() for name, value in theirs.state_dict().items()}
    save_file(values, tmp_path / SINGLE)
    with systems.initialize(
        Own(), system="resident", weights=tmp_path, device="cpu", host_memory="1GiB", dtype="fp32"
    ) as engine:
        assert same(engine.state_dict(), values) and int(values["norm.num_batches_tracked"]) == 1
    for spoilt, said in (
        ({"norm.running_mean": None}, "no values for the buffer norm.running_mean"),
        ({"norm.running_mean": torch.ones(5)}, r"buffer norm.running_mean is F32 \(5,\) in"),
        ({"norm.num_batches_tracked": torch.tensor(1.0)}, "buffer norm.num_batches_tracked is F32"),
    ):
        save_file({name: value for name, value in (values | spoilt).items() if value is not None}, tmp_path / SINGLE)
        with pytest.raises(UnsupportedError, match=said):
            folder_weights(Own(), tmp_path)


class Mixed(nn.Module):
    """In bf16, with a frozen part in fp32 that an engine of bf16 leaves as it is."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(4, 2, dtype=torch.bfloat16)
        self.scale = nn.Parameter(torch.ones(4), requires_grad=False)

    def forward(self, x: torch.Tensor) -> Any:
        return self.head((x * self.scale).bfloat16())


def test_what_an_engine_carries_along_comes_from_the_folder_too(tmp_path: Path) -> None:
    values = {**Mixed().state_dict(), "scale": torch.tensor([1 / 3, 2.0, 3.0, 4.0])}
    save_file(values, tmp_path / SINGLE)
    with systems.initialize(Mixed(), weights=tmp_path, device="cpu", host_memory="1GiB", dtype="bf16") as engine:
        assert torch.equal(engine.module.get_parameter("scale").cpu(), values["scale"])


def test_an_initialize_that_fails_leaves_buffers_and_what_is_carried_as_they_were(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    for owner in (assembly, resident):
        monkeypatch.setattr(owner, "ParameterWatch", fails)
    for kind, dtype in ((Own, "fp32"), (Mixed, "bf16")):
        model = kind()
        before = {name: value.clone() for name, value in model.state_dict().items()}
        save_file({name: value + 1 for name, value in before.items()}, tmp_path / SINGLE)
        for system in ("resident", "elixir"):
            with pytest.raises(KeyboardInterrupt):
                systems.initialize(model, system=system, weights=tmp_path, device="cpu", host_memory="1GiB", dtype=dtype)
            assert same(model.state_dict(), before)


# ---- a model by its config.json


def changed(folder: Path, **given: Any) -> None:
    path = folder / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | given))


CONFIGS: list[tuple[str, Callable[[Path], object], str]] = [
    ("none", lambda f: (f / "config.json").unlink(), "config.json cannot be read: No such file"),
    ("no json", lambda f: (f / "config.json").write_text("{"), "config.json is broken"),
    ("link", lambda f: linked(f / "config.json"), "is a link"),
    ("type", lambda f: changed(f, model_type="mine"), "describes no model that can be built: KeyError: 'mine'"),
    ("class", lambda f: changed(f, architectures=["MineForCausalLM"]), "has no MineForCausalLM"),
    ("no model class", lambda f: changed(f, architectures=["Trainer"]), "has no Trainer"),
    ("size", lambda f: changed(f, n_embd="wide"), "describes no model that can be built"),
    ("huge", lambda f: changed(f, n_positions=1 << 50), "describes no model that can be built"),
    ("generation list", lambda f: (f / GENERATION).write_text("[1]"), f"{GENERATION} is broken: it is no object of JSON"),
    ("generation", lambda f: (f / GENERATION).write_text('{"max_new_tokens": -1}'), f"{GENERATION} is no generation config: "),
    ("quantized", lambda f: changed(f, quantization_config={"quant_method": "gptq"}), "is of a quantized model"),
]


@pytest.mark.parametrize(("spoil", "said"), [case[1:] for case in CONFIGS], ids=[case[0] for case in CONFIGS])
def test_a_config_that_describes_no_model_is_refused(spoil: Callable[[Path], object], said: str, folder: Path) -> None:
    spoil(folder)
    with pytest.raises(UnsupportedError) as refused:
        systems.model_of(folder)
    assert said in str(refused.value) and "\n" not in str(refused.value)


def test_no_code_of_the_folder_is_run_and_no_kernel_fetched(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "mine.py").write_text("raise SystemExit('run')")
    changed(folder, auto_map={"AutoConfig": "mine.C", "AutoModelForCausalLM": "mine.M"}, _attn_implementation="a/b")
    changed(folder, attn_implementation="a/b", configuration_files=["../config.9.0.0.json"])
    model: Any = systems.model_of(folder)
    assert type(model) is transformers.GPT2LMHeadModel and model.config._attn_implementation == "sdpa"
    assert not hasattr(model.config, "auto_map")


def test_a_folder_s_generation_settings_go_with_the_model(folder: Path, tmp_path: Path) -> None:
    path = folder / "generation_config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | {"max_new_tokens": 7}))
    with begin("resident", folder) as engine:
        engine.save_pretrained(tmp_path / "out")
    loaded = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "out")
    assert loaded.generation_config.max_new_tokens == 7 and loaded.generation_config.use_cache


def test_without_architectures_it_is_the_causal_model(folder: Path) -> None:
    changed(folder, architectures=None)
    assert type(systems.model_of(folder)) is transformers.GPT2LMHeadModel
    assert isinstance(folder_weights(systems.model_of(folder), folder), FolderWeights)
