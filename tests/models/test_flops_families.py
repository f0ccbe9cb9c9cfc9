"""The count against formulas worked out by hand for encoders, encoder-decoders and models from outside (case C57)."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models import flops, registry
from models.flops import FlopCount


def expect(counted: FlopCount, *, other: int, whole_scores: int, causal_scores: int) -> None:
    """causal_scores: products of which a mask leaves half; whole_scores: those of attention in both directions."""
    assert counted.forward.full == pytest.approx(other + whole_scores + causal_scores, rel=1e-3)
    assert counted.forward.causal == pytest.approx(other + whole_scores + causal_scores / 2, rel=1e-3)
    assert counted.forward.scores == whole_scores + causal_scores, "score products are told from projections"


@pytest.mark.parametrize(
    ("name", "batch", "seq", "overrides"),
    [
        ("bert-tiny", 2, 16, {}),
        ("bert-base", 4, 128, {}),
        ("bert-base", 1, 16384, {"max_positions": 16384, "vocab_size": 50272, "ffn_size": 3 * 768}),
        ("bert-large", 2, 128, {"tied": False}),
        ("bert-13b", 1, 512, {}),
    ],
)
@pytest.mark.one_in(2)
def test_bert(name: str, batch: int, seq: int, overrides: dict[str, object]) -> None:
    """A token and block: 4 h^2 of attention, 2 h f of feed-forward; head: h^2 and h v. Every token sees every token."""
    s: Any = registry.resolve(name, overrides)
    h, tokens = s.hidden_size, batch * seq
    other = 2 * tokens * (s.num_layers * (4 * h * h + 2 * h * s.ffn_size) + h * h + h * s.vocab_size)
    counted = flops.count(s, batch_size=batch, seq_len=seq)
    expect(counted, other=other, whole_scores=2 * tokens * s.num_layers * 2 * seq * h, causal_scores=0)
    assert counted.forward.causal == counted.forward.full, "an encoder has no half to leave out"


@pytest.mark.parametrize(
    ("name", "batch", "seq", "overrides"),
    [
        ("t5-tiny", 2, 16, {}),
        ("t5-3b", 2, 128, {}),
        ("t5-small", 1, 16384, {"vocab_size": 50272}),
        ("t5-base", 3, 128, {"gated": True, "tied": False, "ffn_size": 3 * 768}),
        ("t5-small", 2, 64, {"num_layers": 3, "decoder_layers": 5, "head_size": 48}),
        pytest.param("t5-58b", 1, 512, {}, marks=pytest.mark.slow),
    ],
)
@pytest.mark.one_in(2)
def test_t5(name: str, batch: int, seq: int, overrides: dict[str, object]) -> None:
    """a is the width of all heads. Encoder block: 4 h a and feed-forward; a decoder's has a second attention."""
    s: Any = registry.resolve(name, overrides)
    h, a, tokens = s.hidden_size, s.num_heads * s.head_size, batch * seq
    feed_forward = (3 if s.gated else 2) * h * s.ffn_size
    encoders, decoders = s.num_layers, s.decoder_layers or s.num_layers
    per_token = encoders * (4 * h * a + feed_forward) + decoders * (8 * h * a + feed_forward) + h * s.vocab_size
    attention = 2 * tokens * 2 * seq * a
    counted = flops.count(s, batch_size=batch, seq_len=seq)
    expect(
        counted,
        other=2 * tokens * per_token,
        whole_scores=(encoders + decoders) * attention,  # the encoder's, and the decoder's to the encoder
        causal_scores=decoders * attention,
    )
    assert len(counted.blocks) == encoders + decoders
    assert counted.blocks[0].full == 2 * tokens * (4 * h * a + feed_forward) + attention
    assert counted.blocks[-1].full == 2 * tokens * (8 * h * a + feed_forward) + 2 * attention
    assert counted.blocks[-1].full - counted.blocks[-1].causal == attention // 2


@pytest.mark.parametrize(
    ("name", "overrides"), [("albert-tiny", {}), ("albert-base", {}), ("albert-base", {"layers_per_group": 2})]
)
def test_albert(name: str, overrides: dict[str, object]) -> None:
    """Shared weights are multiplied with each time: the work of a deep model, the parameters of a shallow one."""
    s: Any = registry.resolve(name, overrides)
    h, e, tokens, seq = s.hidden_size, s.embedding_size, 3 * 128, 128
    layers = s.num_layers * s.layers_per_group
    other = 2 * tokens * (layers * (4 * h * h + 2 * h * s.ffn_size) + 2 * e * h + e * s.vocab_size)
    counted = flops.count(s, batch_size=3, seq_len=seq)
    expect(counted, other=other, whole_scores=2 * tokens * layers * 2 * seq * h, causal_scores=0)
    assert len(counted.blocks) == s.num_groups
    assert counted.recomputed("full").full == counted.forward.full - 2 * tokens * (2 * e * h + e * s.vocab_size)


