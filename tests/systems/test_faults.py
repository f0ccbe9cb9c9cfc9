"""After an exception anywhere the engine runs the next step rightly, or closes cleanly (invariant 15, case C43)."""

from __future__ import annotations

import contextlib
import gc
import mmap
import threading
import time
import weakref
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import cache
from itertools import product
from typing import Any

import pytest
import torch
from torch import nn

from systems.device.memory.pool import Allocation
from systems.errors import OutOfMemoryError
from systems.planning.plan import LaneKind
from systems.planning.step.operations import LaneOperation
from systems.strategies.elixir.options import ElixirOptions
from systems.system import Engine
from tests.planning.races import find_races, issued_operations
from tests.systems.every import MANAGED, SYSTEMS
from tests.systems.models_plain import CASES, build
from tests.systems.models_small import tokens
from tests.systems.pairwise import covered
from tests.systems.running import (
    Run,
    assert_equal,
    elixir,
    finished,
    h3t,
    managed,
    one_step,
    parameters_of,
    patrickstar,
    settings,
    start,
)
from tests.systems.setups import in_turn

LOSS = CASES["stack"].loss
TIGHT = 150_000  # bytes: about 40 % of what resident needs
STEPS = 3


class OnPurposeError(Exception):
    pass


def started(system: str, accumulate: int = 1, **more: Any) -> Engine:
    budget = {} if system == "resident" else {"device_memory": TIGHT}
    options = h3t().Options(solver="drawn") if system == "h3t" else None  # any switches, barriers among them
    return start(SYSTEMS[system], build("stack"), settings(accumulate=accumulate, clip=1.0, **budget, **more), options)


@cache
def undisturbed(accumulate: int) -> Run:
    engine = started("resident", accumulate)
    return finished(engine, [one_step(engine, batch, LOSS) for batch in tokens(STEPS, accumulate)])


def fail_in_forward(engine: Engine) -> Any:
    def fail(*_: Any) -> None:
        raise OnPurposeError

    return block_of(engine).up.register_forward_hook(fail)  # inside a unit


def fail_before_a_unit(engine: Engine) -> Any:
    def fail(*_: Any) -> None:
        raise OnPurposeError

    return block_of(engine).register_forward_pre_hook(fail, prepend=True)


def fail_after_a_unit(engine: Engine) -> Any:
    def fail(*_: Any) -> None:
        raise OnPurposeError

    return block_of(engine).register_forward_hook(fail)


def fail_in_backward(engine: Engine) -> Any:
    def fail(gradient: torch.Tensor) -> None:
        raise OnPurposeError

    return block_of(engine).up.weight.register_hook(fail)


def interrupt(engine: Engine) -> Any:
    def fail(gradient: torch.Tensor) -> None:
        raise KeyboardInterrupt

    return block_of(engine).norm.bias.register_hook(fail)


def block_of(engine: Engine) -> Any:
    module: Any = engine.module
    return module.blocks[1]


PLACES = (fail_in_forward, fail_before_a_unit, fail_after_a_unit, fail_in_backward, interrupt)


@pytest.mark.parametrize(
    ("system", "place", "accumulate"),
    covered({"system": list(SYSTEMS), "place": PLACES, "accumulate": (1, 2)}),
    ids=lambda value: getattr(value, "__name__", None),
)
@pytest.mark.one_in(6)
def test_an_exception_costs_its_step_and_nothing_else(system: str, place: Callable[[Engine], Any], accumulate: int) -> None:
    """In the warm-up step, in a planned one, and twice in a row; with two micro-batches in the second of them."""
    engine = started(system, accumulate, log_events=True)
    losses = []
    for number, batch in enumerate(tokens(STEPS, accumulate)):
        for _ in range((1, 0, 2)[number]):
            before = parameters_of(engine)
            for micro in batch[:-1]:
                engine.backward(LOSS(engine, micro, 7))
            handle = place(engine)
            with pytest.raises((OnPurposeError, KeyboardInterrupt)):
                engine.backward(LOSS(engine, batch[-1], 7))
            handle.remove()
            assert all(torch.equal(value, before[name]) for name, value in parameters_of(engine).items())
        losses.append(one_step(engine, batch, LOSS))
    assert_equal(undisturbed(accumulate), finished(engine, losses))
    assert find_races(issued_operations(engine.log.operations)) == []  # type: ignore[attr-defined]


