"""The size that a search begins with: the largest that its forecast says fits, so that few are tried on the device."""

from __future__ import annotations

import time
from collections.abc import Callable
from dataclasses import replace
from multiprocessing import get_context
from multiprocessing.connection import Connection

from harness.availability import load
from harness.candidates import Candidates, largest
from systems.errors import UnavailableError

ENOUGH_S = 60.0  # of planning
LOOK_S = 0.2


def likely(candidates: Candidates, stopped: Callable[[], bool]) -> int | None:
    """The largest number that fits by its forecast; None where nothing is known (packages, several ranks), none fits, or nobody
    wants it any more.

    Planned in a process of its own, which leaves nothing on the device.
    """
    from systems.prediction.policies import runs_as_planned

    try:
        if candidates.asked.ranks > 1 or not runs_as_planned(load(candidates.asked.system)):
            return None
    except (ValueError, UnavailableError):  # told by the first run
        return None
    context = get_context("spawn")
    mine, theirs = context.Pipe(duplex=False)
    process = context.Process(target=_tell_largest_planned, args=(theirs, candidates), daemon=True)
    process.start()
    theirs.close()
    try:
        while not mine.poll(LOOK_S):
            if stopped():
                return None
        found = mine.recv()
        return int(found) if found else None
    except EOFError:  # it broke off
        return None
    finally:
        process.kill()
        process.join()


def _tell_largest_planned(to: Connection, candidates: Candidates) -> None:
    to.send(largest_planned(candidates))


def largest_planned(candidates: Candidates) -> int:
    """0 if none fits."""
    from harness.advice import as_plan
    from harness.plan import question_of
    from harness.request import choose_device
    from systems.machine.budgets import host_budget
    from systems.prediction.forecast import fits
    from systems.registry import parse_options
    from systems.settings import Settings

    asked, ends_s = candidates.asked, time.monotonic() + ENOUGH_S
    system = load(asked.system)
    options = parse_options(system, asked.option)
    settings = Settings(
        device=choose_device(asked.device),
        device_memory=asked.device_memory,
        host_memory=asked.host_memory,
        disk=asked.disk,
        disk_memory=asked.disk_memory,
    )

    def planned(number: int) -> bool:
        if time.monotonic() > ends_s:
            return False
        try:
            question, observations = question_of(as_plan(candidates.spec(number), settings))
            if settings.device == "cpu":
                question = replace(question, shared_memory=host_budget(replace(settings, host_memory=None)))
            return fits(system, options, question, observations)
        except (ValueError, UnavailableError):
            return False

    return largest(planned, first=candidates.first, step=candidates.first, most=candidates.most)
