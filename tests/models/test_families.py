"""What is particular to BERT, T5 and ALBERT: fields that `--set` reaches, ties, and where dropout goes."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from models import registry
from systems.recipe.model.blocks import find_blocks

NEW = ("bert-tiny", "t5-tiny", "albert-tiny")


def built(name: str, **overrides: object) -> Any:
    return registry.build(registry.resolve(name, overrides))


def test_t5_fields_reach_the_model() -> None:
    model = built(
        "t5-tiny", num_layers="2", decoder_layers="4", head_size="16", gated="true", relative_buckets=8,
        relative_distance=20, ffn_size=96, num_heads=6,
    )  # fmt: skip
    assert (len(model.encoder.block), len(model.decoder.block)) == (2, 4)
    attention = model.decoder.block[0].layer[0].SelfAttention
    assert attention.q.weight.shape == (6 * 16, 128) and attention.o.weight.shape == (128, 6 * 16)
    assert attention.relative_attention_bias.weight.shape == (8, 6) and attention.relative_attention_max_distance == 20
    feed_forward = model.encoder.block[0].layer[1].DenseReluDense
    assert feed_forward.wi_0.weight.shape == feed_forward.wi_1.weight.shape == (96, 128)
    assert "GELU" in type(feed_forward.act).__name__
    assert isinstance(built("t5-tiny").encoder.block[0].layer[1].DenseReluDense.act, nn.ReLU)


def test_t5_layers_go_for_both_stacks_unless_said_otherwise() -> None:
    for overrides, blocks in (({"num_layers": 5}, 10), ({"num_layers": 5, "decoder_layers": 1}, 6)):
        assert registry.block_count(registry.resolve("t5-tiny", overrides)) == blocks
    assert list(find_blocks(built("t5-tiny"))) == [f"{s}.block.{i}" for s in ("encoder", "decoder") for i in range(3)]


@pytest.mark.parametrize("tied", [True, False])
def test_t5_head_is_tied_or_not_and_scaled_only_if_tied(tied: bool) -> None:
    model = built("t5-tiny", tied=tied)
    model.to_empty(device="cpu").tie_weights()  # what a user's own code may call at any time
    assert (model.lm_head.weight is model.shared.weight) == tied
    assert model.encoder.embed_tokens.weight is model.decoder.embed_tokens.weight is model.shared.weight
    assert model.config.scale_decoder_outputs == tied


@pytest.mark.parametrize("name", ["bert-tiny", "albert-tiny"])
@pytest.mark.parametrize("tied", [True, False])
def test_masked_heads_have_one_bias(name: str, tied: bool) -> None:
    """Otherwise an untied model had a parameter that never gets a gradient."""
    model = built(name, tied=tied)
    head = model.get_output_embeddings()
    assert (head.weight is model.get_input_embeddings().weight) == tied
    biases = [n for n, p in model.named_parameters() if p.shape == (384,)]
    assert len(biases) == 1 and dict(model.named_parameters())[biases[0]] is head.bias


def test_albert_fields_reach_the_model() -> None:
    model = built("albert-tiny", num_layers=4, num_groups=2, layers_per_group=3, embedding_size=32)
    groups = model.albert.encoder.albert_layer_groups
    assert len(groups) == 2 and len(groups[0].albert_layers) == 3
    assert model.albert.embeddings.word_embeddings.weight.shape == (384, 32)
    assert registry.block_count(registry.resolve("albert-base")) == 1
    with pytest.raises(ValueError, match="num_layers 2 leaves some of num_groups 3 unused: set num_groups to at most 2"):
        registry.resolve("albert-tiny", {"num_layers": 2})


@pytest.mark.parametrize("name", ["albert-tiny", "albert-base"])
def test_albert_calls_its_groups_again_and_again(name: str) -> None:
    shape = registry.resolve(name, {"num_layers": 6, "hidden_size": 64, "ffn_size": 128, "num_heads": 4})
    model = registry.build(shape).to("meta")
    calls: list[str] = []
    for block_name, block in find_blocks(model).items():
        block.register_forward_pre_hook(lambda *_, block_name=block_name: calls.append(block_name[-1]))
    model(input_ids=torch.zeros(1, 8, dtype=torch.int64, device="meta"))
    assert "".join(calls) == {"albert-tiny": "001122", "albert-base": "000000"}[name]


@pytest.mark.parametrize("name", NEW)
def test_dropout_is_off_and_one_number_sets_all_of_it(name: str) -> None:
    for given in (0.0, 0.25):
        model = built(name, dropout=given)
        # A classification head's dropout is in the config and in no layer of a language model.
        drops = {m.p for m in model.modules() if isinstance(m, nn.Dropout)}
        assert drops == {given}


@pytest.mark.parametrize("name", NEW)
def test_objective_is_not_to_be_set(name: str) -> None:
    with pytest.raises(ValueError, match="no field 'objective'"):
        registry.resolve(name, {"objective": "causal"})


def test_one_layer_is_a_block_too() -> None:
    for name in ("opt-tiny", "gpt-tiny", "bert-tiny"):
        assert registry.block_count(registry.resolve(name, {"num_layers": 1})) == 1
    assert registry.block_count(registry.resolve("t5-tiny", {"num_layers": 1})) == 2
