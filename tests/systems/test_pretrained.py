"""Folders in transformers' format, in and out: the same bits under every system, or refused by name before training."""

from __future__ import annotations

import json
import os
import subprocess
import sys
import threading
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from safetensors.torch import load_file, save_file
from torch import nn

import systems
from systems.pretrained import folder_weights, model_of
from systems.pretrained.files import INDEX, SINGLE
from systems.ranks import joining
from systems.ranks.loopback import as_threads
from systems.ranks.ranks import Ranks
from systems.system import Engine
from tests.systems import every
from tests.systems.models_small import tokens
from tests.systems.running import AMPLE, settings, start

SYSTEMS: dict[str, Any] = {**every.STRATEGIES, "resident": every.RESIDENT}
DTYPES = {"fp32": torch.float32, "bf16": torch.bfloat16}
SMALL: dict[str, Any] = dict(vocab_size=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)
WIDE: dict[str, Any] = dict(SMALL, hidden_size=32, num_hidden_layers=3, num_attention_heads=2, max_position_embeddings=32)
T5: dict[str, Any] = dict(SMALL, d_model=32, d_kv=8, d_ff=64, num_heads=2, num_layers=2, decoder_start_token_id=0)
QUIET: dict[str, Any] = dict(resid_pdrop=0.0, embd_pdrop=0.0, attn_pdrop=0.0)
FAMILIES: dict[str, Callable[[], Any]] = {
    "gpt2": lambda: transformers.GPT2LMHeadModel(
        transformers.GPT2Config(**SMALL, **QUIET, n_layer=3, n_embd=32, n_head=2, n_positions=32)
    ),
    "llama": lambda: transformers.LlamaForCausalLM(transformers.LlamaConfig(**WIDE, intermediate_size=64)),
    "opt": lambda: transformers.OPTForCausalLM(
        transformers.OPTConfig(**WIDE, word_embed_proj_dim=32, ffn_dim=64, dropout=0.0)
    ),
    "t5": lambda: transformers.T5ForConditionalGeneration(transformers.T5Config(**T5, dropout_rate=0.0)),
}
TIGHT = 550_000
STEPS = 3


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[..., Path]:
    """A folder that transformers wrote; sharded: in several files."""

    @cache
    def save(family: str, dtype: str = "fp32", sharded: bool = False) -> Path:
        torch.manual_seed(3)
        folder = tmp_path_factory.mktemp(f"{family}-{dtype}")
        FAMILIES[family]().to(DTYPES[dtype]).save_pretrained(folder, max_shard_size="30KB" if sharded else "1GB")
        return folder

    return save


def held(folder: Path) -> dict[str, torch.Tensor]:
    files = sorted(folder.glob("*.safetensors"))
    return {name: value for file in files for name, value in load_file(file).items()}


