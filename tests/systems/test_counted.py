"""What a steady step costs in things that can be counted, pinned exactly, so that no later change loses speed unseen.

opt-tiny in bf16 under the strategies, at half of resident's peak and where everything fits. What is expected is worked out
from layout and plan alone: bytes a lane, memory that the host passes over, host synchronisations, unit events.
"""

from __future__ import annotations

import sys
import threading
from collections import Counter
from collections.abc import Callable, Mapping
from dataclasses import dataclass, field
from functools import cache
from typing import Any

import pytest
import torch

from models import registry as models_registry
from systems.adam.kernel import AdamKernel, AdamTask
from systems.device.watch.events import Extent, LoggedOperation
from systems.planning.layout import Layout
from systems.planning.plan import LaneKind, OpKind, Plan, Tier
from systems.planning.step.operations import LaneOperation, Work
from systems.substrate.engine import ManagedEngine
from systems.system import Engine
from tests.systems.every import STRATEGIES
from tests.systems.models_small import next_token_loss
from tests.systems.running import AMPLE, RESIDENT, one_step, settings, start

FILL = ("angel-ptm", "elixir", "h3t", "patrickstar")  # the device, with states that stay there
LEVELS = ("half", "fits")
WARM_STEPS = 4
ADAM_BYTES = 28  # a parameter: master and two moments read and written, a bf16 gradient read, a bf16 parameter written
EVENTS = ("forward_enter", "forward_exit", "backward_enter", "backward_exit")
MOST_CALLS = 60  # of Python functions a forward event
HOST_SPACES = "host-"  # what host memory's extents are called


def started(system: Any, budget: int) -> Engine:
    shape = models_registry.resolve("opt-tiny")
    given = settings(
        dtype="bf16", device_memory=budget, initial_weights=models_registry.initial_weights(shape, 0), log_events=True
    )
    return start(system, models_registry.build(shape), given)


@cache
def batch() -> torch.Tensor:
    shape = models_registry.resolve("opt-tiny")
    return torch.randint(0, shape.vocab_size, (1, 2, 32), generator=torch.Generator().manual_seed(0))


@cache
def resident_peak() -> int:
    with started(RESIDENT, AMPLE) as engine:
        one_step(engine, batch(), next_token_loss)
        return engine.memory().device_peak_bytes or 0


def budget_of(level: str) -> int:
    return resident_peak() // 2 if level == "half" else 2 * resident_peak()


@dataclass
class SpiedKernel:
    """Counts the bytes that the CPU lane's thread passes over, by what it does there, and hands everything on."""

    kernel: AdamKernel
    bytes: Counter[str] = field(default_factory=Counter)

    def __getattr__(self, name: str) -> Any:
        return getattr(self.kernel, name)

    def update(self, *states: Any, factor: float, **given: Any) -> None:
        self.update_all([AdamTask(*states, **given)], factor=factor)

    def update_all(self, tasks: Any, *, factor: float) -> None:
        for task in tasks:
            width = task.gradient.itemsize + (0 if task.out is None else task.out.itemsize)
            self._count("adam", sum(each.numel for each in task.ranges) * (24 + width))
        self.kernel.update_all(tasks, factor=factor)

    def sum_squares_all(self, tensors: Any) -> Any:
        self._count("sum of squares", sum(tensor.nbytes for tensor in tensors))
        return self.kernel.sum_squares_all(tensors)

    def accumulate(self, accumulator: torch.Tensor, gradient: torch.Tensor) -> None:
        self._count("accumulate", 2 * accumulator.nbytes + gradient.nbytes)
        self.kernel.accumulate(accumulator, gradient)

    def cast(self, master: torch.Tensor, out: torch.Tensor) -> None:
        self._count("cast", master.nbytes + out.nbytes)
        self.kernel.cast(master, out)

    def copy(self, destination: torch.Tensor, source: torch.Tensor) -> None:
        self._count("copy", 2 * source.nbytes)
        self.kernel.copy(destination, source)

    def _count(self, what: str, nbytes: int) -> None:
        if threading.current_thread().name == "lane-cpu":
            self.bytes[what] += nbytes


@dataclass
class Step:
    """One steady step, and what its plan says of it."""

    layout: Layout
    plan: Plan
    units: int
    counters: Mapping[str, int]
    operations: list[LoggedOperation]
    host_bytes: Mapping[str, int]
    events: Mapping[str, int]
    python_calls: Mapping[str, int]  # of all unit events of a kind together

    def on_host(self, bundle: int) -> bool:
        return self.plan.optimizer_tier[self.layout.bundles[bundle].segments[0]] is Tier.HOST

    @property
    def updated_on_host(self) -> list[int]:
        return [b.index for b in self.layout.bundles if b.trainable and self.on_host(b.index)]

    def parameters_of(self, bundle: int) -> int:
        segments = (self.layout.segments[s] for s in self.layout.bundles[bundle].segments)
        return sum(place.numel for segment in segments for place in segment.placements)

    def planned_bytes(self, kind: OpKind) -> int:
        return sum(self.layout.bundle_bytes(p.operation.bundle) for p in self.plan.operations if p.operation.kind is kind)

    def lane_bytes(self, lane: str) -> int:
        """Host memory that the lane's operations name."""
        extents = [e for op in self.operations if op.lane == lane for e in (*op.reads, *op.writes)]
        return sum(e.stop - e.start for e in extents if on_host(e))


