"""What would have been forecast of kept runs: with all that they had."""

from __future__ import annotations

import pytest

from harness.hindcast import hindcast
from systems.planning import hardware
from tests.harness.test_options_in_force import named


@pytest.mark.parametrize(
    "run_id", ["20261201T013035.645736Z-angel-ptm-ps-20b-8eda34", "20261201T003711.787349Z-angel-ptm-ps-1b-def5d0"]
)
def test_a_run_with_a_disk_is_forecast_with_one(run_id: str) -> None:
    record = named(run_id)
    found = hindcast(record, hardware.load("h200-141g-x1"))
    assert record.metrics is not None and record.metrics.mean_step_time_s is not None
    assert found.fits and found.simulation.bound == "disk"
    assert found.simulation.step_time_s == pytest.approx(record.metrics.mean_step_time_s, rel=0.05)
