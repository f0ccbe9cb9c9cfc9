"""What a run that finds no room is told to try: commands that work on this machine, each planned before it is named."""

from __future__ import annotations

import time
from dataclasses import replace
from typing import Any

import torch

from harness import store
from harness.command import command
from harness.plan import depths_of, question_of
from harness.plan_spec import ALL, PlanSpec
from harness.request import Request
from harness.spec import RunSpec, in_flags
from systems.errors import UnsupportedError
from systems.machine.budgets import device_budget, disk_budget, host_budget
from systems.planning import hardware
from systems.planning.layout import PAGE, round_up
from systems.prediction.forecast import Observations, Question, fits, forecast
from systems.prediction.policies import runs_as_planned
from systems.prediction.remedies import DiskRoom, Remedy, remedies
from systems.settings import Settings

PROFILE = "h100-80g-x1"  # for the times of a plan, on a machine that has no profile of its own
ENOUGH_S = 30.0  # of looking for what would train
MAPPINGS = 5  # of host memory, each of whole pages


def advise(spec: RunSpec, request: Request) -> list[str]:
    """Lines "what: command". The first plans what was asked for; the others would train here."""
    asked = as_plan(spec, request.settings)
    if not runs_as_planned(request.system):
        every = asked.model_copy(update={"system": ALL, "option": ()})
        return [f"what this project's own systems need: {command('plan', every)}"]
    question, observations = question_of(asked)
    machine = replace(request.settings, device_memory=None, host_memory=None)
    most = device_budget(machine), host_budget(machine)
    if request.settings.device == "cpu":
        question = replace(question, shared_memory=most[1])
    try:
        found = forecast(request.system, request.options, question, observations)
    except UnsupportedError as error:
        return [f"{in_flags(str(error))}: {command('plan', asked)}"]
    except ValueError:
        return []  # it cannot be planned, and so nothing is known to help
    if found.fits and not fits(request.system, request.options, question, observations):
        found = replace(found, why_not="both are one memory")
    lines, started_s = [f"what it needs: {command('plan', asked)}"], time.monotonic()
    depths = None if spec.resume is not None else depths_of(asked)
    for remedy in remedies(request.system, request.options, found, observations, depths=depths, disk=_disk(spec, request)):
        if _is_there(remedy, most) and (question.shared_memory is None or _beside(remedy, request, question, observations)):
            rounded = {name: _rounded(size) if name.endswith("_memory") else size for name, size in remedy.changes.items()}
            lines.append(f"{remedy.what}: {command('run', spec, rounded)}")
        if time.monotonic() - started_s > ENOUGH_S:
            break
    return lines


def as_plan(spec: RunSpec, settings: Settings) -> PlanSpec:
    """The same work of one rank on a machine with these budgets."""
    given = spec.model_dump(exclude_defaults=True, exclude={*PlanSpec.left_out, "ranks", "trace", "disk", "disk_memory"})
    given |= {"device_memory": device_budget(settings), "host_memory": host_budget(settings)}
    if settings.disk is not None:
        given |= {"disk": str(settings.disk), "disk_memory": disk_budget(settings)}
    if settings.device == "cpu":
        given["device"] = "cpu"
    return PlanSpec.model_validate(given | {"hardware": _profile()})


def _is_there(remedy: Remedy, most: tuple[int, int]) -> bool:
    """Whether this machine has the memory that is asked for."""
    if not {"device_memory", "host_memory"} & remedy.changes.keys():
        return True
    device, host = (remedy.changes.get(name, 0) for name in ("device_memory", "host_memory"))
    assert isinstance(device, int) and isinstance(host, int)
    return device <= most[0] and host <= most[1]


def _beside(remedy: Remedy, request: Request, question: Question, observations: Observations) -> bool:
    """Whether budgets that are asked for fit into one memory together; everything else was planned so."""
    budgets: dict[str, Any] = {name: size for name, size in remedy.changes.items() if name in ("device_memory", "host_memory")}
    return not budgets or fits(request.system, request.options, replace(question, **budgets), observations)


def _rounded(size: int | str) -> int:
    """A budget as people give it, at most a 64th above what was planned: a mapping takes whole pages."""
    assert isinstance(size, int)
    unit = max(1 << (size.bit_length() - 7), PAGE)
    return round_up(size + MAPPINGS * PAGE, unit)


def _disk(spec: RunSpec, request: Request) -> DiskRoom | None:
    """The folder of the records, if states may lie there."""
    if spec.disk is not None or not request.system.abilities.disk:
        return None
    try:
        folder = str(store.folder_of(spec, request.resolved.device))
        return DiskRoom(folder, disk_budget(replace(request.settings, disk=folder, disk_memory=None)))
    except ValueError:
        return None


def _profile() -> str:
    """Of this machine's device, if there is one that has a disk to ask about too."""
    name = hardware.of_device(torch.cuda.get_device_name()) if torch.cuda.is_available() else None
    return PROFILE if name is None or hardware.load(name).disk_bytes is None else name
