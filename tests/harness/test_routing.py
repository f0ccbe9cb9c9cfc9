"""What a run with experts leaves in its record."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest

from harness.record import Record, Routing
from harness.spec import BadInputError
from models import registry
from tests.harness.conftest import make_spec

WORK: dict[str, Any] = {"dtype": "fp32", "steps": 2, "warmup": 0, "batch_size": 2, "seq_len": 16, "accumulate": 2, "option": ()}


@pytest.fixture(autouse=True)
def one_thread(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")


def test_routing_and_what_a_token_uses(run_here: Callable[..., Record]) -> None:
    found = [run_here(make_spec(system=system, model="pr-moe-tiny", **WORK)) for system in ("resident", "elixir")]
    assert [record.status for record in found] == ["ok", "ok"] and found[0].metrics.loss == found[1].metrics.loss
    assert found[0].routing == found[1].routing
    record = found[0]
    routing, resolved, metrics = record.routing, record.resolved, record.metrics
    assert isinstance(routing, Routing) and None not in routing.model_dump().values()
    assert routing.balance and routing.load and routing.dropped is not None and routing.padding is not None
    assert routing.balance > 0.9 and routing.load >= 1 and 0 <= routing.dropped < 1 and 0 < routing.padding < 1
    expert = 2 * 128 * 512 + 512 + 128
    assert resolved.parameters == registry.parameter_count(registry.resolve("pr-moe-tiny"))
    assert resolved.activated_parameters == (resolved.parameters or 0) - (3 + 7 + 7) * expert
    assert metrics.tflops_6n and metrics.mean_step_time_s and metrics.model_tflops and metrics.hardware_tflops
    tokens = 2 * 2 * 16
    per_second = 6 * resolved.activated_parameters * tokens / metrics.mean_step_time_s / 1e12
    assert metrics.tflops_6n == pytest.approx(per_second) and metrics.relative_tflops == pytest.approx(per_second * 8 / 6)
    assert metrics.hardware_tflops > metrics.model_tflops, "nothing was recomputed, but slots stayed empty"


def test_a_dense_model_has_neither(run_here: Callable[..., Record]) -> None:
    record = run_here(make_spec(system="resident", model="gpt-tiny", **WORK))
    assert record.routing is None and record.resolved.activated_parameters is None
    assert record.metrics.hardware_tflops == record.metrics.model_tflops


def test_transformers_mixture_has_no_routing_and_is_counted(run_here: Callable[..., Record]) -> None:
    record = run_here(make_spec(system="elixir", model="mixtral-tiny", **WORK))
    assert record.status == "ok" and record.routing is None and record.metrics.hardware_tflops
    expert = 3 * 128 * 256
    assert record.resolved.activated_parameters == (record.resolved.parameters or 0) - 6 * 2 * expert


def test_experts_of_ranks_that_are_not_there_are_told(run_here: Callable[..., Record]) -> None:
    with pytest.raises(BadInputError, match="--set expert_ranks=2 does not divide --ranks 1"):
        run_here(make_spec(system="resident", model="pr-moe-tiny", set=("expert_ranks=2",), **WORK))
