"""Models with experts under every strategy, bit for bit as resident trains them: this project's and transformers' own."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from functools import cache, partial
from typing import Any, Literal

import pytest
import torch
import transformers
from torch import nn

from models import registry
from models.loss import token_loss
from models.moe import Mixture, routing_of
from systems.prediction.language_models import model_classes, objective_of
from tests.models.others import OTHERS
from tests.systems.every import MANAGED, STRATEGIES
from tests.systems.models_small import tokens
from tests.systems.pairwise import covered
from tests.systems.running import RESIDENT, Run, assert_equal, finished, one_step, settings, start
from tests.systems.test_ranks import objective_loss
from tests.systems.test_ranks_matrix import options_of

STEPS = 3
Recompute = Literal["none", "full"]
FAMILIES = ("pr-moe-tiny", "t5-moe-tiny")
LAYERS = {"num_layers": 2}  # a block without a mixture, and one with it


def family_run(system: Any, model: str, recompute: Recompute, options: Mapping[str, Any], dtype: str, **given: Any) -> Run:
    shape = registry.resolve(model, LAYERS)
    given |= {"dtype": dtype, "recompute": recompute, "initial_weights": registry.initial_weights(shape, 0)}
    engine = start(system, registry.build(shape), settings(accumulate=2, clip=0.5, **given), system.Options(**options))
    return finished(engine, [one_step(engine, batch, partial(objective_loss, shape)) for batch in tokens(STEPS, 2)])


@cache
def resident_run(model: str, recompute: Recompute, dtype: str) -> Run:
    return family_run(RESIDENT, model, recompute, {}, dtype)


OURS: Mapping[str, Any] = {
    "system": tuple(MANAGED),
    "model": FAMILIES,
    "recompute": ("none", "full"),
    "dtype": ("fp32", "bf16"),
}


@pytest.mark.parametrize(("system", "model", "recompute", "dtype"), covered(OURS))
@pytest.mark.one_in(16)
def test_half_of_resident_s_memory_holds_a_model_with_experts(
    system: str, model: str, recompute: Recompute, dtype: str
) -> None:
    expected = resident_run(model, recompute, dtype)
    options = options_of(system) if system in STRATEGIES else {}
    budget = (expected.memory.device_peak_bytes or 0) // 2
    found = family_run(MANAGED[system], model, recompute, options, dtype, device_memory=budget)
    assert_equal(expected, found)
    assert found.counters["fallbacks"] == found.counters["departures"] == 0
    assert routing_of(found.engine.module) == routing_of(expected.engine.module) is not None


@pytest.mark.parametrize("model", FAMILIES)
@pytest.mark.one_in(2)
def test_recomputed_blocks_count_their_balance_and_their_routing_once(model: str) -> None:
    kept, again = resident_run(model, "none", "fp32"), resident_run(model, "full", "fp32")
    assert_equal(kept, again)
    module = again.engine.module
    mixtures = sum(isinstance(part, Mixture) for part in module.modules())
    assert module.get_buffer("routing")[0] == mixtures * STEPS * 2


def other_of(kind: str) -> tuple[nn.Module, Any]:
    """The model, with values, and its loss of (model, ids, label tokens)."""
    torch.manual_seed(0)
    config = copy.deepcopy(OTHERS[kind]())
    objective = objective_of(config)
    name = model_classes(objective)[config.model_type]
    model = getattr(transformers, name)._from_config(config, dtype=torch.float32).train()

    def loss(model: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
        return token_loss(model, {"input_ids": ids, "labels": ids}, count, objective=objective)

    return model, loss


def other_run(system: Any, kind: str, recompute: Recompute, **given: Any) -> Run:
    model, loss = other_of(kind)
    engine = start(system, model, settings(accumulate=2, clip=0.5, recompute=recompute, **given))
    return finished(engine, [one_step(engine, batch, loss) for batch in tokens(STEPS, 2)])


resident_other = cache(partial(other_run, RESIDENT))
THEIRS: Mapping[str, Any] = {"system": tuple(MANAGED), "kind": tuple(OTHERS), "recompute": ("none", "full")}


@pytest.mark.parametrize(("system", "kind", "recompute"), covered(THEIRS))
@pytest.mark.one_in(18)
def test_others_mixtures_train_unmodified(system: str, kind: str, recompute: Recompute) -> None:
    expected = resident_other(kind, recompute)
    budget = (expected.memory.device_peak_bytes or 0) * 3 // 4
    found = other_run(MANAGED[system], kind, recompute, device_memory=budget)
    assert_equal(expected, found)
    if kind != "switch":  # whose idle experts are others in each step
        assert found.counters["fallbacks"] == found.counters["departures"] == 0


def test_some_of_switch_s_experts_idle() -> None:
    """Or the test above would not try it."""
    model, loss = other_of("switch")
    loss(model, tokens(1, 1)[0, 0], 1).backward()
    idle = {name.split(".mlp.experts.")[1].split(".")[0] for name, p in model.named_parameters() if p.grad is None}
    assert 0 < len(idle) < 16