def on_host(extent: Extent) -> bool:
    return extent.space.startswith(HOST_SPACES)


def counting(call: Callable[[int], None], name: str, events: Counter[str], calls: Counter[str]) -> Callable[[int], None]:
    def counted(unit: int) -> None:
        events[name] += 1
        made = 0

        def note(frame: Any, event: str, argument: Any) -> None:
            nonlocal made
            made += event == "call"

        sys.setprofile(note)
        try:
            call(unit)
        finally:
            sys.setprofile(None)
            calls[name] += made

    return counted


@cache
def steady(system: str, level: str) -> Step:
    engine = started(STRATEGIES[system], budget_of(level))
    assert isinstance(engine, ManagedEngine)
    device, runtime = engine.device, engine.runtime
    for _ in range(WARM_STEPS):
        one_step(engine, batch(), next_token_loss)
    engine.drain()
    spied: Any = SpiedKernel(device.host_kernel)
    device.host_kernel = spied
    before, logged = engine.counters(), len(engine.log.operations)
    events: Counter[str] = Counter()
    calls: Counter[str] = Counter()
    for name in EVENTS:
        setattr(runtime, name, counting(getattr(runtime, name), name, events, calls))
    one_step(engine, batch(), next_token_loss)
    engine.drain()
    after, plan = engine.counters(), engine.cursor.plan
    assert plan is not None
    step = Step(
        layout=engine.layout,
        plan=plan,
        units=sum(bool(unit.parameters) for unit in engine.index.units),
        counters={name: after[name] - before.get(name, 0) for name in after},
        operations=engine.log.operations[logged:],
        host_bytes=dict(spied.bytes),
        events=dict(events),
        python_calls=dict(calls),
    )
    engine.close()
    return step


each = pytest.mark.parametrize(("system", "level"), [(s, level) for s in STRATEGIES for level in LEVELS])


@each
@pytest.mark.one_in(5)
def test_bytes_a_lane_are_those_of_layout_and_plan(system: str, level: str) -> None:
    """What the host updates goes there once as a gradient and comes back once as parameters: 2 bytes each way, no more."""
    step = steady(system, level)
    sent = sum(step.layout.bundle_bytes(b) for b in step.updated_on_host)
    hidden = step.counters.get("activation_offload_bytes", 0) // 2
    assert step.counters["d2h_bytes"] == step.lane_bytes("d2h") == sent + hidden
    fetched = step.planned_bytes(OpKind.FETCH)
    assert step.counters["h2d_bytes"] == step.lane_bytes("h2d") == fetched + hidden
    assert fetched == sent if system in FILL else fetched >= sent
    assert step.planned_bytes(OpKind.WRITE_BACK) == 0
    assert bool(sent) == (level == "half" or system not in FILL)


@each
def test_the_host_s_only_pass_over_memory_is_adam_s(system: str, level: str) -> None:
    step = steady(system, level)
    updated = sum(step.parameters_of(b) for b in step.updated_on_host)
    assert step.host_bytes == ({"adam": ADAM_BYTES * updated} if updated else {})
    jobs = [op.what for op in step.operations if isinstance(op.what, LaneOperation) and op.what.lane is LaneKind.CPU]
    assert {job.kind for job in jobs} <= {Work.UPDATE, Work.UPDATE_AHEAD}
    assert sorted(job.bundle for job in jobs) == sorted(step.updated_on_host)
    compute = [op.label for op in step.operations if op.lane == "compute" and any(map(on_host, (*op.reads, *op.writes)))]
    assert not compute, "compute passes over host memory"


@each
def test_the_host_waits_once_and_nothing_is_left_to_demand(system: str, level: str) -> None:
    step = steady(system, level)
    assert step.counters["host_syncs"] == 1
    moved = {"h2d_bytes", "d2h_bytes", "activation_offload_bytes"}
    assert {name for name, count in step.counters.items() if count} <= {"host_syncs", *moved}


@each
def test_unit_events_are_four_a_unit(system: str, level: str) -> None:
    step = steady(system, level)
    assert len(step.plan.signature) == 4 * step.units + 3  # and the step's begin, its backward's end and its own
    assert [step.events[name] for name in EVENTS[:3]] == [step.units] * 3
    assert step.units <= step.events["backward_exit"] <= 3 * step.units  # whichever comes first of three; the rest is idle


@each
def test_a_forward_event_makes_few_calls(system: str, level: str) -> None:
    """Time cannot be pinned on a busy machine; the Python calls behind it can. About 45, the event log's included."""
    step = steady(system, level)
    for name in ("forward_enter", "forward_exit"):
        assert step.python_calls[name] <= MOST_CALLS * step.events[name]
