"""`systems.estimate`: what `harness plan` says, of a model of the user's own, of whom nothing is changed or copied."""

from __future__ import annotations

import copy
import json
import re
from functools import partial
from typing import Any

import pytest
import torch
import transformers
from torch import nn

import systems
from harness import cli
from models import registry as models_registry
from models.loss import token_loss
from systems import registry
from systems.errors import UnsupportedError
from systems.optimizers.lion import Lion
from systems.prediction.bounds import LIMITS
from systems.prediction.estimate import Estimate, in_arguments

MIB = 1 << 20
STRATEGIES = {name for name, entry in registry.find().items() if entry.exposes == "STRATEGY"}
SMALL: dict[str, Any] = {"hardware": "h100-80g-x1", "device": "cpu", "batch_size": 2, "seq_len": 32}


def config(**given: Any) -> transformers.GPT2Config:
    sizes = {"n_layer": 4, "n_embd": 64, "n_head": 4, "vocab_size": 256, "n_positions": 64, "bos_token_id": 0}
    return transformers.GPT2Config(**(sizes | given), eos_token_id=0, use_cache=False)


def opt_tiny(**given: Any) -> Estimate:
    """As the harness asks about it: its loss is not transformers'."""
    shape = models_registry.resolve("opt-tiny")
    loss = partial(token_loss, objective=shape.objective)
    return systems.estimate(models_registry.build(shape), loss=loss, **(SMALL | given))


