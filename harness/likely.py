"""What forecasts say before anything is tried on the device: the size that a search begins with, and whether a run would be
refused. Planned in processes of their own (`apart`).
"""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from typing import TYPE_CHECKING

from harness.apart import apart
from harness.availability import load
from harness.candidates import Candidates, largest
from harness.spec import RunSpec
from systems.errors import UnavailableError

if TYPE_CHECKING:
    from systems.prediction.forecast import Observations, Question
    from systems.settings import Settings

ENOUGH_S = 60.0  # of planning


def likely(candidates: Candidates, stopped: Callable[[], bool]) -> int | None:
    """The largest number that fits by its forecast; None where nothing is known (packages, several ranks), none fits, or nobody
    wants it any more.
    """
    return (apart(largest_planned, candidates, stopped) or None) if _is_planned(candidates.asked) else None


def settings_of(asked: RunSpec) -> Settings:
    """As far as a plan depends on them."""
    from harness.request import choose_device
    from systems.settings import Settings

    return Settings(
        device=choose_device(asked.device),
        device_memory=asked.device_memory,
        host_memory=asked.host_memory,
        disk=asked.disk,
        disk_memory=asked.disk_memory,
    )


def asked_of(spec: RunSpec, settings: Settings) -> tuple[Question, Observations]:
    """What a run of this spec asks of this machine. Raises ValueError for what cannot be."""
    from harness.advice import as_plan
    from harness.plan import question_of
    from systems.machine.budgets import host_budget

    question, observations = question_of(as_plan(spec, settings))
    if settings.device == "cpu":
        question = replace(question, shared_memory=host_budget(replace(settings, host_memory=None)))
    return question, observations


def largest_planned(candidates: Candidates) -> int:
    """0 if none fits."""
    from systems.prediction.forecast import fits
    from systems.registry import parse_options

    asked, ends_s = candidates.asked, time.monotonic() + ENOUGH_S
    system = load(asked.system)
    options, settings = parse_options(system, asked.option), settings_of(asked)

    def planned(number: int) -> bool:
        if time.monotonic() > ends_s:
            return False
        try:
            return fits(system, options, *asked_of(candidates.spec(number), settings))
        except (ValueError, UnavailableError):
            return False

    return largest(planned, first=candidates.first, step=candidates.first, most=candidates.most)


def foreseen(asked: RunSpec, stopped: Callable[[], bool]) -> str | None:
    """Why a run of this spec would be refused here, by its forecast; None where none is known, or it would not be."""
    return apart(refusal, asked, stopped) if _is_planned(asked) else None


def _is_planned(asked: RunSpec) -> bool:
    """Its plan is what a run would do; and a system that does not load is told of by the first run."""
    from systems.prediction.policies import runs_as_planned

    try:
        return asked.ranks == 1 and runs_as_planned(load(asked.system))
    except (ValueError, UnavailableError):
        return False


def refusal(asked: RunSpec) -> str | None:
    """None if it fits, or cannot be planned."""
    from systems.prediction.forecast import fits, forecast
    from systems.registry import parse_options

    system = load(asked.system)
    try:
        options, about = parse_options(system, asked.option), asked_of(asked, settings_of(asked))
        return None if fits(system, options, *about) else forecast(system, options, *about).why_not
    except (ValueError, UnavailableError):
        return None
