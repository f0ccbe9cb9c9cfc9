"""Work and parameters of models with experts, this project's and transformers', against formulas worked out by hand."""

from __future__ import annotations

import dataclasses
from pathlib import Path
from typing import Any

import pytest
import torch

from models import flops, registry
from models.activated import count_parameters
from models.moe import capacity_of
from systems.prediction.language_models import without_weights
from tests.models.others import OTHERS

BATCH, LENGTH = 2, 16
TOKENS = BATCH * LENGTH


@pytest.mark.parametrize(("experts", "choices", "factor"), [(4, 1, 1.25), (4, 2, 2.0), (3, 1, 1.0), (8, 1, 0.5)])
def test_pr_moe(experts: int, choices: int, factor: float) -> None:
    """Beside a GPT's: a gate for each expert, the two-way softmax, and an expert's feed-forward for each choice."""
    given = {"experts": experts, "choices": choices, "capacity_factor": factor}
    shape: Any = registry.resolve("pr-moe-tiny", given)
    h, f = shape.hidden_size, shape.ffn_size
    counted = flops.count(shape, batch_size=BATCH, seq_len=LENGTH).forward
    dense = flops.count(registry.resolve("gpt-tiny"), batch_size=BATCH, seq_len=LENGTH).forward
    pyramid = [experts, 2 * experts, 2 * experts]
    slots = [count * capacity_of(tokens=TOKENS, experts=count, factor=factor) for count in pyramid]
    needed = [min(TOKENS * choices, each) for each in slots]
    beside = sum(2 * TOKENS * h * (count + 2) for count in pyramid)
    assert counted.other == dense.other + beside + sum(2 * each * 2 * h * f for each in needed)
    assert counted.padding == sum(2 * (each - filled) * 2 * h * f for each, filled in zip(slots, needed, strict=True))
    assert (counted.scores, counted.causal_scores) == (dense.scores, dense.causal_scores)


def test_t5_moe() -> None:
    shape: Any = registry.resolve("t5-moe-tiny", {"gated": True})
    dense = flops.count(registry.resolve("t5-tiny", {"gated": True, "num_layers": 4}), batch_size=BATCH, seq_len=LENGTH).forward
    counted = flops.count(shape, batch_size=BATCH, seq_len=LENGTH).forward
    h, f, slots = shape.hidden_size, shape.ffn_size, 4 * capacity_of(tokens=TOKENS, experts=4, factor=1.25)
    assert counted.other == dense.other + 4 * 2 * TOKENS * h * 4, (
        "one expert is as much as the feed-forward, and there are gates"
    )
    assert counted.padding == 4 * 2 * (slots - TOKENS) * 3 * h * f
    assert counted.full == counted.other + counted.scores, "what no token needs is not what the mathematics needs"


def test_padding_is_hardware_s_work_alone() -> None:
    one = flops.ForwardFlops(other=1000, scores=20, causal_scores=10, padding=300)
    counted = flops.FlopCount(one, (one,))
    assert flops.step_flops(counted, recompute="full") == 4 * 1010
    assert flops.step_flops(counted, recompute="full", padded=True) == 4 * 1310
    assert flops.model_tflops(counted, step_time_s=1e-12) == pytest.approx(3 * 1010)
    assert flops.hardware_tflops(counted, recompute="full", step_time_s=1e-12) == pytest.approx(4 * 1310)


@pytest.mark.parametrize("name", ["pr-moe-tiny", "t5-moe-tiny"])
@pytest.mark.parametrize("choices", [1, 2])
def test_activated_parameters_and_those_of_other_ranks(name: str, choices: int) -> None:
    shape: Any = registry.resolve(name, {"choices": choices, "experts": 6})
    counted = count_parameters(registry.build(shape))
    expert = 2 * 128 * 512 + (512 + 128 if name == "pr-moe-tiny" else 0)
    mixtures = [6, 12, 12] if name == "pr-moe-tiny" else [6] * 4
    assert counted.total == registry.parameter_count(shape)
    assert counted.activated == counted.total - expert * sum(count - choices for count in mixtures)
    part = dataclasses.replace(shape, expert_ranks=3, expert_rank=1)
    assert count_parameters(registry.build(part)) == counted


def test_a_dense_model_uses_all() -> None:
    assert count_parameters(registry.build(registry.resolve("gpt-tiny"))).activated is None


