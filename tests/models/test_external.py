"""Folders and user modules that are no causal language models: what they train on, and what may be set."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import safetensors
import torch
from torch import nn

import models
from models import external, registry


def config_of(kind: str) -> Any:
    import transformers

    if kind == "t5":
        return transformers.T5Config(
            vocab_size=300, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4, decoder_start_token_id=0
        )
    if kind == "bart":
        return transformers.BartConfig(
            vocab_size=300, d_model=32, encoder_layers=2, decoder_layers=2, encoder_attention_heads=4,
            decoder_attention_heads=4, encoder_ffn_dim=48, decoder_ffn_dim=48, max_position_embeddings=64,
        )  # fmt: skip
    if kind == "gpt2":
        return transformers.GPT2Config(vocab_size=300, n_embd=32, n_layer=2, n_head=4, n_positions=64)
    beside = {"albert": {"embedding_size": 16}, "bert": {}}[kind]
    config_class = {"albert": transformers.AlbertConfig, "bert": transformers.BertConfig}[kind]
    return config_class(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48,
        max_position_embeddings=64, **beside,
    )  # fmt: skip


@pytest.mark.parametrize(
    ("kind", "objective", "blocks"),
    [("bert", "masked", 2), ("t5", "seq2seq", 4), ("bart", "seq2seq", 4), ("albert", "masked", 1), ("gpt2", "causal", 2)],
)
def test_a_folder_says_what_it_trains_on(tmp_path: Path, kind: str, objective: str, blocks: int) -> None:
    config_of(kind).save_pretrained(tmp_path)
    shape = registry.resolve(str(tmp_path))
    assert (shape.objective, shape.num_layers, registry.block_count(shape)) == (objective, 2, blocks)
    model: Any = registry.build(shape)
    assert all(p.is_meta for p in model.parameters())
    assert {m.p for m in model.modules() if isinstance(m, torch.nn.Dropout)} <= {0.0}
    fill = registry.initial_weights(shape, 0)
    assert fill is not None
    for name, parameter in model.named_parameters():
        tensor = torch.full(parameter.shape, torch.nan)
        fill(name, tensor)
        assert tensor.isfinite().all()


def test_bert_saved_as_a_decoder_is_causal(tmp_path: Path) -> None:
    config = config_of("bert")
    config.is_decoder, config.architectures = True, ["BertLMHeadModel"]
    config.save_pretrained(tmp_path)
    shape = registry.resolve(str(tmp_path))
    assert shape.objective == "causal" and type(registry.build(shape)).__name__ == "BertLMHeadModel"


@pytest.mark.parametrize("kind", ["bert", "t5", "albert"])
def test_a_folder_is_filled_from_its_files(tmp_path: Path, kind: str) -> None:
    import transformers

    model_class = {"bert": "BertForMaskedLM", "t5": "T5ForConditionalGeneration", "albert": "AlbertForMaskedLM"}[kind]
    torch.manual_seed(0)
    saved = getattr(transformers, model_class)(config_of(kind))
    saved.save_pretrained(tmp_path)
    values = dict(saved.named_parameters(remove_duplicate=False))
    shape = registry.resolve(str(tmp_path))
    fill = registry.initial_weights(shape, 0)
    assert fill is not None
    for name, parameter in registry.build(shape).named_parameters():
        tensor = torch.empty(parameter.shape)
        fill(name, tensor)
        assert torch.equal(tensor, values[name]), name


def test_setting_layers_of_an_encoder_decoder_folder_sets_both_stacks(tmp_path: Path) -> None:
    for kind in ("t5", "bart"):
        config_of(kind).save_pretrained(tmp_path)
        assert registry.block_count(registry.resolve(str(tmp_path), {"num_layers": 3})) == 6
    with pytest.raises(ValueError, match="share one embedding"):
        registry.resolve(str(tmp_path), {"tied": False})
    with pytest.raises(ValueError, match="--set objective has no effect"):
        registry.resolve(str(tmp_path), {"objective": "causal"})


@pytest.mark.parametrize(
    ("odd", "said"),
    [({"activation_function": "nope"}, "can be built: KeyError: 'nope'"), ({"n_layer": 1.5}, "is no model folder: ")],
    ids=["when built", "when read"],
)
def test_values_that_are_no_model_s_are_refused_in_one_line(tmp_path: Path, odd: dict[str, Any], said: str) -> None:
    config_of("gpt2").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | odd))
    with pytest.raises(ValueError, match=said) as refused:
        registry.build(registry.resolve(str(tmp_path)))
    assert str(tmp_path) in str(refused.value) and "\n" not in str(refused.value)


def test_no_code_of_a_folder_is_run(tmp_path: Path) -> None:
    """Neither what it says its classes are, nor kernels that it would have fetched."""
    config_of("gpt2").save_pretrained(tmp_path)
    path = tmp_path / "config.json"
    written = json.loads(path.read_text())
    classes = ("Config", "Model", "ModelForCausalLM", "ModelForMaskedLM", "Tokenizer")
    written["auto_map"] = {f"Auto{name}": f"theirs.{name}" for name in classes}
    written |= dict.fromkeys(("attn_implementation", "_attn_implementation", "_attn_implementation_internal"), "theirs/kernel")
    (tmp_path / "theirs.py").write_text(f"open({str(tmp_path / 'ran')!r}, 'w')\n")
    path.write_text(json.dumps(written))
    shape = registry.resolve(str(tmp_path))
    model: Any = registry.build(shape)
    assert type(model).__module__.startswith("transformers.models.gpt2") and model.config._attn_implementation == "sdpa"
    path.write_text(json.dumps(written | {"model_type": "theirs"}))
    with pytest.raises(ValueError, match=r"^--model [^\n]*no model folder[^\n]*$"):
        registry.resolve(str(tmp_path))
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("file", ["../outside.safetensors", "{parent}/outside.safetensors", "a/../../outside.safetensors"])
def test_a_folder_s_index_names_files_of_the_folder(tmp_path: Path, file: str) -> None:
    """Though they would be the right ones."""
    import transformers

    folder = tmp_path / "model"
    transformers.GPT2LMHeadModel(config_of("gpt2")).save_pretrained(folder)
    (folder / "a").mkdir()
    (folder / "model.safetensors").rename(tmp_path / "outside.safetensors")
    with safetensors.safe_open(tmp_path / "outside.safetensors", framework="pt") as held:
        named = dict.fromkeys(held.keys(), file.format(parent=tmp_path))
    (folder / "model.safetensors.index.json").write_text(json.dumps({"weight_map": named}))
    with pytest.raises(ValueError, match=r"^[^\n]*index.json cannot be read[^\n]*is no file of this folder$"):
        registry.initial_weights(registry.resolve(str(folder)), 0)


USER_MODULES = """
import transformers
from torch import nn

