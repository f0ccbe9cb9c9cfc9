"""What leaves an engine loads elsewhere: names, buffers and dtypes are what the model's own state dict would have."""

from __future__ import annotations

import shutil
from collections import namedtuple
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from systems import export
from systems.errors import BudgetError, UnsupportedError
from systems.ranks.ranks import SingleRank
from systems.system import Engine
from tests.systems.models_small import build, tokens
from tests.systems.running import RESIDENT, assert_equal, finished, one_step, settings, start
from tests.systems.setups import SYSTEMS as MANAGED

SYSTEMS: dict[str, Any] = {"resident": (RESIDENT, None)} | {k: v for k, v in MANAGED.items() if "write-back" not in k}
MATCHED = "<All keys matched successfully>"
TIGHT = 60_000


class Counter(nn.Module):
    """Keeps numbers of its own beside its weight, some in a state of its own, some that nobody should save."""

    seen: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.scale = nn.Parameter(torch.ones(16))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("spread", torch.zeros(1).expand(16))
        self.register_buffer("scratch", torch.zeros(3), persistent=False)
        self.kept = torch.zeros(2)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        if self.training:
            self.seen += 1
            self.kept += 1
        return x * self.scale

    def get_extra_state(self) -> dict[str, Any]:
        return {"kept": self.kept, "name": "counter"}

    def set_extra_state(self, state: dict[str, Any]) -> None:
        self.kept = state["kept"].clone()


