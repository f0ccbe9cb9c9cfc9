"""Initial weights: same bits everywhere, and the architecture's own law."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch

from models import registry
from models.counter import random_words, stream_key
from models.weights import InitialWeights, Normal, Rule, normal_quantiles

LAW = (Rule("", Normal(0.02)),)


def splitmix64(key: int, i: int) -> int:
    """The published generator in unbounded integers; its state goes up by the golden gamma a word."""
    z = (key + i * 0x9E3779B97F4A7C15) % 2**64
    z = ((z ^ (z >> 30)) * 0xBF58476D1CE4E5B9) % 2**64
    z = ((z ^ (z >> 27)) * 0x94D049BB133111EB) % 2**64
    return z ^ (z >> 31)


def test_words_are_splitmix64() -> None:
    key = stream_key("a stream")
    words = random_words(key, start=5, count=1000)
    assert [w % 2**64 for w in words.tolist()] == [splitmix64(key, i) for i in range(5, 1005)]


def filled(name: str, shape: tuple[int, ...], *, seed: int = 1, slab: int = 1 << 20) -> torch.Tensor:
    tensor = torch.full(shape, torch.nan)
    InitialWeights(LAW, seed, slab=slab)(name, tensor)
    return tensor


def test_same_seed_and_name_same_bits_whatever_the_slab() -> None:
    whole = filled("a", (1003, 7))
    for slab in (4, 64, 7020, 1 << 20):
        assert torch.equal(filled("a", (1003, 7), slab=slab), whole)
    assert torch.equal(filled("a", (7021,)), whole.view(-1)), "the shape does not matter either"


def test_known_values() -> None:
    """Pinned: a change of these changes every run ever recorded."""
    known = [0.0180448479950428, -0.018890775740146637, -0.03854149207472801]
    assert filled("a", (3,), seed=1).tolist() == pytest.approx(known, rel=1e-6)


def test_other_seed_or_name_other_values() -> None:
    a, b, c = filled("a", (5000,)), filled("b", (5000,)), filled("a", (5000,), seed=2)
    for x, y in ((a, b), (a, c), (b, c)):
        assert abs(torch.corrcoef(torch.stack([x, y]))[0, 1].item()) < 0.06
        assert (x == y).float().mean().item() < 0.01


def test_law_is_normal() -> None:
    x = filled("a", (4_000_000,)).double() / 0.02
    assert abs(x.mean().item()) < 0.003 and abs(x.std().item() - 1) < 0.003
    assert abs((x**4).mean().item() - 3) < 0.03
    for sigma in (1, 2, 3):
        assert (x.abs() < sigma).double().mean().item() == pytest.approx(math.erf(sigma / math.sqrt(2)), abs=1e-3)
    lanes = x.view(-1, 4)
    assert (torch.corrcoef(lanes.T) - torch.eye(4)).abs().max().item() < 0.005, "lanes of one word are independent"
    assert abs((x[:-1] * x[1:]).mean().item()) < 0.003


def test_quantiles_are_symmetric_and_few() -> None:
    table = normal_quantiles(1.0)
    assert torch.equal(table, -table.flip(0)) and 4.3 < table[-1].item() < 4.4


@pytest.mark.skipif(not torch.cuda.is_available(), reason="compares CPU with CUDA")
def test_bits_on_cuda_equal_those_on_cpu() -> None:
    on_cuda = torch.empty(3_000_001, device="cuda")
    InitialWeights(LAW, 1)("a", on_cuda)
    assert torch.equal(on_cuda.cpu(), filled("a", (3_000_001,)))


T5_ODD = {"gated": True, "tied": False, "head_size": 48, "ffn_size": 320, "init_factor": 0.5, "relative_buckets": 300}


@pytest.mark.parametrize(
    ("name", "overrides"),
    [
        ("opt-tiny", {}),
        ("gpt-tiny", {}),
        ("opt-350m", {}),
        ("bert-tiny", {"token_types": 100}),
        ("albert-tiny", {"num_groups": 2, "embedding_size": 64, "token_types": 100}),
        ("t5-tiny", {"relative_buckets": 300}),
        ("t5-tiny", T5_ODD),
        ("mixtral-tiny", {"experts": 16}),
        ("qwen3-moe-tiny", {"experts": 64}),
    ],
)
def test_families_follow_transformers_law(name: str, overrides: dict[str, object]) -> None:
    """Every parameter's mean and spread are those of the library's own initialisation."""
    from transformers import set_seed

    shape = registry.resolve(name, {"num_layers": 2, "vocab_size": 384, "max_positions": 128} | overrides)
    fill = registry.initial_weights(shape, 3)
    assert fill is not None
    meta = registry.build(shape)
    set_seed(0)
    theirs = dict(type(meta)(meta.config).named_parameters(remove_duplicate=False))
    for parameter_name, parameter in meta.named_parameters():
        ours, reference = torch.full(parameter.shape, torch.nan), theirs[parameter_name].detach()
        fill(parameter_name, ours)
        if reference.std() == 0 or reference.numel() < 1000:
            assert torch.equal(ours, reference), parameter_name
        else:
            assert ours.std().item() == pytest.approx(reference.std().item(), rel=0.05), parameter_name
            assert abs(ours.mean().item()) < 5 * reference.std().item() / math.sqrt(ours.numel()), parameter_name
        zero_rows = reference.flatten(1).any(dim=1) if reference.dim() > 1 else None
        if zero_rows is not None:
            assert torch.equal(ours.flatten(1).any(dim=1), zero_rows), parameter_name


@pytest.mark.parametrize(("name", "dense"), [("pr-moe-tiny", "gpt-tiny"), ("t5-moe-tiny", "t5-tiny")])
def test_an_expert_starts_as_the_dense_feed_forward_does(name: str, dense: str) -> None:
    shape, other = registry.resolve(name), registry.resolve(dense, {"num_layers": registry.resolve(name).num_layers})
    fills: list[Any] = [registry.initial_weights(each, 0) for each in (shape, other)]
    shared = {each.rpartition(".experts.")[2].split(".", 1)[1] for each in names_of(shape) if ".experts." in each}
    assert shared
    for part in shared:
        mine = next(each for each in names_of(shape) if ".experts." in each and each.endswith(part))
        theirs = next(each for each in names_of(other) if each.endswith(part))
        assert fills[0].fill_of(mine) == fills[1].fill_of(theirs), part
    for each in names_of(shape):
        fills[0].fill_of(each)


def names_of(shape: Any) -> list[str]:
    return [name for name, _ in registry.build(shape).named_parameters()]


def test_a_parameter_without_a_rule_is_an_error() -> None:
    with pytest.raises(ValueError, match="no rule says how parameter other starts"):
        InitialWeights((Rule("^a$", Normal(1.0)),), 0)("other", torch.empty(1))
