"""In a steady step the operations that the lanes are given, in order, are those of the schedule that was proved and timed.

The schedule is spelt out from the plan in force and the trace that it was made for; the run is the event log of one step.
Compute is the calling thread's own order and is left out, as is the one wait of the host for the norm; holds and drops are
seen in the bytes of every moment (test_memory) and in the waits (test_ordering).
"""

from __future__ import annotations

import contextlib
from collections.abc import Mapping
from dataclasses import dataclass, replace
from functools import cache
from pathlib import Path
from typing import Any, get_args

import pytest
from pydantic import BaseModel

from systems.errors import BudgetError
from systems.planning.plan import LaneKind
from systems.planning.step.operations import LaneOperation, Work
from systems.planning.step.schedule import Schedule, expand
from systems.planning.strategy import PlanningContext
from systems.settings import TORCH_DTYPE
from tests.random_eviction import RandomOptions
from tests.systems.models_small import tokens
from tests.systems.pairwise import pairwise, rows_of
from tests.systems.running import HOST, one_step, settings, start
from tests.systems.setups import SYSTEMS, Recompute, Setup, Sharing, budget_of

STEPS = 3  # the first is measured, the second is the first under the plan, the third is steady


@dataclass(frozen=True)
class Case:
    setup: Setup
    system: str
    level: str = "half"
    host_inputs: bool = False
    stop: bool = False
    disk: bool = False


@cache
def host_bytes(case: Case) -> int:
    found = steady(replace(case, disk=False), None, ahead=False)
    return 0 if found is None else found.host_bytes


@dataclass(frozen=True)
class Found:
    ran: tuple[LaneOperation, ...]
    schedule: Schedule
    host_bytes: int


def begun(case: Case, given: dict[str, Any], options: BaseModel, folder: Path | None) -> Any:
    """With a disk: in the first of some shares of the host memory that it takes without at which states are there."""
    system, model = SYSTEMS[case.system][0], case.setup.build()
    if not case.disk:
        return start(system, model, settings(**given), options)
    for share in (0.6, 0.75, 0.9, 0.45):
        asked = settings(**given, disk=folder, host_memory=int(host_bytes(case) * share))
        with contextlib.suppress(BudgetError):
            engine: Any = start(system, model, asked, options)
            if engine.layout.on_disk:
                return engine
            engine.close()
    raise AssertionError("void: no share of the host's memory has states on the disk and all else where it belongs")


def steady(case: Case, folder: Path | None, *, ahead: bool = True) -> Found | None:
    """The lanes' operations of the last of several steps, and the schedule of the plan in force; None if none fits."""
    options = SYSTEMS[case.system][1]
    setup, changed = case.setup, {"run_ahead": ahead, **({"activations": "host"} if case.host_inputs else {})}
    changed |= {"nonfinite": "stop"} if case.stop else {}
    given: dict[str, Any] = {"dtype": setup.dtype, "clip": setup.clip, "accumulate": setup.accumulate, "log_events": True}
    given |= {"recompute": setup.recompute} if setup.recompute in ("none", "full") else {}
    given |= {"device_memory": budget_of(setup, "above" if case.disk else case.level)}
    engine = begun(case, given, options.model_copy(update=changed), folder)
    try:
        begin = before = 0
        for batch in tokens(STEPS, setup.accumulate):
            begin, before = len(engine.log.operations), engine.counters()["steps_that_waited"]
            one_step(engine, batch)
        engine.drain()
        plan = engine.cursor.plan
        if plan is None or plan.provisional or not engine.cursor.following:
            return None
        ran = tuple(op.what for op in engine.log.operations[begin:] if isinstance(op.what, LaneOperation))
        trace, _ = engine.planner.plans[plan.signature]
        context = PlanningContext(
            device_budget=engine.device.plannable_bytes,
            host_budget=HOST,
            itemsize=TORCH_DTYPE[setup.dtype].itemsize,
            ranks=1,
            accumulate=setup.accumulate,
            seed=0,
            allowance=engine.device.allowance,
        )
        if engine.counters()["steps_that_waited"] > before:
            plan = replace(plan, ahead=frozenset())  # which is the same step, where nothing ran ahead after all
        schedule = expand(engine.layout, trace, plan, context)
        return Found(ran, schedule, engine.memory().host_peak_bytes or 0)
    finally:
        engine.close()


def planned(schedule: Schedule) -> tuple[LaneOperation, ...]:
    return tuple(
        LaneOperation(o.kind, o.lane, o.name, o.bundle, o.segment)
        for o in schedule.bare
        if o.lane is not None and o.lane is not LaneKind.COMPUTE and o.kind is not Work.NORM
    )


def check(case: Case, folder: Path) -> None:
    found = steady(case, folder)
    assert found is not None, "void: no plan fits"
    assert found.schedule.flaws == ()
    kinds = {operation.kind for operation in found.ran}
    assert not case.host_inputs or {Work.OFFLOAD_INPUT, Work.FETCH_INPUT} <= kinds, "void: no input left"
    assert "\n".join(o.label for o in found.ran) == "\n".join(o.label for o in planned(found.schedule))
    assert found.ran == planned(found.schedule)


def name_of(row: Mapping[str, Any]) -> str:
    return "-".join(str(value) for value in row.values())


FACTORS: dict[str, Any] = {
    "system": [name for name, (_, options) in SYSTEMS.items() if not isinstance(options, RandomOptions)],  # those that plan
    "level": ("half", "tight"),
    "model": ("opt", "gpt2"),
    "recompute": get_args(Recompute),
    "accumulate": (1, 2),
    "sharing": get_args(Sharing),
    "dtype": ("fp32", "bf16"),
    "clip": (0.0, 0.5),
    "host_inputs": (False, True),
    "stop": (False, True),
    "disk": (False, True),
}
ONE = {"model": ("opt",), "dtype": ("fp32",), "disk": (False,)}  # for the product


def case_of(row: Mapping[str, Any]) -> Case:
    names = ("model", "recompute", "accumulate", "sharing", "dtype", "clip")
    more = ("system", "level", "host_inputs", "stop", "disk")
    return Case(Setup(**{name: row[name] for name in names}), **{name: row[name] for name in more})


def possible(row: Mapping[str, Any]) -> bool:
    """What a system refuses by name is told by its own tests."""
    system, options = SYSTEMS[row["system"]]
    offered = type(options).model_fields
    inputs = "activations" in offered and row["recompute"] != "none"
    return (
        (inputs or not row["host_inputs"])
        and (("nonfinite" in offered and not row["clip"]) or not row["stop"])
        and (system.abilities.disk or not row["disk"])
        and (row["sharing"] != "half-frozen" or not row["disk"])  # so few states free less than the disk's buffers take
    )


COVER = pairwise(FACTORS, possible)
PRODUCT = list(filter(possible, rows_of(FACTORS | ONE)))


@pytest.mark.parametrize("row", COVER, ids=name_of)
@pytest.mark.one_in(12)
def test_the_run_is_what_the_schedule_says(row: Mapping[str, Any], tmp_path: Path) -> None:
    check(case_of(row), tmp_path)


@pytest.mark.slow
@pytest.mark.parametrize("row", PRODUCT, ids=name_of)
def test_the_run_is_what_the_schedule_says_in_every_case(row: Mapping[str, Any], tmp_path: Path) -> None:
    check(case_of(row), tmp_path)