@pytest.mark.parametrize("system", ["all", "elixir", "resident", "deepspeed-zero3-offload"])
@pytest.mark.parametrize("budget", ["6MiB", "300KiB"])
@pytest.mark.one_in(7)
def test_it_says_what_harness_plan_says(system: str, budget: str, capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--system", system, "--model", "opt-tiny", "--hardware", "h100-80g-x1", "--device", "cpu"]
    code = cli.main([*words, "--device-memory", budget, "--batch-size", "2", "--seq-len", "32"])
    told = json.loads(capsys.readouterr().out)
    found = opt_tiny(system=system, device_memory=budget)
    rows = told["ranking"] if system == "all" else [told]
    assert found.fits == (code == 0) and [row.system for row in found.rows] == [row["system"] for row in rows]
    assert system != "all" or {row.system for row in found.rows} == STRATEGIES | {"resident"}
    for mine, theirs in zip(found.rows, rows, strict=True):
        assert mine.tiers is not None and mine.tiers.keys() == theirs["tiers"].keys()
        for name, tier in mine.tiers.items():
            assert (tier.need_bytes, tier.have_bytes) == tuple(theirs["tiers"][name][x] for x in ("need_bytes", "have_bytes"))
        assert (mine.fits, mine.bound, mine.least_device_bytes) == (
            *(theirs["fits"], theirs["bound"], theirs["least_device_bytes"]),
        )
        assert (mine.step_s, mine.tokens_per_s) == (theirs["plan"]["predicted_step_time_s"], theirs["tokens_per_s"])
        changes = [remedy["changes"] for remedy in theirs["remedies"] if "num_layers" not in remedy["changes"]]
        assert system == "all" or [dict(remedy.changes) for remedy in mine.remedies] == changes


def every_bit(module: nn.Module) -> dict[str, Any]:
    """What could be changed of a module, addresses included."""
    tensors = {**dict(module.named_parameters()), **dict(module.named_buffers())}
    return {
        "addresses": {name: (id(t), t.data_ptr(), t.dtype, t.requires_grad, t._version) for name, t in tensors.items()},
        "values": {name: t.detach().clone() for name, t in tensors.items()},
        "modes": [each.training for each in module.modules()],
        "hooks": [(len(each._forward_hooks), len(each._forward_pre_hooks), sorted(vars(each))) for each in module.modules()],
    }


def alike_bits(one: dict[str, Any], other: dict[str, Any]) -> bool:
    same = all(torch.equal(value, other["values"][name]) for name, value in one["values"].items())
    return same and all(one[key] == other[key] for key in one if key != "values")


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_a_module_a_meta_module_and_a_config_are_one_and_are_left_as_they_are(recompute: Any) -> None:
    mine = config(resid_pdrop=0.1)
    before_config = copy.deepcopy(mine.to_dict())
    real = transformers.GPT2LMHeadModel(mine).half().eval()
    real.transformer.h[1].mlp.train()
    with torch.device("meta"):
        empty = transformers.GPT2LMHeadModel(mine)
    gradient = real.transformer.ln_f.weight.grad = torch.ones(64).half()
    before, random = every_bit(real), torch.get_rng_state()
    found = [systems.estimate(model, recompute=recompute, **SMALL) for model in (real, empty, mine)]
    assert str(found[0]) == str(found[1]) == str(found[2]) and found[0] == found[1] == found[2]
    assert alike_bits(before, every_bit(real))
    assert real.transformer.ln_f.weight.grad is gradient and torch.equal(gradient, torch.ones(64).half())
    assert torch.equal(random, torch.get_rng_state()) and mine.to_dict() == before_config
    assert all(p.is_meta and p.grad is None for p in empty.parameters())


def test_what_does_not_fit_is_told_with_what_would_and_that_does(capsys: pytest.CaptureFixture[str]) -> None:
    asked: dict[str, Any] = SMALL | {"batch_size": 16, "seq_len": 64, "device_memory": 3 * MIB, "host_memory": "64MiB"}
    found = systems.estimate(config(), **asked)
    (row,) = found.rows
    assert not found.fits and row.why_not is not None and "needs at least" in row.why_not
    assert row.tiers is not None and row.tiers["device"].need_bytes > row.tiers["device"].have_bytes == 3 * MIB
    assert len(row.remedies) > 1
    for remedy in row.remedies:
        given: dict[str, Any] = eval(f"dict({in_arguments(remedy.changes)})")
        assert systems.estimate(config(), **(asked | given)).fits, remedy
    told = " ".join(str(found).split())
    assert f"elixir does not fit: {row.why_not}" in told
    assert all(f"elixir would fit with {in_arguments(r.changes)}: {r.what}" in told for r in row.remedies)


def test_a_disk_is_a_remedy_with_a_folder_of_the_users() -> None:
    found = systems.estimate(config(), **(SMALL | {"host_memory": "2MiB", "device_memory": "1500KiB"}))
    assert not found.fits and any(in_arguments(remedy.changes) == "disk='FOLDER'" for remedy in found.best.remedies)
    with_disk = SMALL | {"host_memory": "2MiB", "device_memory": "1500KiB", "disk_memory": "1GiB"}
    tiers = systems.estimate(config(), **with_disk).best.tiers
    assert tiers is not None and tiers.keys() == {"device", "host", "disk"} and all(tier.fits for tier in tiers.values())


def test_a_table_that_a_person_reads() -> None:
    found = systems.estimate(config(), system="all", device_memory="2MiB", **SMALL)
    title, head, *lines = str(found).splitlines()
    assert title.startswith("GPT2LMHeadModel, 220,544 parameters, 1 rank of NVIDIA H100 80GB HBM3: batch 2 x 32 tokens, bf16")
    assert " ".join(head.split()) == "system fits step s tokens/s bound by device needs, has host needs, has least device"
    assert [line.split()[0] for line in lines[: len(found.rows)]] == [row.system for row in found.rows]
    column = head.index("least device")
    assert all(line[column - 2 : column] == "  " and line[column] != " " for line in lines[: len(found.rows)])
    assert any(line.startswith("resident does not fit: ") for line in lines)
    assert lines[-1].partition(": ")[2] in LIMITS.values()
    assert found["resident"] is found.rows[-1] and found.best is found.rows[0]


def test_a_system_that_cannot_says_so_in_the_result() -> None:
    found = systems.estimate(config(), system="elixir", clip=1.0, options={"nonfinite": "stop"}, **SMALL)
    assert not found.fits and found.best.tiers is None and "clip" in str(found.best.why_not)
    assert "elixir cannot: " in str(found)


class Plain(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.layers = nn.ModuleList(nn.Linear(32, 32) for _ in range(3))

    def forward(self, tokens: torch.Tensor) -> torch.Tensor:
        hidden = self.embedding(tokens)
        for layer in self.layers:
            hidden = layer(hidden).relu()
        return self.head(hidden)


def t5() -> transformers.T5Config:
    return transformers.T5Config(d_model=32, d_ff=64, num_layers=2, num_heads=2, d_kv=16, vocab_size=128)


KINDS: list[Any] = [
    Plain(),
    t5(),
    transformers.BertConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=128),
    transformers.LlamaConfig(hidden_size=32, num_hidden_layers=2, num_attention_heads=2, intermediate_size=64, vocab_size=128),
    transformers.MixtralConfig(
        hidden_size=32, num_hidden_layers=2, num_attention_heads=2, num_key_value_heads=2, intermediate_size=64
    ),
]


@pytest.mark.parametrize("model", KINDS, ids=lambda model: type(model).__name__)
def test_models_of_all_kinds(model: Any) -> None:
    row = systems.estimate(model, **SMALL).best
    assert row.fits and row.step_s is not None and row.step_s > 0 and row.tiers is not None
    assert row.tiers["device"].parts["activations"] > 0


def test_states_are_those_of_the_optimizer() -> None:
    model = Plain()
    optimizers: dict[str, torch.optim.Optimizer | str] = {
        "sgd": "sgd",
        "lion": Lion(model.parameters(), lr=1e-4),
        "adamw": torch.optim.AdamW(model.parameters()),
    }
    sizes = {
        name: systems.estimate(model, system="resident", optimizer=optimizer, **SMALL).best.tiers
        for name, optimizer in optimizers.items()
    }
    moments = {name: tiers["device"].parts.get("moments", 0) for name, tiers in sizes.items() if tiers is not None}
    assert moments["sgd"] == 0 and 2 * moments["lion"] == moments["adamw"] > 0


class Silent(Plain):
    def forward(self, tokens: torch.Tensor) -> Any:
        return {"hidden": super().forward(tokens)}


class Sparse(Plain):
    """An engine takes it, for it has values."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("edges", torch.eye(2).to_sparse())


class Raises(Plain):
    def __init__(self, error: Exception) -> None:
        super().__init__()
        self.error = error

    def forward(self, tokens: torch.Tensor) -> Any:
        raise self.error


ODD_SIZES: tuple[Any, ...] = (-1, 1.5, float("nan"), True, b"1GiB")
ODD_BLOCKS: tuple[Any, ...] = (5, None, (True,), ("0",), [1.0])
ODD_COUNTS: tuple[Any, ...] = ("2", [], True, 0, float("nan"))


@pytest.mark.parametrize(
    ("model", "given", "said"),
    [
        ("gpt2", {}, "model is str: give a torch.nn.Module, or a config of transformers"),
        (config(), {"seq_len": 65}, "the model has positions for 64 tokens, `seq_len` is 65: lower it"),
        (config(), {"batch_size": 0}, "batch_size is 0: give a whole number of at least 1"),
        (config(), {"system": "all", "options": {"prefetch": 1}}, "options are of one system"),
        (config(), {"system": "elixer"}, "unknown system 'elixer': did you mean elixir?"),
        (config(), {"system": "roundpipe"}, "makes no plan that could be simulated"),
        (config(), {"hardware": "h100-80g-x3"}, "did you mean h100-80g-x"),
        (config(), {"ranks": 2}, "`ranks=2` is more than the 1 devices of the profile"),
        (config(), {"optimizer": "adamax"}, "unknown optimizer 'adamax'"),
        (config(), {"device_memory": "much"}, "device_memory: 'much' is not a size"),
        (config(), {"host_memory": -1}, "host_memory is -1: give a whole number of at least 0"),
        *((config(), {"disk_memory": odd}, f"disk_memory is {odd!r}: give a whole number of at least 0") for odd in ODD_SIZES),
        *((config(), {"ranks": odd}, re.escape(f"ranks is {odd!r}: give a whole number of")) for odd in ODD_COUNTS),
        (config(), {"batch_size": 10**30}, "`batch_size=1000.*` x `seq_len=32` is beyond any machine: lower them"),
        *((config(), {"recompute": odd}, "give 'none', 'full' or numbers of blocks") for odd in ODD_BLOCKS),
        (config(), {"system": None}, "system is None: give a name"),
        (config(), {"loss": "mse"}, "loss is str: give a function"),
        (config(), {"clip": 10**400}, "clip is 1000"),
        (config(vocab_size=-3), {}, "cannot build GPT2LMHeadModel of this config: RuntimeError: Trying to create"),
        (config(activation_function="nope"), {}, "cannot build GPT2LMHeadModel of this config: KeyError: 'nope'"),
        (config(n_head=0), {}, "cannot build GPT2LMHeadModel of this config: ZeroDivisionError"),
        (Raises(KeyError("a\nb")), {}, "Raises cannot be planned: it does not run on the meta device: KeyError"),
        (Raises(ValueError("a\nb")), {}, "Raises cannot be planned: it does not run on the meta device: ValueError: a"),
        (Sparse(), {}, "Sparse cannot be planned: edges is sparse"),
        (Plain(), {"loss": lambda *_: 1 / 0}, "Plain cannot be planned: it does not run on the meta device: ZeroDivisionError"),
        (config(), {"recompute": (9,)}, "there is no block 9"),
        (transformers.ViTConfig(), {}, "transformers has no causal language model of type 'vit'"),
        (Silent(), {}, "Silent gives neither a loss nor logits: give `loss`"),
        (nn.Linear(4, 4), {}, "it does not run on the meta device"),
    ],
    ids=lambda each: each if isinstance(each, str) else "",
)
@pytest.mark.one_in(2)
def test_bad_input_is_one_line(model: Any, given: dict[str, Any], said: str) -> None:
    with pytest.raises(ValueError, match=said) as raised:
        systems.estimate(model, **(SMALL | given))
    assert "\n" not in str(raised.value)


@pytest.mark.parametrize("positions", [-1, 0, True, None, "64"])
def test_a_config_that_says_no_number_of_positions_has_no_bound(positions: Any) -> None:
    model = Plain()
    model.config = type("Config", (), {"max_position_embeddings": positions})()
    assert "batch 2 x 1024 tokens" in systems.estimate(model, **(SMALL | {"seq_len": None})).title


@pytest.mark.parametrize("blocks", [[1], (1,), {1}, range(1, 2)], ids=repr)
@pytest.mark.one_in(2)
def test_blocks_to_recompute_come_in_anything(blocks: Any) -> None:
    found = [systems.estimate(config(), recompute=each, **SMALL) for each in (blocks, (1,), "none")]
    assert str(found[0]) == str(found[1]) != str(found[2])


def test_without_a_gpu_the_hardware_has_to_be_named(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    with pytest.raises(ValueError, match="name one with `hardware`: .*h100-80g-x1"):
        systems.estimate(config())


def test_what_no_meta_device_runs_is_refused() -> None:
    class Counts(Plain):
        def forward(self, tokens: torch.Tensor) -> torch.Tensor:
            return super().forward(tokens) * tokens.sum().item()

    with pytest.raises(UnsupportedError, match="Counts cannot be planned"):
        systems.estimate(Counts(), **SMALL)
