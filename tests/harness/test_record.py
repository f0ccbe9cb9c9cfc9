"""Records are strict JSON, typed, and say what had to be left out (case C66)."""

from __future__ import annotations

import json
import math
from typing import Any, get_args

import numpy as np
import pytest
import torch

from harness.record import Record, Status, build, clean, to_json
from tests.harness.conftest import make_record


def reject(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def test_nan_and_infinity_become_null_with_a_note() -> None:
    record = make_record(samples={"norm": [1.0, math.nan, math.inf]}, strategy={"share": -math.inf}, notes=["first"])
    tree = json.loads(to_json(record), parse_constant=reject)
    assert tree["samples"]["norm"] == [1.0, None, None]
    assert tree["strategy"] == {"share": None}
    assert tree["notes"] == ["first", "samples.norm[1] was nan", "samples.norm[2] was inf", "strategy.share was -inf"]


@pytest.mark.parametrize(
    ("given", "plain"),
    [
        (np.float32(0.5), 0.5),
        (np.int64(3), 3),
        (np.array([1, 2]), [1, 2]),
        (torch.tensor(2.0), 2.0),
        (torch.tensor([[1, 2]]), [[1, 2]]),
        (torch.tensor(1.5, dtype=torch.bfloat16), 1.5),
        ((1, "a", None, True), [1, "a", None, True]),
        ({3, 1}, [1, 3]),
        ({7: np.bool_(True)}, {"7": True}),
    ],
)
def test_foreign_values_become_plain(given: Any, plain: Any) -> None:
    cleaned = clean(given)
    assert cleaned == plain
    assert json.loads(json.dumps(cleaned)) == cleaned


def test_other_objects_are_refused_by_place() -> None:
    with pytest.raises(TypeError, match=r"strategy\.lanes\[1\] is a object"):
        make_record(strategy={"lanes": [1, object()]})


def test_a_record_survives_the_round_trip() -> None:
    record = make_record(
        metrics={"loss": [1.5, None]}, traffic={"h2d_bytes": 3, "d2h_bytes": 0.5}, memory={"device_peak_bytes": 1 << 40}
    )
    line = to_json(record)
    assert "\n" not in line
    assert Record.model_validate_json(line) == record


def test_unknown_is_null() -> None:
    tree = json.loads(to_json(make_record()))
    assert tree["metrics"]["tokens_per_s"] is None
    assert set(tree["traffic"].values()) == {None}
    assert tree["energy"] == {"joules_per_sample": None}


def test_the_contract_of_the_record() -> None:
    """Readers outside this repository rely on these names."""
    assert get_args(Status) == ("ok", "refused", "oom", "diverged", "failed", "timeout", "unavailable", "interrupted")
    tree = json.loads(to_json(make_record(reason={"message": "why"})))
    assert set(tree) >= {
        "schema_version", "run_id", "status", "reason", "spec", "resolved", "environment", "samples", "metrics",
        "phases_s", "traffic", "memory", "counters", "plan", "strategy", "energy", "doubts", "notes",
    }  # fmt: skip
    assert set(tree["reason"]) >= {"tier", "need", "have", "rank", "signal"}
    assert set(tree["environment"]) >= {"code", "versions", "hardware", "limits", "threads", "seeds"}
    assert set(tree["metrics"]) >= {
        "loss", "grad_norm_before_clip", "grad_norm_after_clip", "step_time_s", "tokens_per_s", "samples_per_s",
        "tflops_6n", "model_tflops", "hardware_tflops", "relative_tflops",
    }  # fmt: skip
    assert set(tree["traffic"]) == {
        "h2d_bytes", "d2h_bytes", "gather_bytes", "reduce_bytes", "exchange_bytes", "disk_read_bytes", "disk_write_bytes",
    }  # fmt: skip
    assert set(tree["memory"]) >= {
        "device_peak_bytes", "device_budget_bytes", "host_peak_bytes", "host_pinned_bytes", "disk_peak_bytes",
    }  # fmt: skip


def test_a_number_that_slipped_past_is_refused() -> None:
    with pytest.raises(ValueError, match="finite"):
        Record.model_validate(make_record().model_dump() | {"wall_s": math.nan})
    assert build(make_record().model_dump() | {"wall_s": math.nan}).wall_s is None
