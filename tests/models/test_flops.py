"""The count of matrix products against formulas worked out by hand (case C57)."""

from __future__ import annotations

import pytest
import torch
from torch import nn

from models import flops, registry
from models.flops import ForwardFlops


def by_hand(name: str, batch: int, seq: int, overrides: dict[str, object] | None = None) -> tuple[float, float]:
    """Forward FLOPs (without score products, score products over all pairs), from the shape alone.

    A token and block: query, key, value, output 4 h^2, feed-forward 2 h f. Scores: q k^T and p v, s h each a token.
    Head: h v. Each multiplication comes with an addition.
    """
    s = registry.resolve(name, overrides)
    assert s.ffn_size is not None
    tokens, h, embedding = batch * seq, s.hidden_size, getattr(s, "embedding_size", None) or s.hidden_size
    block = 4 * h * h + 2 * h * s.ffn_size
    projections = 2 * h * embedding if embedding != h else 0
    other = 2 * tokens * (s.num_layers * block + embedding * s.vocab_size + projections)
    return other, 2 * tokens * s.num_layers * 2 * seq * h


CASES = [
    ("opt-tiny", 2, 16, {}),
    ("gpt-tiny", 2, 16, {}),
    ("opt-125m", 1, 2048, {}),
    ("opt-350m", 4, 128, {}),
    ("opt-350m", 1, 16384, {"max_positions": 16384}),
    ("opt-350m", 1, 128, {"tied": False, "ffn_size": 3072}),
    ("gpt2-xl", 2, 1024, {}),
    ("gpt3-13b", 1, 2048, {}),
]


@pytest.mark.parametrize(("name", "batch", "seq", "overrides"), CASES)
@pytest.mark.one_in(2)
def test_count_equals_the_hand_formula(name: str, batch: int, seq: int, overrides: dict[str, object]) -> None:
    counted = flops.count(registry.resolve(name, overrides), batch_size=batch, seq_len=seq)
    other, scores = by_hand(name, batch, seq, overrides)
    assert counted.forward.full == pytest.approx(other + scores, rel=1e-3)
    assert counted.forward.causal == pytest.approx(other + scores / 2, rel=1e-3)
    assert counted.formula_version == flops.FORMULA_VERSION


def test_count_equals_numbers_worked_out_by_hand() -> None:
    """opt-125m, 1 x 1024: 12 blocks of 2 x 1024 x 7077888 = 14495514624, head 2 x 1024 x 768 x 50272 = 79071019008,
    scores 12 x 4 x 1024^2 x 768 = 38654705664.
    """
    counted = flops.count(registry.resolve("opt-125m"), batch_size=1, seq_len=1024)
    assert counted.forward == ForwardFlops(253_017_194_496, 38_654_705_664, 19_327_352_832)


def test_grouped_heads_and_gated_feed_forward() -> None:
    from transformers import LlamaConfig, LlamaForCausalLM

    h, f, kv, v, s = 64, 96, 16, 300, 32  # 8 heads of 8, 2 of them for keys and values
    config = LlamaConfig(
        vocab_size=v, hidden_size=h, intermediate_size=f, num_hidden_layers=2, num_attention_heads=8,
        num_key_value_heads=2, use_cache=False,
    )  # fmt: skip
    counted = flops.count(LlamaForCausalLM(config), batch_size=3, seq_len=s)
    tokens = 3 * s
    assert counted.forward.other == pytest.approx(2 * tokens * (2 * (2 * h * h + 2 * h * kv + 3 * h * f) + h * v), rel=1e-3)
    assert (counted.forward.scores, counted.forward.causal_scores) == (2 * 4 * tokens * s * h, 2 * 2 * tokens * s * h)


def test_blocks_and_what_is_recomputed() -> None:
    counted = flops.count(registry.resolve("gpt-tiny"), batch_size=2, seq_len=16)
    other, scores = by_hand("gpt-tiny", 2, 16)
    head = 2 * 32 * 128 * 384
    assert len(counted.blocks) == 6 and len(set(counted.blocks)) == 1
    assert counted.recomputed("none") == ForwardFlops()
    assert counted.recomputed("full").full == other + scores - head
    assert counted.recomputed((1, 4)).full == 2 * counted.blocks[0].full
    model = flops.model_tflops(counted, step_time_s=1.0, accumulate=3, causal=False)
    assert model == pytest.approx(9 * (other + scores) / 1e12)
    hardware = {
        recompute: flops.hardware_tflops(counted, recompute=recompute, step_time_s=1.0, accumulate=3, causal=False)
        for recompute in ("none", "full")
    }
    assert hardware["none"] == model
    assert hardware["full"] - model == pytest.approx(3 * (other + scores - head) / 1e12)
    assert flops.model_tflops(counted, step_time_s=2.0) == pytest.approx(3 * (other + scores / 2) / 2e12)


def test_formulas_by_parameters() -> None:
    assert flops.relative_tflops(parameters=10**9, tokens=1000, step_time_s=2.0) == 4.0
    assert flops.tflops_6n(parameters=10**9, tokens=1000, step_time_s=2.0) == 3.0


def test_counting_leaves_a_module_as_it_is() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(300, 8)
            self.head = nn.Linear(8, 300, bias=False)
            self.head.weight = self.embed.weight

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.head(self.embed(input_ids))

    net = Net()
    before = net.embed.weight.clone()
    assert flops.count(net, batch_size=2, seq_len=4).forward.other == 2 * 8 * 8 * 300
    assert net.training and torch.equal(net.embed.weight, before) and net.head.weight is net.embed.weight


def test_a_forward_that_depends_on_values_is_said() -> None:
    class Net(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.embed = nn.Embedding(300, 8)

        def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
            return self.embed(input_ids) * float(self.embed(input_ids).sum())

    with pytest.raises(ValueError, match="FLOPs of Net cannot be counted on the meta device") as error:
        flops.count(Net(), batch_size=1, seq_len=4)
    assert "\n" not in str(error.value)
