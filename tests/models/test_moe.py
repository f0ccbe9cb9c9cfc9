"""The layer of experts: against transformers' Switch layer, against a loop over tokens, and what it tells."""

from __future__ import annotations

import dataclasses
import re
from functools import partial
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.checkpoint import checkpoint
from transformers import SwitchTransformersConfig
from transformers.models.switch_transformers import modeling_switch_transformers as switch

from models import registry
from models.loss import token_loss
from models.mixture_models import BesideDense
from models.moe import TOLD, Mixture, OneRank, capacity_of, routing_of
from models.objective import OBJECTIVES
from tests.models.conftest import materialise

WIDTH, INNER, TOKENS = 16, 24, 48


class Expert(nn.Module):
    def __init__(self, dtype: torch.dtype = torch.float32) -> None:
        super().__init__()
        self.wi = nn.Linear(WIDTH, INNER, bias=False, dtype=dtype)
        self.wo = nn.Linear(INNER, WIDTH, bias=False, dtype=dtype)

    def forward(self, hidden: torch.Tensor) -> torch.Tensor:
        out: torch.Tensor = self.wo(self.wi(hidden).relu())
        return out


def made(*, seed: int = 0, **given: Any) -> Mixture:
    torch.manual_seed(seed)
    mixture = Mixture(WIDTH, Expert, **{"experts": 6, "factor": 6.0, **given})
    nn.init.normal_(mixture.gate.weight, std=0.5)
    return mixture


def told(mixture: Mixture) -> dict[str, float]:
    assert mixture.told is not None
    return dict(zip(TOLD, mixture.told.tolist(), strict=True))