def bert():
    return transformers.BertForMaskedLM(transformers.BertConfig(
        vocab_size=300, hidden_size=32, num_hidden_layers=2, num_attention_heads=4, intermediate_size=48))

def t5():
    return transformers.T5ForConditionalGeneration(transformers.T5Config(
        vocab_size=300, d_model=32, d_kv=8, d_ff=48, num_layers=2, num_heads=4))

def plain():
    return nn.Sequential(nn.Embedding(300, 8), nn.Linear(8, 300))
"""


def test_a_users_module_shows_or_is_told_what_it_trains_on(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "user_families.py").write_text(USER_MODULES)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "user_families", raising=False)
    shown = {name: registry.resolve(f"user_families:{name}").objective for name in ("bert", "t5", "plain")}
    assert shown == {"bert": "masked", "t5": "seq2seq", "plain": "causal"}
    assert registry.resolve("user_families:plain", {"objective": "masked"}).objective == "masked"
    with pytest.raises(ValueError, match="objective takes causal or masked or seq2seq, not 'mask'") as error:
        registry.resolve("user_families:plain", {"objective": "mask"})
    assert "\n" not in str(error.value)


def test_a_folder_of_the_user_s_with_this_package_s_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Without an `__init__.py` python would pass it over for an installed package. It is no registry."""
    (tmp_path / "models").mkdir()
    (tmp_path / "models" / "mine.py").write_text(
        "FAMILY = None\n\ndef build():\n    from torch import nn\n    return nn.Sequential(nn.Linear(4, 8))\n"
    )
    monkeypatch.setattr(models, "__path__", list(models.__path__))
    monkeypatch.chdir(tmp_path)
    try:
        assert isinstance(external._call("models.mine:build"), nn.Sequential)
        assert "models.mine" in sys.modules and registry.families.__wrapped__() == registry.families()
    finally:
        sys.modules.pop("models.mine", None)
        vars(models).pop("mine", None)
    code = "import models.mine, models; print(models.mine.FAMILY, models.mine.__file__)"
    path = os.pathsep.join([str(Path(models.OWN[0]).parent), str(tmp_path)])
    told = subprocess.run(
        [sys.executable, "-c", code], cwd="/", env=os.environ | {"PYTHONPATH": path}, capture_output=True, text=True, check=True
    )
    assert told.stdout.split() == ["None", str(tmp_path / "models" / "mine.py")]
