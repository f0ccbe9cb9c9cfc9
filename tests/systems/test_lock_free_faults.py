"""Lock-free updating: what goes wrong behind the steps is told, nothing hangs, and what it cannot do is refused by name."""

from __future__ import annotations

import errno
import os
import threading
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from systems.device.memory import disk as disk_module
from systems.errors import BudgetError, DivergedError, UnsupportedError
from systems.system import Engine
from tests.systems.models_small import build, next_token_loss, tokens
from tests.systems.running import assert_equal, managed, one_step, settings, start, train
from tests.systems.setups import budget_of, reference
from tests.systems.test_lock_free import ANGEL, SETUPS, Kept, begun, lock_free, slow_updates
from tests.systems.test_memory import check_segments


def fails_at(nth: int, what: Callable[..., Any], error: BaseException) -> Callable[..., Any]:
    calls: list[int] = []

    def call(*given: Any, **named: Any) -> Any:
        calls.append(1)
        if len(calls) == nth:
            raise error
        return what(*given, **named)

    return call


def go_on(engine: Engine, steps: int = 6) -> None:
    for batch in tokens(steps, 1):
        one_step(engine, batch)
    engine.drain()


@pytest.mark.parametrize("most", [0, 2])
@pytest.mark.parametrize("what", ["update", "preadv", "pwritev"])
@pytest.mark.parametrize("nth", [1, 9])
@pytest.mark.one_in(4)
def test_an_error_behind_the_steps_is_told_and_the_engine_closes(
    what: str, most: int, nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = begun(SETUPS[0], most, tmp_path)
    go_on(engine, 2)
    kernel = managed(engine).device.host_kernel
    full = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
    if what == "update":
        kernel.update = fails_at(nth, kernel.update, full)
    else:
        monkeypatch.setattr(disk_module.os, what, fails_at(nth, getattr(os, what), full))
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        go_on(engine)
    with pytest.raises((RuntimeError, OSError), match="an update behind the steps broke off|No space left|two steps"):
        one_step(engine, tokens(1, 1)[0])
    engine.close()
    assert os.listdir(tmp_path) == []
    assert not [thread for thread in threading.enumerate() if thread.name == "updating"]


def test_reads_and_writes_may_be_taken_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    kept, calls = Kept(monkeypatch), list[int]()

    def in_parts(move: Callable[..., int]) -> Callable[..., int]:
        def part(file: int, data: Any, offset: int) -> int:
            calls.append(1)
            return move(file, [data[0][:4096]], offset)

        return part

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(disk_module.os, name, in_parts(getattr(os, name)))
    assert_equal(reference(SETUPS[0]), train(begun(SETUPS[0], 0, tmp_path), tokens(3, 1)))
    assert kept.check() == 1
    assert calls


@pytest.mark.parametrize("label", ["fetch", "offload", "accumulate"])
@pytest.mark.parametrize("nth", [1, 4])
@pytest.mark.one_in(3)
def test_an_interrupt_ends_nothing_in_a_wait(label: str, nth: int, tmp_path: Path) -> None:
    """The engine goes on, or says why not, and closes."""
    engine = begun(SETUPS[0], 1, tmp_path)
    go_on(engine, 2)
    transfers = managed(engine).device.transfers
    issue, seen = transfers.issue, list[int]()

    def interrupt(operation: Any, *given: Any, **more: Any) -> Any:
        if operation.label.startswith(label):
            seen.append(1)
            if len(seen) == nth:
                raise KeyboardInterrupt
        return issue(operation, *given, **more)

    transfers.issue = interrupt
    with slow_updates(engine, 0.002), pytest.raises(KeyboardInterrupt):
        go_on(engine)
    transfers.issue = issue
    try:
        go_on(engine)
    except RuntimeError as error:
        assert "parameters belong to two steps" in str(error)  # noqa: PT017
    else:
        check_segments(managed(engine))
    engine.close()


def test_an_interrupt_while_it_drains(tmp_path: Path) -> None:
    engine = begun(SETUPS[0], 3, tmp_path)
    go_on(engine, 2)
    lock_free_part = managed(engine).lock_free
    finish, calls = lock_free_part._thread.finish, []

    def interrupted() -> None:
        calls.append(1)
        if len(calls) == 1:
            raise KeyboardInterrupt
        finish()

    lock_free_part._thread.finish = interrupted
    with slow_updates(engine, 0.002):
        for batch in tokens(3, 1):
            one_step(engine, batch)
        with pytest.raises(KeyboardInterrupt):
            engine.drain()
        engine.drain()
    check_segments(managed(engine))
    go_on(engine, 2)
    engine.close()


def test_a_gradient_that_is_not_finite_ends_the_run() -> None:
    engine = begun(SETUPS[0], 2)
    go_on(engine, 2)

    def diverge() -> None:
        for batch in tokens(3, 1):
            one_step(engine, batch, lambda *asked: next_token_loss(*asked) * torch.inf)

    with pytest.raises(DivergedError, match="max_staleness"):
        diverge()
    engine.close()


# ---- what is refused


def test_what_cannot_be_taken_out_of_a_sum_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="max_staleness has nonfinite=stop"):
        lock_free(1, nonfinite="skip")
    with pytest.raises(ValueError, match="greater than or equal to 0"):
        lock_free(-1)
    for asked in ({"clip": 1.0}, {"dtype": "fp16"}):
        with pytest.raises(UnsupportedError, match="no max_staleness in `options`"):
            start(ANGEL, build("opt"), settings(**asked), lock_free(1))


def test_states_on_the_disk_need_one(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="name a folder there with `disk`"):
        start(ANGEL, build("opt"), settings(), lock_free(None, states="disk"))
    with pytest.raises(BudgetError, match="raise `disk_memory`") as refused:
        start(ANGEL, build("opt"), settings(disk=tmp_path, disk_memory=1 << 20), lock_free(None, states="disk"))
    assert refused.value.tier == "disk"


def test_all_states_are_on_the_disk_though_the_host_has_room(tmp_path: Path) -> None:
    setup = SETUPS[0]
    engine = start(
        ANGEL, setup.build(), settings(device_memory=budget_of(setup, "tight"), disk=tmp_path), lock_free(None, states="disk")
    )
    layout = managed(engine).layout
    assert layout.on_disk == {b.index for b in layout.bundles if b.movable and b.trainable}
    run = train(engine, tokens(3, 1))
    assert_equal(reference(setup), run)
    size = sum(12 * layout.shard_numel(b) for b in layout.on_disk)
    assert run.per_step[-1]["disk_read_bytes"] == run.per_step[-1]["disk_write_bytes"] == size