def layer_of(kind: str, config: Any) -> tuple[int, int, int]:
    """Of a layer: products of a token outside of experts and scores; of one expert; width of a head's query and value."""
    h = config.hidden_size
    heads, groups = config.num_attention_heads, getattr(config, "num_key_value_heads", 4)
    if kind == "deepseek-v3":
        query, value = config.qk_nope_head_dim + config.qk_rope_head_dim, config.v_head_dim
        low, key = config.kv_lora_rank, config.qk_nope_head_dim + config.v_head_dim
        attention = h * config.q_lora_rank + config.q_lora_rank * heads * query + h * (low + config.qk_rope_head_dim)
        attention += low * heads * key + heads * value * h
        return attention, 3 * h * config.moe_intermediate_size, query + value
    head = getattr(config, "head_dim", None) or h // heads
    inner = config.moe_intermediate_size if kind == "qwen3-moe" else config.intermediate_size
    return 2 * h * head * (heads + groups), 3 * h * inner, 2 * head


@pytest.mark.parametrize("kind", [kind for kind in OTHERS if kind != "switch"])
def test_transformers_mixtures(kind: str) -> None:
    config = OTHERS[kind]()
    attention, expert, widths = layer_of(kind, config)
    h, choices, experts = config.hidden_size, config.num_experts_per_tok, OTHERS[kind].keywords["experts"]
    mixture = attention + h * experts + choices * expert
    first = mixture
    if kind == "deepseek-v3":  # a dense layer first, and an expert that all tokens pass
        mixture += expert
        first = attention + 3 * h * config.intermediate_size
    counted = flops.count(without_weights(config), batch_size=BATCH, seq_len=LENGTH).forward
    assert counted.other == 2 * TOKENS * (first + mixture + h * config.vocab_size)
    assert counted.scores == 2 * 2 * TOKENS * LENGTH * config.num_attention_heads * widths
    assert counted.padding == 0
    model = without_weights(config)
    found = count_parameters(model)
    many = 1 if kind == "deepseek-v3" else 2
    biases = 2 * config.intermediate_size + h if kind == "gpt-oss" else 0
    assert found.activated == found.total - many * (experts - choices) * (expert + biases)
    assert found.total == sum(p.numel() for p in model.parameters())


def test_switch_transformers() -> None:
    """A token passes one expert, whatever the gate says: each stack has a dense block and one with experts."""
    config = OTHERS["switch"]()
    h, a, f, experts = config.d_model, config.num_heads * config.d_kv, config.d_ff, config.num_experts
    counted = flops.count(without_weights(config), batch_size=BATCH, seq_len=LENGTH).forward
    assert counted.other == 2 * TOKENS * (
        2 * 4 * h * a + 2 * 8 * h * a + 4 * 2 * h * f + 2 * h * experts + h * config.vocab_size
    )
    found = count_parameters(without_weights(config))
    assert found.activated == found.total - 2 * (experts - 1) * 2 * h * f


def test_a_folder_without_fused_attention_is_built_with_attention_written_out(tmp_path: Path) -> None:
    OTHERS["switch"]().save_pretrained(tmp_path)
    shape = registry.resolve(str(tmp_path))
    assert shape.objective == "seq2seq"
    model: Any = registry.build(shape)
    assert model.config._attn_implementation == "eager"
    assert flops.count(shape, batch_size=BATCH, seq_len=LENGTH).forward.other > 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.bfloat16])
def test_grouped_products_count_forward_and_backward_in_any_dtype(dtype: torch.dtype) -> None:
    counter = flops._Counter()
    rows = torch.empty(24, 6, device="meta", dtype=dtype, requires_grad=True)
    experts = torch.empty(4, 6, 10, device="meta", dtype=dtype, requires_grad=True)
    ends = torch.empty(4, device="meta", dtype=torch.int32)
    with counter:
        out = torch._grouped_mm(rows, experts, offs=ends)
        assert out.shape == (24, 10) and counter.spent[0].other == 2 * 24 * 6 * 10
        out.sum().backward()
    assert counter.spent[0].other == 3 * 2 * 24 * 6 * 10
    assert rows.grad is not None and rows.grad.shape == rows.shape
    assert experts.grad is not None and experts.grad.shape == experts.shape