def test_what_a_broken_step_has_read_is_not_overwritten_before() -> None:
    """Nobody released what it held; whoever gets that memory next must wait for compute all the same."""
    engine = started("random", log_events=True)
    residency = managed(engine).residency
    residency.hold([2, 3], "a unit")
    engine.recovery.abort()  # type: ignore[attr-defined]
    for index in residency.room.evictable():
        residency.drop(index)
    for index in range(len(residency.bundles)):
        residency.fetch(index)
    engine.drain()
    assert find_races(issued_operations(engine.log.operations)) == []  # type: ignore[attr-defined]
    engine.close()


@pytest.mark.parametrize("system", SYSTEMS)
def test_an_exception_in_evaluation_costs_nothing(system: str) -> None:
    engine = started(system)
    losses = []
    for batch in tokens(STEPS, 1):
        handle = fail_in_forward(engine)
        with torch.no_grad(), pytest.raises(OnPurposeError):
            LOSS(engine, batch[0], 1)
        handle.remove()
        losses.append(one_step(engine, batch, LOSS))
    assert_equal(undisturbed(1), finished(engine, losses))


class Faults:
    """Makes the device pool fail by number: allocation `number` of a step once, or it and all later ones."""

    def __init__(self, engine: Engine) -> None:
        self.pool = managed(engine).device.pool
        self.made, self.failed = 0, 0
        self.first: int | None = None
        self.always = False
        self._allocate = self.pool.allocate
        self.pool.allocate = self.allocate

    def allocate(self, nbytes: int, label: str, *, limit: int | None = None, compute: bool = False) -> Allocation | None:
        self.made += 1
        if self.first is not None and (self.made > self.first if self.always else self.made == self.first + 1):
            self.failed += 1
            return None
        return self._allocate(nbytes, label, limit=limit, compute=compute)

    @contextmanager
    def failing(self, first: int, *, always: bool = False) -> Iterator[None]:
        self.made, self.first, self.always = 0, first, always
        try:
            yield
        finally:
            self.first = None


def check_accounts(engine: Engine) -> None:
    ours = managed(engine)
    states = [s.state.allocation.nbytes for s in ours.store.segments if s.state and s.state.allocation]
    whole = sum(map(ours.layout.bundle_bytes, ours.residency.resident()))
    pages = sum(each.block.nbytes for bundle in ours.residency.bundles for each in bundle.pages)
    assert ours.device.account.pool == sum(states) + whole + pages
    assert not any(m.holds for m in ours.residency.bundles)
    assert not any(s.slot_holds_gradient for s in ours.store.segments)
    assert not any(bundle.gradients.range for bundle in ours.gradients.bundles.values())


@pytest.mark.parametrize(
    ("system", "accumulate", "further"),
    [
        *in_turn(MANAGED, [(1, 5), (2, 5)]),
        *(pytest.param(*row, 2, marks=pytest.mark.slow) for row in product(MANAGED, [1, 2])),
    ],
)
@pytest.mark.one_in(4)
def test_an_allocation_that_fails_once_is_made_again(system: str, accumulate: int, further: int) -> None:
    """One allocation in each step, then one further on, to the last: something is evicted, it is tried anew, no bit changes."""
    tried, number = 0, 0
    while True:
        engine = started(system, accumulate)
        faults = Faults(engine)
        losses = []
        for batch in tokens(STEPS, accumulate):
            with faults.failing(number):
                losses.append(one_step(engine, batch, LOSS))
            engine.drain()
            check_accounts(engine)
        assert_equal(undisturbed(accumulate), finished(engine, losses))
        if not faults.failed:
            break
        tried += faults.failed
        number += further * accumulate
    assert tried * further > 30, "void: hardly any allocation was made to fail"


