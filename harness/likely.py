"""What forecasts say before anything is tried on the device: the size that a search begins with, and whether a run would be
refused. Planned in processes of their own (`apart`).
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from functools import lru_cache
from typing import TYPE_CHECKING

from harness.apart import apart, each_apart
from harness.availability import load
from harness.candidates import Candidates, largest
from harness.collecting import uncollected
from harness.spec import RunSpec
from systems import registry
from systems.errors import UnavailableError

if TYPE_CHECKING:
    from models.shape import ModelShape
    from systems.prediction.forecast import Observations, Question
    from systems.settings import Settings

ENOUGH_S = 60.0  # of planning
AHEAD_S = 20.0  # of planning for runs that come later than the next
SHAPES = 4  # that are kept as observed: those of a group are alike


def likely(candidates: Candidates, stopped: Callable[[], bool]) -> int | None:
    """The largest number that fits by its forecast; None where nothing is known (packages, several ranks), none fits, or nobody
    wants it any more.
    """
    planned = _is_planned(candidates.asked, registry.find())
    return (apart(largest_planned, candidates, stopped) or None) if planned else None


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


def asked_of(
    spec: RunSpec, settings: Settings, observed: Callable[[ModelShape], Observations]
) -> tuple[Question, Observations]:
    """What a run of this spec asks of this machine. Raises ValueError for what cannot be."""
    from harness.advice import as_plan
    from harness.plan import question_of
    from systems.machine.budgets import host_budget

    question, observations = question_of(as_plan(spec, settings), observed)
    if settings.device == "cpu":
        question = replace(question, shared_memory=host_budget(replace(settings, host_memory=None)))
    return question, observations


def largest_planned(candidates: Candidates) -> int:
    """0 if none fits."""
    with uncollected():
        from systems.prediction.forecast import fits

    asked, ends_s, observed = candidates.asked, time.monotonic() + ENOUGH_S, lru_cache(SHAPES)(_observed)
    try:
        system = load(asked.system)
    except UnavailableError:  # its first run says so
        return 0
    options, settings = registry.parse_options(system, asked.option), settings_of(asked)

    def planned(number: int) -> bool:
        if time.monotonic() > ends_s:
            return False
        try:
            return fits(system, options, *asked_of(candidates.spec(number), settings, observed))
        except (ValueError, UnavailableError):
            return False

    return largest(planned, first=candidates.first, step=candidates.first, most=candidates.most)


def foreseen(asked: Sequence[RunSpec], stopped: Callable[[], bool]) -> Mapping[RunSpec, str | None]:
    """Why a run of each spec would be refused here, by its forecast; None where none is known, or it would not be.

    Of the first spec, and of as many of those that follow as are planned in AHEAD_S: most of the time that a forecast takes is
    that of starting its process, which so is started once for many.
    """
    first, *others = asked
    entries = registry.find()
    if not _is_planned(first, entries):
        return {first: None}
    planned = [first, *(each for each in others if _is_planned(each, entries))]
    return {first: None, **dict(zip(planned, each_apart(refusals, planned, stopped), strict=False))}


def _is_planned(asked: RunSpec, entries: Mapping[str, registry.RegistryEntry]) -> bool:
    """Its plan is what a run would do. Known without importing the system, and torch with it."""
    entry = entries.get(asked.system)
    return asked.ranks == 1 and entry is not None and registry.is_planner(entry)


def refusals(asked: Sequence[RunSpec]) -> Iterator[str | None]:
    """Of each in turn: None if it fits, or cannot be planned. No further one is begun AHEAD_S after the first was told."""
    observed = lru_cache(SHAPES)(_observed)
    first, *others = asked
    yield _refusal(first, observed)
    ends_s = time.monotonic() + AHEAD_S
    for each in others:
        if time.monotonic() > ends_s:
            return
        yield _refusal(each, observed)


def _observed(shape: ModelShape) -> Observations:
    with uncollected():  # the first imports what models are made of
        from harness.plan import observations_of

        return observations_of(shape)


def _refusal(asked: RunSpec, observed: Callable[[ModelShape], Observations]) -> str | None:
    with uncollected():
        from systems.prediction.forecast import fits, forecast

    try:
        system = load(asked.system)
        options, about = registry.parse_options(system, asked.option), asked_of(asked, settings_of(asked), observed)
        return None if fits(system, options, *about) else forecast(system, options, *about).why_not
    except (ValueError, UnavailableError):
        return None