@pytest.mark.parametrize("name", ["gpt-tiny", "bert-tiny", "t5-tiny"])
def test_attention_written_out_counts_like_fused(name: str) -> None:
    model: Any = registry.build(registry.resolve(name))
    fused = flops.count(model, batch_size=2, seq_len=16)
    model.set_attn_implementation("eager")
    assert flops.count(model, batch_size=2, seq_len=16).forward == fused.forward


LLAMA_LIKE = """
import torch
from torch import nn
from torch.nn import functional as F

H, HEADS, KV, FFN, V = 64, 8, 2, 3 * 64, 50272

class Attention(nn.Module):
    def __init__(self):
        super().__init__()
        self.q, self.o = nn.Linear(H, H, bias=False), nn.Linear(H, H, bias=False)
        self.k, self.v = (nn.Linear(H, KV * H // HEADS, bias=False) for _ in range(2))

    def forward(self, x):
        q, k, v = (w(x).unflatten(-1, (-1, H // HEADS)).transpose(1, 2) for w in (self.q, self.k, self.v))
        y = F.scaled_dot_product_attention(q, k, v, is_causal=True, enable_gqa=True)
        return self.o(y.transpose(1, 2).flatten(2))

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.attention = Attention()
        self.gate, self.up = nn.Linear(H, FFN, bias=False), nn.Linear(H, FFN, bias=False)
        self.down = nn.Linear(FFN, H, bias=False)

    def forward(self, x):
        x = x + self.attention(x)
        return x + self.down(F.silu(self.gate(x)) * self.up(x))

class Net(nn.Module):
    def __init__(self, tied):
        super().__init__()
        self.embed = nn.Embedding(V, H)
        self.blocks = nn.ModuleList(Block() for _ in range(3))
        self.head = nn.Linear(H, V, bias=False)
        if tied:
            self.head.weight = self.embed.weight

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)

def tied():
    return Net(True)

def untied():
    return Net(False)
"""


def assert_llama(counted: FlopCount, *, layers: int, h: int, kv: int, f: int, v: int, tokens: int, seq: int) -> None:
    other = 2 * tokens * (layers * (2 * h * h + 2 * h * kv + 3 * h * f) + h * v)
    expect(counted, other=other, whole_scores=0, causal_scores=2 * tokens * layers * 2 * seq * h)
    assert len(counted.blocks) == layers


@pytest.mark.parametrize("function", ["tied", "untied"])
@pytest.mark.parametrize("seq", [128, 16384])
def test_a_users_module_with_grouped_heads_and_gated_feed_forward(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, function: str, seq: int
) -> None:
    (tmp_path / "llama_like.py").write_text(LLAMA_LIKE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "llama_like", raising=False)
    counted = flops.count(registry.resolve(f"llama_like:{function}"), batch_size=2, seq_len=seq)
    assert_llama(counted, layers=3, h=64, kv=16, f=192, v=50272, tokens=2 * seq, seq=seq)


def test_a_folder_with_grouped_heads_and_gated_feed_forward(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=50272, hidden_size=64, intermediate_size=192, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, max_position_embeddings=16384,
    ).save_pretrained(tmp_path)  # fmt: skip
    for seq in (128, 16384):
        counted = flops.count(registry.resolve(str(tmp_path)), batch_size=1, seq_len=seq)
        assert_llama(counted, layers=2, h=64, kv=16, f=192, v=50272, tokens=seq, seq=seq)


def test_an_objective_can_be_said() -> None:
    class Pair(nn.Module):
        """An encoder-decoder that has no config to tell it by."""

        def __init__(self) -> None:
            super().__init__()
            self.embed, self.head = nn.Embedding(50, 8), nn.Linear(8, 50, bias=False)

        def forward(self, input_ids: torch.Tensor, decoder_input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(input_ids) + self.embed(decoder_input_ids))

    with pytest.raises(ValueError, match="cannot be counted"):
        flops.count(Pair(), batch_size=2, seq_len=4)
    assert flops.count(Pair(), batch_size=2, seq_len=4, objective="seq2seq").forward.other == 2 * 8 * 8 * 50