class Odd(nn.Module):
    """Tied weights, a module under two names, a buffer under two, a norm with running averages, a hook that adds an entry."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(50, 16)
        self.blocks = nn.ModuleList(nn.Linear(16, 16) for _ in range(3))
        self.norm = nn.BatchNorm1d(16)
        self.counter = Counter()
        self.again = self.counter
        self.register_buffer("seen", self.counter.seen)
        self.head = nn.Linear(16, 50, bias=False)
        self.head.weight = self.embedding.weight
        self.blocks[1].weight.requires_grad_(False)
        self.register_state_dict_post_hook(_add_a_sum)
        self.register_load_state_dict_pre_hook(_drop_the_sum)

    def forward(self, ids: torch.Tensor) -> torch.Tensor:
        x = self.embedding(ids)
        for block in self.blocks:
            x = x + torch.tanh(block(x))
        logits: torch.Tensor = self.head(self.norm(self.counter(x).transpose(1, 2)).transpose(1, 2))
        return logits


def _add_a_sum(module: nn.Module, state: dict[str, Any], prefix: str, local: Any) -> None:
    state["sum"] = state["head.weight"].sum()


def _drop_the_sum(module: nn.Module, state: dict[str, Any], *_: Any) -> None:
    state.pop("sum")


def loss_of(model: Callable[..., Any], ids: torch.Tensor, count: int) -> torch.Tensor:
    return model(ids).float().square().sum() / count


def odd() -> Odd:
    torch.manual_seed(0)
    return Odd().train()


def begin(system: str, model: nn.Module, **given: Any) -> Engine:
    """Trained for two steps."""
    chosen, options = SYSTEMS[system]
    engine = start(chosen, model, settings(**given), options)
    for ids in batches():
        one_step(engine, ids, loss_of)
    return engine


def batches() -> torch.Tensor:
    return tokens(2, 1) % 50


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.one_in(2)
def test_a_state_dict_is_what_the_model_would_give_and_changes_nothing(system: str) -> None:
    straight, engine = begin(system, odd()), begin(system, odd())
    parameters = list(engine.module._parameters.values()), list(engine.module.named_parameters())
    found = engine.state_dict()
    assert parameters == (list(engine.module._parameters.values()), list(engine.module.named_parameters()))
    fresh = Odd()
    fresh.counter.spread = torch.zeros(16)  # torch loads nothing into an expanded tensor
    assert str(fresh.load_state_dict(dict(found))) == MATCHED
    theirs = fresh.state_dict()
    assert list(found) == list(theirs) and found._metadata == theirs._metadata  # type: ignore[attr-defined]
    for name, value in theirs.items():
        if isinstance(value, torch.Tensor):
            assert torch.equal(found[name], value) and found[name].dtype == value.dtype, name
    assert found["head.weight"].data_ptr() == found["embedding.weight"].data_ptr()
    assert found["seen"] == found["again.seen"] == 2 and "counter.scratch" not in found
    assert torch.equal(found["counter._extra_state"]["kept"], torch.full((2,), 2.0))
    with engine.masters() as masters:
        assert all(torch.equal(found[name], value) for name, value in masters.items())
    before = {name: value.clone() for name, value in found.items() if isinstance(value, torch.Tensor)}
    losses = [[one_step(each, ids, loss_of) for ids in batches()] for each in (straight, engine)]
    assert all(torch.equal(found[name], value) for name, value in before.items()), "it is a copy"
    assert found["counter._extra_state"]["kept"][0] == 2
    assert_equal(finished(straight, losses[0]), finished(engine, losses[1]))


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.one_in(2)
def test_a_state_dict_in_another_dtype(system: str) -> None:
    chosen, options = SYSTEMS[system]
    with start(chosen, build("gpt2"), settings(dtype="bf16"), options) as engine:
        one_step(engine, tokens(1, 1)[0])
        masters = engine.state_dict()
        for asked, dtype in (("bf16", torch.bfloat16), (torch.float16, torch.float16)):
            found = engine.state_dict(dtype=asked)  # type: ignore[arg-type]
            assert list(found) == list(masters)
            assert all(torch.equal(found[name], value.to(dtype)) for name, value in masters.items())
        with engine.summon() as summoned:
            for whole in (masters, summoned):
                assert str(build("gpt2").load_state_dict(whole)) == MATCHED
        with pytest.raises(ValueError, match="dtype is 'int8': give 'bf16' or 'fp16' or 'fp32'"):
            engine.state_dict(dtype="int8")  # type: ignore[arg-type]


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_is_summoned_loads_strictly(system: str) -> None:
    with begin(system, odd()) as engine:
        own = engine.state_dict()
        with engine.summon() as found:
            assert list(found) == [name for name in own if not name.endswith("_extra_state") and name != "sum"]
            assert all(torch.equal(own[name], value) for name, value in found.items())
            assert found["head.weight"] is found["embedding.weight"] and found["seen"] is found["again.seen"]


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_is_summoned_and_edited_is_taken_over(system: str) -> None:
    """A loop over all names edits a tied weight once, one edited name speaks for all, and buffers are the model's."""
    with begin(system, odd()) as engine:
        before = engine.state_dict()
        with engine.summon(write=True) as found:
            for value in found.values():
                value.mul_(2)
        after = engine.state_dict()
        for name in found:
            assert torch.equal(after[name], before[name] * 2), name
        with engine.summon(write=True) as found:
            found["embedding.weight"].zero_()
            found["again.seen"] = torch.tensor(7)
            found["counter.spread"] = torch.full((16,), 3.0)
        after = engine.state_dict()
        assert not after["head.weight"].any() and int(after["seen"]) == int(after["counter.seen"]) == 7
        assert engine.module.get_buffer("counter.spread").tolist() == [3.0] * 16
        assert one_step(engine, batches()[0], loss_of) >= 0


def _disagree(found: dict[str, torch.Tensor]) -> None:
    found["head.weight"].fill_(1)
    found["embedding.weight"] = torch.zeros(50, 16)


def _past_versions(found: dict[str, torch.Tensor]) -> None:
    found["head.weight"].data.fill_(1)