@pytest.mark.parametrize("first", [2, 9])
@pytest.mark.parametrize("system", MANAGED)
@pytest.mark.one_in(2)
def test_an_allocation_that_keeps_failing_is_said_and_forgotten(system: str, first: int) -> None:
    engine = started(system)
    faults = Faults(engine)
    losses, refused = [], 0
    for batch in tokens(STEPS, 1):
        before = parameters_of(engine)
        caught: OutOfMemoryError | None = None
        try:
            with faults.failing(first, always=True):
                value = LOSS(engine, batch[0], batch[:, :, 1:].numel())
                engine.backward(value)
        except OutOfMemoryError as error:
            caught = error
        if caught is not None:
            assert caught.tier == "device" and "`device_memory`" in str(caught) and caught.need > 0
            refused += 1
            engine.drain()
            check_accounts(engine)
            assert all(torch.equal(v, before[n]) for n, v in parameters_of(engine).items())
            losses.append(one_step(engine, batch, LOSS))
        else:
            engine.step()
            losses.append(value.item())
    assert refused > 0, "void: nothing failed"
    assert_equal(undisturbed(1), finished(engine, losses))


@pytest.mark.filterwarnings("ignore:module forward hook with ``always_call=True`` raised")
@pytest.mark.parametrize("kind", [LaneKind.H2D, LaneKind.D2H, LaneKind.CPU], ids=lambda k: k.value)
@pytest.mark.parametrize("steps", [0, 1], ids=["before there is a plan", "under a plan"])
@pytest.mark.parametrize("system", MANAGED)
@pytest.mark.one_in(2)
def test_a_failed_copy_or_update_is_raised_and_close_is_clean(system: str, steps: int, kind: LaneKind) -> None:
    """Before there is a plan: optimizer state that moves to the device at the end of the step waits for what failed."""
    threads = set(threading.enumerate())
    engine = started(system)
    batch = tokens(1, 1)[0]
    for _ in range(steps):
        one_step(engine, batch, LOSS)
    lane = managed(engine).device.lanes[kind]
    submit = lane.submit

    def broken(work: Callable[[], None], after: Any, **more: Any) -> Any:
        def fail() -> None:
            raise OnPurposeError

        lane.submit = submit
        return submit(fail, after, **more)

    lane.submit = broken
    with pytest.raises(OnPurposeError):
        steps_and_drain(engine, batch)
    with pytest.raises(OnPurposeError):  # what a lane did not do stays undone: nobody reads weights that miss it
        parameters_of(engine)
    engine.close()
    assert managed(engine).device.account.pool == 0
    assert set(threading.enumerate()) <= threads


@pytest.mark.filterwarnings("ignore:module forward hook with ``always_call=True`` raised")
@pytest.mark.parametrize("kind", [LaneKind.H2D, LaneKind.D2H, LaneKind.CPU], ids=lambda k: k.value)
def test_a_failed_copy_or_update_keeps_no_memory(kind: LaneKind, monkeypatch: pytest.MonkeyPatch) -> None:
    """Though the closed engine is still there, and its error went through frames that held the job and the step's loss."""
    mappings: list[weakref.ref[Any]] = []

    class Watched(mmap.mmap):
        def __init__(self, *_: Any, **__: Any) -> None:
            mappings.append(weakref.ref(self))

    monkeypatch.setattr(mmap, "mmap", Watched)
    engine = started("elixir")
    lane = managed(engine).device.lanes[kind]
    submit = lane.submit

    def broken(work: Callable[[], None], after: Any, **more: Any) -> Any:
        def fail() -> None:
            work()
            raise OnPurposeError

        lane.submit = submit
        return submit(fail, after, **more)

    lane.submit = broken
    with contextlib.suppress(OnPurposeError):
        steps_and_drain(engine, tokens(1, 1)[0])
    assert len(mappings) > 4, "void: no memory is watched"
    engine.close()
    gc.collect()
    assert not [each for each in mappings if each() is not None]


def test_an_error_of_one_lane_is_told_when_all_are_done() -> None:
    """Who is told of it may close the engine, and memory goes back that the others were working on."""
    engine = started("elixir")
    device = managed(engine).device
    device.lanes[LaneKind.H2D].submit(lambda: 1 / 0, [], id=1)
    update = device.lanes[LaneKind.CPU].submit(lambda: time.sleep(0.05), [], id=2)
    with pytest.raises(ZeroDivisionError):
        engine.drain()
    assert update.done()
    engine.close()