def same(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> bool:
    alike = [torch.equal(value, theirs[name]) and value.dtype == theirs[name].dtype for name, value in ours.items()]
    return ours.keys() == theirs.keys() and all(alike)


def begin(system: str, folder: Path, **given: Any) -> Engine:
    model = model_of(folder)
    assert all(parameter.is_meta for parameter in model.parameters())
    budget = AMPLE if system == "resident" else TIGHT
    asked = settings(**{"device_memory": budget, "initial_weights": folder_weights(model, folder)} | given)
    return start(SYSTEMS[system], model, asked)


def train(engine: Engine) -> None:
    ids = tokens(STEPS, 1)[:, 0] % 64
    for step in range(STEPS):
        engine.backward(engine(input_ids=ids[step], labels=ids[step]).loss)
        engine.step()


# ---- in and out


@pytest.mark.parametrize("sharded", [False, True], ids=["one file", "several"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("family", FAMILIES)
@pytest.mark.one_in(3)
def test_what_came_in_goes_out_bit_for_bit(
    family: str, dtype: str, sharded: bool, saved: Callable[..., Path], tmp_path: Path
) -> None:
    folder = saved(family, dtype, sharded)
    assert (folder / INDEX).exists() == sharded
    with begin("elixir", folder, dtype=dtype) as engine:
        engine.save_pretrained(tmp_path, dtype=dtype, max_shard_size="30KB" if sharded else "1GB")  # type: ignore[arg-type]
    assert same(held(folder), held(tmp_path)) and (tmp_path / INDEX).exists() == sharded
    configs = [json.loads((each / "config.json").read_text()) | {"use_cache": False} for each in (folder, tmp_path)]
    assert configs[0] == configs[1]
    auto = transformers.AutoModelForSeq2SeqLM if family == "t5" else transformers.AutoModelForCausalLM
    loaded, report = auto.from_pretrained(tmp_path, output_loading_info=True)
    assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
    assert same(loaded.state_dict(), auto.from_pretrained(folder).state_dict())


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.one_in(5)
def test_every_system_takes_and_trains_them_as_the_reference(
    system: str, dtype: str, saved: Callable[..., Path], tmp_path: Path
) -> None:
    """What is given out after training is also what the model has when its values came by from_pretrained."""
    folder = saved("llama", dtype)
    with begin(system, folder, dtype=dtype) as engine:
        engine.save_pretrained(tmp_path / "first", dtype=dtype)  # type: ignore[arg-type]
        train(engine)
        for asked in DTYPES:
            engine.save_pretrained(tmp_path / asked, dtype=asked)  # type: ignore[arg-type]
    model = transformers.LlamaForCausalLM.from_pretrained(folder, dtype=torch.float32, use_cache=False).train()
    with start(every.RESIDENT, model, settings(dtype=dtype)) as oracle:
        train(oracle)
        for asked in DTYPES:
            oracle.save_pretrained(tmp_path / f"oracle-{asked}", dtype=asked)  # type: ignore[arg-type]
            assert same(held(tmp_path / f"oracle-{asked}"), held(tmp_path / asked))
    assert same(held(folder), held(tmp_path / "first"))
    assert not same(held(folder), held(tmp_path / dtype)), "void: it was not trained"


@pytest.mark.parametrize("family", ["gpt2", "opt", "t5"])
@pytest.mark.one_in(3)
def test_tied_weights_are_trained_as_one(family: str, saved: Callable[..., Path], tmp_path: Path) -> None:
    folder = saved(family)
    found = []
    for system in ("resident", "patrickstar"):
        with begin(system, folder, clip=0.5) as engine:
            train(engine)
            engine.save_pretrained(tmp_path / system)
        found.append(held(tmp_path / system))
    assert same(*found) and "lm_head.weight" not in found[0]


def test_initialize_takes_a_folder_and_the_optimizer_of_a_model_without_values(saved: Callable[..., Path]) -> None:
    """Its groups and its state_dict are of the parameters that it was made with."""
    folder, losses = saved("opt"), []
    for meta in (True, False):
        torch.manual_seed(7)
        model: Any = systems.model_of(folder) if meta else FAMILIES["opt"]()  # with other values
        model.config.use_cache = False
        of_dim: list[list[nn.Parameter]] = [[p for p in model.parameters() if p.dim() == dim] for dim in (2, 1)]
        groups: list[dict[str, Any]] = [{"params": of_dim[0], "weight_decay": 0.1}, {"params": of_dim[1]}]
        optimizer = torch.optim.AdamW(groups, lr=1e-2)
        with systems.initialize(
            model, optimizer=optimizer, weights=folder, device="cpu", device_memory=TIGHT, host_memory="1GiB", dtype="fp32"
        ) as engine:
            train(engine)
            moments = optimizer.state_dict()["state"]
            losses.append((engine.state_dict(), [each["exp_avg"] for each in moments.values()]))
        assert model.get_parameter("model.decoder.final_layer_norm.weight").isfinite().all()
    (ours, mine), (theirs, others) = losses
    assert same(ours, theirs) and len(mine) == 52 and all(map(torch.equal, mine, others))


def test_values_are_there_once(tmp_path: Path) -> None:
    """The host's peak is that of the states, also as the operating system sees it; their files would be 4 bytes more."""
    script = tmp_path / "measures.py"
    script.write_text(MEASURES)
    alone = {**os.environ, "OMP_NUM_THREADS": "1", "CUDA_VISIBLE_DEVICES": ""}
    told = subprocess.check_output([sys.executable, "-c", MEASURES, str(tmp_path)], text=True, timeout=200, env=alone)
    numel, accounted, grown = map(int, told.split()[-3:])
    states = 14 * numel
    assert 0.9 * states < accounted <= 1.1 * states and grown <= 1.1 * states, (accounted / states, grown / states)


MEASURES = """
import os, sys, torch, systems
from safetensors.torch import save_file
from systems.machine.limits import process_memory

torch.set_num_threads(1)
WIDTH, LAYERS = 1024, 16

def made(device):
    with torch.device(device):
        return torch.nn.Sequential(torch.nn.Embedding(8, WIDTH), *[torch.nn.Linear(WIDTH, WIDTH) for _ in range(LAYERS)])

if (pid := os.fork()) == 0:
    save_file(made("cpu").state_dict(), sys.argv[1] + "/model.safetensors")
    os._exit(0)
assert os.waitpid(pid, 0)[1] == 0
with torch.device("meta"):
    warm = torch.nn.Linear(8, 8)
os.mkdir(sys.argv[1] + "/warm")
save_file({"weight": torch.ones(8, 8), "bias": torch.ones(8)}, sys.argv[1] + "/warm/model.safetensors")
systems.initialize(warm, weights=sys.argv[1] + "/warm", device="cpu").close()  # what it imports is there before
before = process_memory("self")["VmRSS"]
model = made("meta")
engine = systems.initialize(model, weights=sys.argv[1], device="cpu", device_memory="100MiB", host_memory="4GiB", dtype="bf16")
numel, peak = sum(p.numel() for p in model.parameters()), process_memory("self")["VmHWM"]
print(numel, engine.memory().host_peak_bytes, peak - before, flush=True)
os._exit(0)
"""


# ---- several ranks

HERE = threading.local()


def on_ranks(size: int, monkeypatch: pytest.MonkeyPatch, work: Callable[[int], Any]) -> list[Any]:
    """Each rank is a thread that calls `systems.initialize` as a process of torchrun does."""
    monkeypatch.setattr(joining, "is_one_of_several", lambda: True)
    monkeypatch.setattr(joining, "joined", lambda device: HERE.ranks)
    monkeypatch.setattr("systems.machine.threads.share_cores", lambda *_: None)

    def run(ranks: Ranks) -> Any:
        HERE.ranks = ranks
        return work(ranks.rank)

    return as_threads(size, run)


@pytest.mark.parametrize("system", ["resident", "elixir", "angel-ptm"])
@pytest.mark.one_in(2)
def test_ranks_take_one_folder(
    system: str, saved: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder, models = saved("gpt2", "bf16"), [model_of(saved("gpt2", "bf16")) for _ in range(2)]
    given: dict[str, Any] = {"device": "cpu", "device_memory": "1MiB", "host_memory": "1GiB", "dtype": "bf16"}

    def work(rank: int) -> None:
        with systems.initialize(models[rank], system=system, weights=folder, **given) as engine:
            engine.save_pretrained(tmp_path / "out", dtype="bf16")

    on_ranks(2, monkeypatch, work)
    assert same(held(folder), held(tmp_path / "out"))


def test_ranks_refuse_what_one_of_them_refuses(
    saved: Callable[..., Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A folder that one does not see, and one that has other values there."""
    folder, models = saved("gpt2"), [model_of(saved("gpt2")) for _ in range(2)]
    save_file({name: value + 1 for name, value in held(folder).items()}, tmp_path / SINGLE)

    def caught(other: Path) -> list[str]:
        def work(rank: int) -> str:
            with pytest.raises(ValueError) as refused:
                systems.initialize(models[rank], weights=folder if rank == 0 else other, device="cpu", host_memory="1GiB")
            return str(refused.value)

        return on_ranks(2, monkeypatch, work)

    assert all("is no folder" in said for said in caught(tmp_path / "none"))
    assert all("are not the same on ranks 0 and 1" in said for said in caught(tmp_path))