@pytest.mark.parametrize(
    ("edit", "message"),
    [
        (_disagree, "embedding.weight and head.weight are one weight and have different values now: give both the same"),
        (_past_versions, "embedding.weight and head.weight are one weight and have different values now"),
        (lambda found: found.pop("norm.weight"), r"norm.weight is missing now: leave a tensor of shape \(16,\) there"),
        (lambda found: found.update({"norm.running_var": torch.ones(3)}), r"norm.running_var is \(3,\) now: leave a tensor"),
    ],
)
def test_edits_that_cannot_be_taken_over_change_nothing(edit: Callable[[dict[str, torch.Tensor]], None], message: str) -> None:
    with begin("elixir", odd(), device_memory=TIGHT) as engine:
        before = engine.state_dict()

        def attempt() -> None:
            with engine.summon(write=True) as found:
                found["blocks.0.weight"].zero_()
                edit(found)

        with pytest.raises(ValueError, match=message):
            attempt()
        assert all(torch.equal(value, before[name]) for name, value in engine.state_dict().items() if "_extra" not in name)


def test_parameters_that_are_no_engine_s_are_there_too() -> None:
    """Integers of a quantized base, say: no master, but the model's own state dict has them."""
    model = nn.Linear(3, 2)
    model.codes = nn.Parameter(torch.arange(4), requires_grad=False)
    values = {name: value.detach().clone() for name, value in model.named_parameters() if name != "codes"}
    with export.by_all_names(model, values, write=True, ranks=SingleRank()) as found:
        assert str(model.load_state_dict(found)) == MATCHED
        found["codes"] += 1
        found["bias"] = torch.ones(2)
    assert model.codes.tolist() == [1, 2, 3, 4] and values["bias"].tolist() == [1, 1]


def test_a_state_dict_that_fails_leaves_the_engine_its_parameters() -> None:
    def fail(*_: Any) -> None:
        raise KeyError("of the user's own")

    with begin("elixir", odd(), device_memory=TIGHT) as engine:
        before = list(engine.module.parameters())
        hook = engine.module.register_state_dict_post_hook(fail)
        with pytest.raises(KeyError):
            engine.state_dict()
        hook.remove()
        assert all(one is other for one, other in zip(before, engine.module.parameters(), strict=True))
        with pytest.raises(UnsupportedError, match=r"engine\.state_dict\(\) and engine\.save_pretrained\(folder\) have them"):
            engine.module.state_dict()
        assert one_step(engine, batches()[0], loss_of) >= 0


Family = namedtuple("Family", "kind config inputs")
IDS = {"input_ids": torch.arange(24).view(2, 12)}
SMALL = dict(vocab_size=64, bos_token_id=1, eos_token_id=2, pad_token_id=0)
T5 = dict(SMALL, d_model=16, d_kv=8, d_ff=32, num_heads=2, decoder_start_token_id=0)
FAMILIES = {
    "gpt2": Family(
        transformers.GPT2LMHeadModel, transformers.GPT2Config(**SMALL, n_layer=2, n_embd=16, n_head=2, n_positions=16), IDS
    ),
    "opt": Family(
        transformers.OPTForCausalLM,
        transformers.OPTConfig(
            **SMALL,
            hidden_size=16,
            word_embed_proj_dim=16,
            ffn_dim=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=16,
        ),
        IDS,
    ),
    "bert": Family(
        transformers.BertForMaskedLM,
        transformers.BertConfig(
            **SMALL,
            hidden_size=16,
            intermediate_size=32,
            num_hidden_layers=2,
            num_attention_heads=2,
            max_position_embeddings=16,
        ),
        IDS,
    ),
    "t5": Family(
        transformers.T5ForConditionalGeneration,
        transformers.T5Config(**T5, num_layers=2),
        IDS | {"decoder_input_ids": IDS["input_ids"]},
    ),
    "switch": Family(
        transformers.SwitchTransformersForConditionalGeneration,
        transformers.SwitchTransformersConfig(**T5, num_layers=2, num_sparse_encoder_layers=1, num_experts=2),
        IDS | {"decoder_input_ids": IDS["input_ids"]},
    ),
    "resnet": Family(
        transformers.ResNetForImageClassification,
        transformers.ResNetConfig(embedding_size=8, hidden_sizes=[8, 16], depths=[1, 1], layer_type="basic", num_labels=3),
        {"pixel_values": torch.linspace(-1, 1, 3 * 3 * 256).view(3, 3, 16, 16)},
    ),
}