def tokens(seed: int = 1) -> torch.Tensor:
    return torch.randn(3, TOKENS // 3, WIDTH, generator=torch.Generator().manual_seed(seed))


def test_it_is_transformers_switch_layer_where_nothing_is_dropped() -> None:
    """Outputs, gradients and the load-balancing loss, at 1e-6."""
    config = SwitchTransformersConfig(
        d_model=WIDTH, d_ff=INNER, num_experts=6, expert_capacity=TOKENS, router_jitter_noise=0.0, dropout_rate=0.0
    )  # fmt: skip
    theirs, ours = switch.SwitchTransformersSparseMLP(config).train(), made()
    theirs.router.classifier.weight.data.copy_(ours.gate.weight)
    for number, expert in ours.experts.items():
        for part in ("wi", "wo"):
            of_theirs: Any = theirs.experts[f"expert_{number}"]
            getattr(of_theirs, part).weight.data.copy_(getattr(expert, part).weight)
    found = []
    for layer in (theirs, ours):
        hidden = tokens().requires_grad_()
        out = layer(hidden)
        if layer is ours:
            balance = ours.told[0]  # type: ignore[index]
        else:
            likely = theirs.router.classifier(hidden).softmax(-1).view(1, TOKENS, 6)
            balance = switch.load_balancing_loss_func(likely, likely.argmax(-1))
        (out.square().sum() + balance).backward()
        found.append((out, balance, hidden.grad))
    assert told(ours)["dropped"] == 0 and told(ours)["idle"] == 0, "void: not all experts were used"
    for one, other in zip(*found, strict=True):
        torch.testing.assert_close(one, other, rtol=1e-6, atol=1e-6)
    torch.testing.assert_close(theirs.router.classifier.weight.grad, ours.gate.weight.grad, rtol=1e-6, atol=1e-6)
    for number, expert in ours.experts.items():
        for mine, of_switch in zip(expert.parameters(), theirs.experts[f"expert_{number}"].parameters(), strict=True):
            torch.testing.assert_close(of_switch.grad, mine.grad, rtol=1e-6, atol=1e-6)


def by_hand(mixture: Mixture, hidden: torch.Tensor, capacity: int) -> tuple[torch.Tensor, int, list[int]]:
    """Token by token in double precision: the output, choices that were dropped, and choices of each expert."""
    rows = hidden.view(-1, WIDTH)
    likely = (rows @ mixture.gate.weight.t()).softmax(-1)
    best = likely.argsort(-1, descending=True)[:, : mixture.choices]
    out, taken, wanted, dropped = torch.zeros_like(rows), [0] * mixture.expert_count, [0] * mixture.expert_count, 0
    for choice in range(mixture.choices):
        for row, chosen in enumerate(best.tolist()):
            expert = chosen[choice]
            wanted[expert] += 1
            if taken[expert] == capacity:
                dropped += 1
                continue
            taken[expert] += 1
            weight = likely[row, expert]
            if mixture.choices > 1:
                weight = weight / likely[row, chosen].sum()
            out[row] += weight * mixture.experts[str(expert)](rows[row])
    return out.view_as(hidden), dropped, wanted


@pytest.mark.parametrize(("choices", "factor"), list(product((1, 2), (0.3, 0.75, 1.25, 6.0))))
def test_it_is_a_loop_over_tokens(choices: int, factor: float) -> None:
    mixture, hidden = made(choices=choices, factor=factor), tokens()
    out, numbers = mixture(hidden), told(mixture)
    capacity = capacity_of(tokens=TOKENS, experts=6, factor=factor)
    expected, dropped, wanted = by_hand(mixture.double(), hidden.double(), capacity)
    torch.testing.assert_close(out.double(), expected, rtol=1e-5, atol=1e-5)
    assert dropped > 0 or factor >= choices, "void: nothing was dropped"
    every = TOKENS * choices
    assert numbers["dropped"] == pytest.approx(dropped / every, abs=1e-6)
    assert numbers["padding"] == pytest.approx(1 - (every - dropped) / (6 * capacity), abs=1e-6)
    assert numbers["load"] == pytest.approx(max(wanted) * 6 / every)
    assert numbers["idle"] == pytest.approx(sum(count == 0 for count in wanted) / 6)


@pytest.mark.parametrize(
    ("count", "experts", "factor", "slots"), [(32, 4, 1.25, 10), (33, 4, 1.0, 9), (8, 4, 1.25, 4), (1, 64, 1.0, 4)]
)
def test_capacity(count: int, experts: int, factor: float, slots: int) -> None:
    assert capacity_of(tokens=count, experts=experts, factor=factor) == slots


def test_one_rank_s_exchange_is_the_tensor_itself() -> None:
    slots = torch.zeros(2, 4, WIDTH)
    assert OneRank().dispatch(slots) is slots and OneRank().combine(slots) is slots
    assert isinstance(made().exchange, OneRank)


def test_all_tokens_go_to_one_expert_and_every_expert_has_gradients() -> None:
    mixture = made(factor=1.0)
    mixture.gate.weight.data.zero_()[2].fill_(1.0)
    hidden = tokens().abs().requires_grad_()
    mixture(hidden).sum().backward()
    assert told(mixture)["load"] == 6.0 and told(mixture)["idle"] == pytest.approx(5 / 6)
    assert told(mixture)["dropped"] == pytest.approx(1 - 8 / TOKENS)
    for number, expert in mixture.experts.items():
        for parameter in expert.parameters():
            assert parameter.grad is not None and bool(parameter.grad.any()) == (number == "2")
    assert hidden.grad is not None and bool(hidden.grad.view(-1, WIDTH)[-1].eq(0).all()), "a dropped token changes nothing"


def test_the_gate_is_in_fp32_whatever_the_model_computes_in() -> None:
    mixture, hidden = made().bfloat16(), tokens().bfloat16()
    wanted = (hidden.view(-1, WIDTH).float() @ mixture.gate.weight.float().t()).softmax(-1)
    found = mixture.gate(hidden.view(-1, WIDTH))
    assert found.dtype == torch.float32
    torch.testing.assert_close(found, wanted, rtol=1e-6, atol=1e-6)
    with torch.autocast("cpu", dtype=torch.bfloat16):
        torch.testing.assert_close(mixture.gate(hidden.view(-1, WIDTH)), wanted, rtol=1e-6, atol=1e-6)
    out = mixture(hidden)
    assert out.dtype == torch.bfloat16 and mixture.told is not None and mixture.told.dtype == torch.float32


class Part:
    """An exchange among layers of one process, of which each has a part of the experts: they take turns by dispatch order."""

    def __init__(self, layers: list[Mixture]) -> None:
        self.layers = layers

    def dispatch(self, slots: torch.Tensor) -> torch.Tensor:
        self.results = torch.cat([layer._run(slots[[int(n) for n in layer.experts]]) for layer in self.layers])
        return slots[[int(n) for n in self.layers[0].experts]]

    def combine(self, results: torch.Tensor) -> torch.Tensor:
        assert torch.equal(results, self.results[: len(results)])
        return self.results


def test_experts_are_named_by_their_global_number_and_exchanged_in_its_order() -> None:
    whole = made()
    parts = [made(here=range(start, start + 2)) for start in (0, 2, 4)]
    names = [name for part in parts for name in part.experts]
    assert names == list(whole.experts) == [str(number) for number in range(6)]
    for part in parts:
        part.load_state_dict({name: value for name, value in whole.state_dict().items() if name in part.state_dict()})
        assert all(vars(expert)["data_parallel"] == "replica" for expert in part.experts.values())
    parts[0].exchange = Part(parts)
    hidden = tokens()
    torch.testing.assert_close(parts[0](hidden), whole(hidden), rtol=0, atol=0)


def test_experts_that_nobody_reaches_are_told_and_their_shapes_observed() -> None:
    part = made(here=range(2, 4))
    with pytest.raises(RuntimeError, match="2 of 6 experts are here, and the others are on no rank"):
        part(tokens())
    assert part.to("meta")(tokens().to("meta")).shape == tokens().shape


FAMILIES = ("pr-moe-tiny", "t5-moe-tiny")


@pytest.mark.parametrize("name", FAMILIES)
def test_a_rank_s_experts_start_as_those_of_the_whole_model(name: str) -> None:
    """And the sizes and first values of all else are the same."""
    shape = registry.resolve(name, {"expert_ranks": 2})
    fill: Any = registry.initial_weights(shape, 0)
    whole = dict(registry.build(registry.resolve(name)).named_parameters())
    seen: set[str] = set()
    for rank in range(2):
        mine = dict(registry.build(dataclasses.replace(shape, expert_rank=rank)).named_parameters())  # type: ignore[call-arg]
        assert mine.keys() < whole.keys()
        seen |= mine.keys()
        assert all(parameter.shape == whole[each].shape for each, parameter in mine.items())
    assert seen == whole.keys() and fill is not None
    assert registry.parameter_count(shape) == sum(p.numel() for p in whole.values())


def batch_of(shape: Any, count: int = 2) -> dict[str, torch.Tensor]:
    ids = torch.randint(0, 256, (count, shape.seq_len), generator=torch.Generator().manual_seed(3))
    return {"input_ids": ids, "labels": ids}


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {name: p.grad.clone() for name, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", FAMILIES)
def test_the_loss_has_the_balance_of_every_mixture_once_also_where_blocks_are_recomputed(name: str) -> None:
    shape: Any = registry.resolve(name, {"balance_weight": 0.5})
    model: Any = materialise(name, {"balance_weight": 0.5}).train()
    plain = materialise(name, {"balance_weight": 0.0}).train()
    batch, count = batch_of(shape), 2 * shape.seq_len
    loss = partial(token_loss, batch=batch, label_count=count, objective=shape.objective)
    mixtures = [module for module in model.modules() if isinstance(module, Mixture)]
    seen: list[torch.Tensor] = []
    for mixture in mixtures:
        mixture.register_forward_hook(lambda m, *_: seen.append(m.told[0].detach()))
    with_balance, without = loss(model), loss(plain)
    share = int((batch["labels"] != -100).sum()) / count if shape.objective == "seq2seq" else (2 * shape.seq_len - 2) / count
    assert len(seen) == len(mixtures)
    torch.testing.assert_close(with_balance, without + 0.5 * share * sum(seen))
    assert routing_of(model)["balance"] == pytest.approx(float(sum(seen)) / len(mixtures))  # type: ignore[index]
    expected = gradients(model, with_balance)
    gates = [each for each in expected if each.endswith("gate.weight")]
    assert all(not torch.equal(expected[each], gradients(plain, loss(plain))[each]) for each in gates)
    blocks = [module for module in model.modules() if type(module).__name__ == "MixtureBlock"]
    for block in blocks:
        block.forward = partial(checkpoint, block.forward, use_reentrant=False)
    again = gradients(model, loss(model))
    assert expected.keys() == again.keys() and all(torch.equal(expected[each], again[each]) for each in expected)


@pytest.mark.parametrize("name", FAMILIES)
def test_evaluation_has_no_balance_and_is_not_counted(name: str) -> None:
    shape: Any = registry.resolve(name)
    model = materialise(name, {}).eval()
    batch = batch_of(shape)
    found = [token_loss(model, batch, 30, objective=shape.objective)]
    assert routing_of(model) is None
    found.append(token_loss(materialise(name, {"balance_weight": 0.0}).train(), batch, 30, objective=shape.objective))
    assert torch.equal(*found)


def test_pyramid_and_places_of_mixtures() -> None:
    model: Any = registry.build(registry.resolve("pr-moe-tiny", {"num_layers": 8}))
    sizes = [len(b.block.mlp.mixture.experts) if isinstance(b.block.mlp, BesideDense) else 0 for b in model.h]
    assert sizes == [0, 4, 0, 4, 0, 8, 0, 8]
    t5: Any = registry.build(registry.resolve("t5-moe-tiny", {"decoder_layers": 3}))
    kinds = [[isinstance(b.block.layer[-1].DenseReluDense, Mixture) for b in s.block] for s in (t5.encoder, t5.decoder)]
    assert kinds == [[False, True, False, True], [False, True, False]]


@pytest.mark.parametrize(("name", "dense", "layers"), [("pr-moe-tiny", "gpt-tiny", 1), ("t5-moe-tiny", "t5-tiny", 4)])
def test_the_stacks_are_run_as_transformers_runs_them(name: str, dense: str, layers: int) -> None:
    """A GPT's first block has no mixture, and one expert that always has room is a dense feed-forward."""
    given: dict[str, object] = {"num_layers": layers}
    ours = materialise(name, given | {"experts": 1, "capacity_factor": 1.0}).eval()
    theirs = materialise(dense, given).eval()
    known = {
        re.sub(r"\b(block|h)\.(\d+)\.block\.", r"\1.\2.", each).replace("experts.0.", ""): value
        for each, value in ours.named_parameters()
    }
    with torch.no_grad():
        for each, parameter in theirs.named_parameters():
            parameter.copy_(known[each.removeprefix("transformer.")])
        inputs = OBJECTIVES[registry.resolve(dense).objective].inputs(batch_of(registry.resolve(dense)))
        torch.testing.assert_close(ours(**inputs).logits, theirs(**inputs).logits, rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"choices": 3}, "choices must be 1 or 2"),
        ({"experts": 1, "choices": 2}, "choices 2 are more than its experts"),
        ({"capacity_factor": 0}, "capacity_factor must be above 0"),
        ({"capacity_factor": 9.0}, "at most 8, twice the experts"),
        ({"balance_weight": -1.0}, "balance_weight must lie in"),
        ({"expert_ranks": 3}, "expert_ranks 3 does not divide its 4 experts"),
        ({"expert_rank": 1}, "no field 'expert_rank' to set"),
    ],
)
@pytest.mark.parametrize("name", FAMILIES)
def test_shapes_that_cannot_be(name: str, overrides: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said) as refused:
        registry.resolve(name, overrides)
    assert "\n" not in str(refused.value)


def test_paper_sizes_of_t5_moe() -> None:
    """Angel-PTM, figure 9 and tables 4 and 6; 2 x 1024 x 16384 an expert, 16 mixtures."""
    for name, experts, trillions in (("0.31t", 576, 0.31), ("1.24t", 2304, 1.24), ("1t", 1856, 1.0), ("10t", 18432, 9.9)):
        shape: Any = registry.resolve(f"t5-moe-{name}")
        assert shape.experts == experts
        count = registry.parameter_count(shape)
        assert count > 16 * experts * 2 * 1024 * 16384 and count / 1e12 == pytest.approx(trillions, rel=0.01)
