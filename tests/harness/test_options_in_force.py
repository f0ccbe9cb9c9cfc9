"""A run by a default that was another then is no run of today's default, wherever records are looked up."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from typing import Any

import pytest

from harness import hindcast, options_in_force, store
from harness.cells import belongs, cell_of, made_cell, replicates
from harness.record import Record
from systems.planning import hardware

ROOT = Path(__file__).resolve().parents[2]
BEFORE = "20261201T002900.271100Z-h3t-ps-4b-985d77"
SINCE = ("20261201T002720.044749Z-h3t-ps-4b-a18b02", "20261201T003357.158198Z-h3t-ps-4b-63b9cf")
WORK: dict[str, Any] = dict(model="ps-4b", batch_size=16, seq_len=1024, device_memory="20GiB", recompute="full")
DEVICE = "NVIDIA H200"


@cache
def kept() -> list[Record]:
    return store.read_all(ROOT / "results")[0]


def named(run_id: str) -> Record:
    return next(record for record in kept() if record.run_id == run_id)


def of_h3t(*option: str, **more: Any) -> set[str]:
    cell = made_cell({**WORK, "system": "h3t", "option": option, "steps": 26, "warmup": 16, **more}, 1)
    return {record.run_id for record in kept() if belongs(record, cell, DEVICE)}


def test_a_row_has_the_runs_that_had_its_options() -> None:
    assert of_h3t() == of_h3t("variant=resident-optimizer") == set(SINCE)
    old = of_h3t("variant=global-offload")
    assert BEFORE in old and not old & set(SINCE)
    assert of_h3t("variant=global-offload", "run_ahead=true", "bins=128") == old, "defaults that are spelled are defaults"
    assert of_h3t("variant=global-offload", "bins=64") == set()


def test_every_record_is_in_its_own_cell() -> None:
    found = [record for record in kept() if record.resolved.device == "cuda" and record.resolved.batch_size is not None]
    assert len(found) > 200
    for record in found:
        assert record in replicates([record], cell_of(record), record.resolved.device_label or "")


def test_options_are_spelled_as_they_are_meant_today() -> None:
    assert options_in_force.spelled(named(BEFORE)) == ("variant=global-offload",)
    assert options_in_force.spelled(named(SINCE[0])) == ("variant=resident-optimizer",)


def test_options_that_today_s_system_does_not_take_are_compared_as_they_are_spelled() -> None:
    given: dict[str, Any] = {**WORK, "system": "patrickstar", "model": "opt-1.3b", "device_memory": "10GiB"}
    cell = made_cell({**given, "option": ("nonfinite=stop", "variant=osc")}, 1)
    assert options_in_force.meant(cell.spec) is None
    assert {record.spec.option for record in kept() if belongs(record, cell, DEVICE)} == {("nonfinite=stop", "variant=osc")}


def test_a_system_that_is_not_known_is_no_error() -> None:
    assert options_in_force.meant(made_cell({**WORK, "system": "gone"}, 1).spec) is None


def test_a_hindcast_is_of_the_options_that_the_run_had(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(hindcast, "forecast", lambda system, options, *_: asked.append(options))
    monkeypatch.setattr(hindcast, "_observations", lambda *_: None)
    for run_id in (BEFORE, SINCE[0]):
        hindcast.hindcast(named(run_id), hardware.load("h200-141g-x1"))
    assert [each.variant for each in asked] == ["global-offload", "resident-optimizer"]
