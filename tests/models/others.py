"""transformers' models with experts, tiny, as their authors built them: two layers each, no dropout."""

from __future__ import annotations

from collections.abc import Mapping
from functools import partial
from typing import Any

import transformers

TINY: Mapping[str, Any] = {
    "hidden_size": 64,
    "num_hidden_layers": 2,
    "num_attention_heads": 4,
    "num_key_value_heads": 2,
    "vocab_size": 256,
    "max_position_embeddings": 64,
    "eos_token_id": None,
    "pad_token_id": None,
    "use_cache": False,
}


def _mixtral(*, experts: int) -> Any:
    return transformers.MixtralConfig(**TINY, intermediate_size=96, num_local_experts=experts)


def _qwen3(*, experts: int) -> Any:
    return transformers.Qwen3MoeConfig(
        **TINY, intermediate_size=96, moe_intermediate_size=32, num_experts=experts, num_experts_per_tok=2, head_dim=16
    )


def _olmoe(*, experts: int) -> Any:
    return transformers.OlmoeConfig(**TINY, intermediate_size=48, num_experts=experts, num_experts_per_tok=2)


def _deepseek(*, experts: int) -> Any:
    return transformers.DeepseekV3Config(
        **{**TINY, "num_key_value_heads": 4},
        intermediate_size=96,
        moe_intermediate_size=32,
        n_routed_experts=experts,
        num_experts_per_tok=2,
        n_group=2,
        topk_group=1,
        q_lora_rank=16,
        kv_lora_rank=16,
        qk_rope_head_dim=8,
        qk_nope_head_dim=8,
        v_head_dim=16,
        first_k_dense_replace=1,
    )


def _gpt_oss(*, experts: int) -> Any:
    return transformers.GptOssConfig(
        **TINY,
        intermediate_size=48,
        num_local_experts=experts,
        num_experts_per_tok=2,
        head_dim=16,
        sliding_window=8,
        layer_types=["sliding_attention", "full_attention"],
    )


def _switch(*, experts: int) -> Any:
    return transformers.SwitchTransformersConfig(
        d_model=64,
        d_kv=16,
        d_ff=96,
        num_layers=2,
        num_decoder_layers=2,
        num_heads=4,
        num_experts=experts,
        num_sparse_encoder_layers=1,
        num_sparse_decoder_layers=1,
        expert_capacity=64,
        vocab_size=256,
        dropout_rate=0.0,
        router_jitter_noise=0.0,
        use_cache=False,
    )


OTHERS: Mapping[str, partial[Any]] = {
    "mixtral": partial(_mixtral, experts=4),
    "qwen3-moe": partial(_qwen3, experts=4),
    "olmoe": partial(_olmoe, experts=4),
    "deepseek-v3": partial(_deepseek, experts=4),
    "gpt-oss": partial(_gpt_oss, experts=4),
    "switch": partial(_switch, experts=16),
}
