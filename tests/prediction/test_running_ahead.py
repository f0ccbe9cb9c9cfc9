"""What a forecast says of updates that run ahead of the norm: what they take and gain, and what more host memory brings."""

from __future__ import annotations

from dataclasses import replace

import pytest

from systems import registry
from systems.planning.step.validator import validate
from systems.prediction import forecast as forecasts
from systems.prediction.forecast import Question, fits
from systems.prediction.needs import TierNeed
from systems.prediction.running_ahead import AheadForecast
from tests.prediction.test_forecast import GIB, MIB, asked, observations, question

LAYERS = 6


def bound_by_the_norm(profile: str = "h100-80g-x1", host: int | None = None) -> Question:
    """opt-1.3b with six layers and little to compute: CPU Adam is most of the step."""
    about = question(profile, device_memory=2 * GIB, batch_size=4, seq_len=128, recompute="full")
    return about if host is None else replace(about, host_memory=host)


def ahead_of(about: Question, system: str = "elixir") -> tuple[AheadForecast, TierNeed]:
    found = asked(system, "opt-1.3b", about, layers=LAYERS)
    assert found.fits and found.ahead is not None
    assert found.ahead.step_time_s == found.simulation.step_time_s
    host = found.tiers["host"]
    assert host.parts.get("second versions", 0) == found.ahead.taken_bytes <= found.ahead.spare_bytes
    assert sum(host.parts.values()) == host.need_bytes <= host.have_bytes
    return found.ahead, host


@pytest.mark.parametrize("system", ["elixir", "patrickstar"])
def test_spare_host_memory_makes_a_step_shorter_that_the_norm_holds_back(system: str) -> None:
    ahead, host = ahead_of(bound_by_the_norm(), system)
    assert 0 < ahead.share <= 1 and ahead.more is None
    assert ahead.step_time_s * 1.005 < ahead.waiting_step_time_s
    none, tight = ahead_of(bound_by_the_norm(host=host.have_bytes - ahead.spare_bytes), system)
    assert none.spare_bytes == none.taken_bytes == none.share == 0 and "second versions" not in tight.parts
    assert none.step_time_s == none.waiting_step_time_s == ahead.waiting_step_time_s
    assert tight.need_bytes == host.need_bytes - ahead.taken_bytes


@pytest.mark.parametrize("share", [0.0, 0.04, 0.12])
def test_what_more_host_memory_would_bring_is_what_it_brings(share: float) -> None:
    roomy, host = ahead_of(bound_by_the_norm())
    little, _ = ahead_of(bound_by_the_norm(host=host.have_bytes - roomy.spare_bytes + int(share * roomy.taken_bytes)))
    assert little.more is not None and little.step_time_s > roomy.step_time_s
    assert little.more.nbytes == roomy.taken_bytes - int(share * roomy.taken_bytes)
    enough, _ = ahead_of(
        bound_by_the_norm(host=host.have_bytes - roomy.spare_bytes + int(share * roomy.taken_bytes) + little.more.nbytes)
    )
    assert enough == replace(roomy, spare_bytes=roomy.taken_bytes)
    assert (enough.step_time_s, enough.share) == (little.more.step_time_s, little.more.share)


def test_of_several_ranks_the_bytes_are_a_nodes() -> None:
    about = bound_by_the_norm("h100-80g-x4")
    planned = forecasts._PlansByBudget(
        registry.get("elixir"), registry.get("elixir").Options(), about, observations("opt-1.3b", LAYERS)
    )
    of_rank = planned.at(about.device_memory)
    assert isinstance(of_rank, forecasts._Planned)
    ahead, host = ahead_of(about)
    assert ahead.spare_bytes == 4 * of_rank.choice.spare_bytes
    assert ahead.taken_bytes == 4 * of_rank.choice.nbytes(of_rank.plan.ahead) == host.parts["second versions"] > 0


def test_the_forecasts_plan_is_valid_with_what_runs_ahead() -> None:
    about = bound_by_the_norm()
    chosen = registry.get("elixir")
    planned = forecasts._PlansByBudget(chosen, chosen.Options(), about, observations("opt-1.3b", LAYERS)).at(
        about.device_memory
    )
    assert isinstance(planned, forecasts._Planned) and planned.plan.ahead
    validate(planned.layout, planned.trace, planned.plan, planned.context)


def test_where_there_is_nothing_to_say() -> None:
    about = bound_by_the_norm()
    assert asked("elixir", "opt-1.3b", about, layers=LAYERS, nonfinite="stop").ahead is None
    assert asked("resident", "opt-1.3b", replace(about, device_memory=80 * GIB), layers=LAYERS).ahead is None
    everything = asked("elixir", "opt-1.3b", replace(about, device_memory=80 * GIB), layers=LAYERS)
    assert everything.ahead is None and everything.tiers["host"].parts.keys() == {"weights"}


def test_a_host_that_is_too_small_is_refused_for_what_it_must_hold_alone() -> None:
    """And one on which states go to the disk keeps no second versions."""
    tiny = question(device_memory=4 * MIB, host_memory=10 * MIB)
    found = asked("elixir", "opt-tiny", tiny)
    assert not found.fits and found.ahead is None and "second versions" not in found.tiers["host"].parts
    chosen, need = registry.get("elixir"), found.tiers["host"].need_bytes
    assert fits(chosen, chosen.Options(), replace(tiny, host_memory=need), observations("opt-tiny"))
    assert not fits(chosen, chosen.Options(), replace(tiny, host_memory=10 * MIB), observations("opt-tiny"))
    disk = asked("elixir", "opt-tiny", question("h100-80g-x1", device_memory=4 * MIB, host_memory=12 * MIB, disk_memory=GIB))
    assert disk.fits and disk.ahead is None and disk.tiers["disk"].need_bytes > 0