def steps_and_drain(engine: Engine, batch: torch.Tensor) -> None:
    for _ in range(3):
        one_step(engine, batch, LOSS)
    engine.drain()


@pytest.mark.parametrize("issued", [False, True], ids=["before it is issued", "before it left its ticket"])
@pytest.mark.parametrize("label", ["fetch bundle", "offload bundle", "update bundle"])
@pytest.mark.parametrize("system", MANAGED)
@pytest.mark.one_in(3)
def test_an_interrupt_in_an_operation(system: str, label: str, issued: bool) -> None:
    """Parameters are as before the step, or, once one was updated, the engine says that they are not."""
    engine = started(system)
    transfers = managed(engine).device.transfers
    issue, plain = transfers.issue, tokens(STEPS, 1)
    losses = [one_step(engine, plain[0], LOSS)]
    seen: list[str] = []

    def interrupted(operation: LaneOperation, work: Callable[[], None], **more: Any) -> Any:
        if operation.label.startswith(label):
            seen.append(operation.label)
            if len(seen) == 2:
                if issued:
                    transfers._lanes[operation.lane].submit(work, [], id=0)
                raise KeyboardInterrupt
        return issue(operation, work, **more)

    transfers.issue = interrupted
    with pytest.raises(KeyboardInterrupt):
        one_step(engine, plain[1], LOSS)
    transfers.issue = issue
    if label == "update bundle":
        with pytest.raises(RuntimeError, match="parameters belong to two steps"):
            one_step(engine, plain[1], LOSS)
        engine.close()
    else:
        assert_equal(undisturbed(1), finished(engine, losses + [one_step(engine, batch, LOSS) for batch in plain[1:]]))


def test_an_interrupt_while_gradients_are_written_over_parameters() -> None:
    engine = start(patrickstar(), build("stack"), settings(clip=1.0, device_memory=TIGHT))
    transfers = managed(engine).device.transfers
    compute, batches = transfers.compute, tokens(STEPS, 1)
    losses = [one_step(engine, batches[0], LOSS)]

    def interrupted(*, label: str, **more: Any) -> None:
        if label.startswith("gradients over parameters") and label.endswith("end"):
            raise KeyboardInterrupt
        compute(label=label, **more)

    transfers.compute = interrupted
    with pytest.raises(KeyboardInterrupt):
        one_step(engine, batches[1], LOSS)
    transfers.compute = compute
    assert_equal(undisturbed(1), finished(engine, losses + [one_step(engine, batch, LOSS) for batch in batches[1:]]))


def test_a_step_that_broke_off_between_its_updates_cannot_be_followed() -> None:
    """nonfinite=stop updates during backward: what is updated already cannot be taken back, so the engine refuses."""
    model = build("stack")
    engine = start(elixir(), model, settings(device_memory=TIGHT), ElixirOptions(nonfinite="stop"))
    batch = tokens(1, 1)[0]
    one_step(engine, batch, LOSS)
    handle = fail_in_backward(engine)
    with pytest.raises(OnPurposeError):
        one_step(engine, batch, LOSS)
    handle.remove()
    with pytest.raises(RuntimeError, match="parameters belong to two steps"):
        one_step(engine, batch, LOSS)
    engine.close()


def test_an_exception_before_the_first_update_can_be_followed() -> None:
    options, ids = ElixirOptions(nonfinite="stop"), tokens(STEPS, 1)
    asked = settings(device_memory=TIGHT)
    runs = []
    for disturbed in (False, True):
        engine = start(elixir(), build("stack"), asked, options)
        losses = []
        for batch in ids:
            if disturbed:
                handle = fail_in_forward(engine)
                with pytest.raises(OnPurposeError):
                    one_step(engine, batch, LOSS)
                handle.remove()
            losses.append(one_step(engine, batch, LOSS))
        runs.append(finished(engine, losses))
    assert_equal(*runs)


def test_a_module_that_fails_while_it_is_taken_over_leaves_no_thread() -> None:
    threads = set(threading.enumerate())

    class Odd(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.empty(3, device="meta"))

    for system in SYSTEMS.values():
        with pytest.raises(ValueError, match="weight has no values"):
            start(system, Odd(), settings())
    assert set(threading.enumerate()) <= threads
