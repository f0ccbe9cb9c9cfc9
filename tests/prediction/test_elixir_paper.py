"""Forecasts of Elixir's variant paper: its step beside the default's, and a host that is too small for it."""

from __future__ import annotations

from typing import Any

import pytest

from systems import registry
from systems.prediction.alternatives import alternatives
from systems.prediction.forecast import Forecast
from systems.strategies.elixir.options import ElixirOptions
from tests.prediction.test_forecast import GIB, MIB, asked, observations, question

SMALL: dict[str, Any] = {"device_memory": 8 * MIB, "batch_size": 4, "seq_len": 32}
LARGE: dict[str, Any] = {"device_memory": 10 * GIB, "batch_size": 8, "seq_len": 1024, "recompute": "full"}


def both(**given: Any) -> tuple[Forecast, Forecast]:
    """Of opt-1.3b: paper, default."""
    about = question("h200-141g-x1", **LARGE, **given)
    return asked("elixir", "opt-1.3b", about, variant="paper"), asked("elixir", "opt-1.3b", about)


def test_the_step_is_longer_than_the_default_s() -> None:
    paper, default = both(host_memory=110 * GIB)
    assert paper.fits and default.fits
    assert paper.simulation.step_time_s > 1.5 * default.simulation.step_time_s
    assert paper.ahead is None and default.ahead is not None
    assert paper.device_peak_bytes < default.device_peak_bytes, "the cache does not grow with the device"
    assert not {"master", "moments"} & {name for name, size in paper.tiers["device"].parts.items() if size}


def test_what_the_host_lacks_is_not_on_the_device() -> None:
    paper, default = both(host_memory=15 * GIB)
    assert default.fits, "its device has what its host lacks"
    assert paper.tiers["device"].fits and not paper.tiers["host"].fits
    assert paper.why_not is not None and "of host memory" in paper.why_not and "15GiB is there" in paper.why_not


@pytest.mark.slow
def test_ten_billion_parameters_need_more_host_memory_than_a_pod_has() -> None:
    given = LARGE | {"device_memory": 20 * GIB, "batch_size": 16, "host_memory": 110 * GIB}
    found = asked("elixir", "ps-10b", question("h200-141g-x1", **given), variant="paper")
    assert found.why_not is not None and "of host memory" in found.why_not and "110GiB is there" in found.why_not


def test_alternatives_leave_out_what_the_variant_sets() -> None:
    chosen, about = registry.get("elixir"), question("h200-141g-x1", recompute="full", **SMALL)
    named = {}
    for variant in ("master-shard", "paper"):
        options = chosen.Options(variant=variant, cache=2 * MIB)
        found = asked("elixir", "opt-tiny", about, **options.model_dump(exclude_unset=True))
        named[variant] = {
            name for one in alternatives(chosen, options, found, observations("opt-tiny")) for name in one.options
        }
    assert named["master-shard"] & ElixirOptions.rules["paper"].keys(), "void: the default has none of them"
    assert not named["paper"] & ElixirOptions.rules["paper"].keys()