@pytest.mark.parametrize(
    ("family", "system"), [("gpt2", system) for system in SYSTEMS] + [(each, "elixir") for each in FAMILIES if each != "gpt2"]
)
@pytest.mark.one_in(4)
def test_a_saved_folder_is_read_by_from_pretrained(family: str, system: str, tmp_path: Path) -> None:
    kind, config, inputs = FAMILIES[family]
    torch.manual_seed(0)
    model = kind(config).train()
    chosen, options = SYSTEMS[system]
    dtype = "bf16" if family == "gpt2" else "fp32"
    with start(chosen, model, settings(dtype=dtype), options) as engine:
        engine.backward(engine(**inputs).logits.float().square().mean())
        engine.step()
        attributes = dict(vars(model.config))
        for asked, found in (("fp32", torch.float32), ("bf16", torch.bfloat16)):
            engine.save_pretrained(tmp_path / asked, dtype=asked)  # type: ignore[arg-type]
            loaded, report = kind.from_pretrained(tmp_path / asked, output_loading_info=True)
            assert loaded.config.dtype == loaded.dtype == found
            assert not any(report[what] for what in ("missing_keys", "unexpected_keys", "mismatched_keys")), report
            ours, theirs = engine.state_dict(dtype=asked), loaded.state_dict()  # type: ignore[arg-type]
            assert list(ours) == list(theirs)
            for name, value in ours.items():
                assert torch.equal(value.to(theirs[name].dtype), theirs[name]), name
        assert vars(model.config) == attributes


def test_values_that_the_host_has_no_room_for_wait_in_a_file(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with start(RESIDENT, build("gpt2"), settings(dtype="bf16")) as engine:
        expected = engine.state_dict()
        monkeypatch.setattr(export, "free_host_memory", lambda: 1000)
        with pytest.raises(
            BudgetError, match=r"state_dict: the values take .* of host memory, 1000B are free: write them with"
        ):
            engine.state_dict()
        engine.save_pretrained(tmp_path, max_shard_size="300KB")
        loaded = transformers.GPT2LMHeadModel.from_pretrained(tmp_path).state_dict()
        assert all(torch.equal(loaded[name], value) for name, value in expected.items())
        assert {path.suffix for path in tmp_path.iterdir()} == {".json", ".safetensors"}
        assert len(list(tmp_path.glob("*.safetensors"))) > 1
        monkeypatch.setattr(shutil, "disk_usage", lambda folder: SimpleNamespace(free=1 << 20))
        message = r"take .*, half of them for a moment, since the host has no memory for them, 1MiB are free in .*: name"
        with pytest.raises(BudgetError, match=message):
            engine.save_pretrained(tmp_path)


@pytest.mark.parametrize("system", SYSTEMS)
def test_what_cannot_be_saved_is_told_in_one_line(system: str, tmp_path: Path) -> None:
    engine = begin(system, odd())
    with pytest.raises(UnsupportedError, match=r"Odd has none of its own.*torch\.save\(engine\.state_dict\(\), file\)"):
        engine.save_pretrained(tmp_path)
    engine.backward(loss_of(engine, batches()[0, 0], 1))
    with pytest.raises(UnsupportedError, match="export: a step is in progress"):
        engine.state_dict()
    engine.close()
    with pytest.raises(ValueError, match="the engine is closed"):
        engine.state_dict()


def test_a_folder_that_cannot_be_written(tmp_path: Path) -> None:
    file = tmp_path / "file"
    file.touch()
    with start(RESIDENT, build("gpt2"), settings()) as engine:
        with pytest.raises(ValueError, match="is a file: name a folder"):
            engine.save_pretrained(file)
        with pytest.raises(ValueError, match="cannot be written"):
            engine.save_pretrained(file / "below")
