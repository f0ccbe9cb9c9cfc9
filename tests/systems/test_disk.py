"""Master weights and moments on a disk: no bit changes, budgets hold, nothing is left there, and what goes wrong is told."""

from __future__ import annotations

import errno
import os
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import systems
from systems.errors import BudgetError
from systems.planning.disk import BUFFERS, PARTS, disk_bytes, part_bytes, segments_on_disk
from systems.planning.races import find_races
from systems.planning.timeline import timeline
from systems.strategies.elixir.options import ElixirOptions
from systems.substrate import disk as disk_module
from systems.substrate.events import issued_operations
from systems.system import Settings
from tests.random_eviction import RandomOptions
from tests.systems.models_plain import CASES
from tests.systems.models_plain import build as plain
from tests.systems.models_small import next_token_loss, tokens
from tests.systems.running import (
    RANDOM,
    RESIDENT,
    angel_ptm,
    assert_equal,
    elixir,
    finished,
    one_step,
    parts_of,
    settings,
    start,
    train,
)
from tests.systems.setups import Setup, budget_of, reference
from tests.systems.test_memory import check_segments

SMALL = {
    "angel-ptm": (angel_ptm(), angel_ptm().Options()),
    "elixir": (elixir(), ElixirOptions(chunk_max=8192)),
    "random": (RANDOM, RandomOptions(chunk_parameters=1)),
}
SETUPS = [
    Setup("opt"),
    Setup("gpt2", "full", accumulate=2, clip=0.5),
    Setup("opt", "non-reentrant", sharing="half-frozen", dtype="bf16", clip=0.5),
]
SHARE = 0.6  # of the host's memory that a run takes without a disk, give or take pages


def short_of_host(setup: Setup, system: str, level: str) -> int:
    chosen, options = SMALL[system]
    run = setup.run(chosen, budget_of(setup, level), options)
    return int((run.memory.host_peak_bytes or 0) * SHARE)


def with_disk(setup: Setup, system: str, level: str, folder: Path, **more: Any) -> Any:
    chosen, options = SMALL[system]
    given: dict[str, Any] = {"dtype": setup.dtype, "clip": setup.clip, "accumulate": setup.accumulate, "log_events": True}
    if setup.recompute in ("none", "full"):
        given["recompute"] = setup.recompute
    given |= {"device_memory": budget_of(setup, level), "host_memory": short_of_host(setup, system, level), "disk": folder}
    return start(chosen, setup.build(), settings(**(given | more)), options)


@pytest.mark.parametrize(
    ("setup", "system", "level"),
    [
        *((setup, "angel-ptm", level) for setup in SETUPS for level in ("above", "tight")),
        *((setup, system, "half") for setup, system in ((SETUPS[0], "elixir"), (SETUPS[1], "random"), (SETUPS[1], "elixir"))),
    ],
    ids=str,
)
def test_no_bit_changes_and_budgets_hold(setup: Setup, system: str, level: str, tmp_path: Path) -> None:
    engine = with_disk(setup, system, level, tmp_path)
    layout = parts_of(engine).layout
    assert layout.on_disk, "void: the host held everything"

    def check(step: int, _: object) -> None:
        assert os.listdir(tmp_path) == []  # its files have no name
        engine.drain()
        check_segments(parts_of(engine))

    run = train(engine, tokens(3, setup.accumulate), each_step=check)
    assert_equal(reference(setup), run)
    assert find_races(issued_operations(engine.log.operations)) == []
    memory = run.memory
    assert (memory.host_peak_bytes or 0) <= (memory.host_budget_bytes or 0)
    assert memory.disk_peak_bytes == disk_bytes(layout)
    assert {event.live for event in engine.log.bytes if event.tier == "disk"} <= {disk_bytes(layout), 0}
    (trace, plan), *_ = engine.runtime.planner.plans.values()
    if plan is not None:
        predicted = timeline(layout, trace, plan, engine.strategy._context)
        assert set(predicted.disk_bytes) == {disk_bytes(layout)}
    last = run.per_step[-1]
    assert last["disk_read_bytes"] == last["disk_write_bytes"]
    updated_there = [s for s in segments_on_disk(layout) if plan is None or plan.optimizer_tier[s.index].value != "device"]
    assert last["disk_read_bytes"] == sum(4 * PARTS * s.shard_numel for s in updated_there)


def test_what_is_updated_on_the_device_leaves_the_disk_alone(tmp_path: Path) -> None:
    """With all the device's memory the plan has every state there, whatever its home; a tight step then sends them home."""
    engine = with_disk(SETUPS[0], "angel-ptm", "above", tmp_path, device_memory=1 << 30)
    run = train(engine, tokens(3, 1))
    assert_equal(reference(SETUPS[0]), run)
    assert run.per_step[-1]["disk_read_bytes"] == run.per_step[-1]["disk_write_bytes"] == 0
    assert run.per_step[0]["disk_read_bytes"] > 0


@pytest.mark.parametrize("model", ["called-twice", "late-leaf", "rounds", "silent", "unused-output"])
def test_gradients_that_are_late_or_missing(model: str, tmp_path: Path) -> None:
    ids = tokens(4, 1)
    expected = train(start(RESIDENT, plain(model), settings()), ids, CASES[model].loss)
    size = 16 * sum(p.numel() for p in plain(model).parameters())
    given = settings(device_memory=400_000, host_memory=int(size * 0.75) + 40_000, disk=tmp_path)
    engine = start(RANDOM, plain(model), given, RandomOptions(chunk_parameters=1))
    assert parts_of(engine).layout.on_disk
    assert_equal(expected, train(engine, ids, CASES[model].loss))


def test_a_skipped_step_changes_nothing(tmp_path: Path) -> None:
    """A gradient that is not finite: slots get their parameters back from masters that are on the disk."""
    setup = SETUPS[0]
    engine, other = with_disk(setup, "angel-ptm", "tight", tmp_path), start(RESIDENT, setup.build(), settings())
    runs = []
    for each in (engine, other):
        for number, batch in enumerate(tokens(4, 1)):
            scale = float("inf") if number == 2 else 1.0
            one_step(each, batch, lambda *given, scale=scale: next_token_loss(*given) * scale)
        runs.append(finished(each, []))
    assert runs[0].skipped == runs[1].skipped == [False, False, True, False]
    assert_equal(runs[1], runs[0])


def test_a_checkpoint_of_one_is_restored_by_the_other(tmp_path: Path) -> None:
    setup = SETUPS[0]
    ids = tokens(4, 1)
    whole = train(start(RESIDENT, setup.build(), settings()), ids)
    first = with_disk(setup, "angel-ptm", "tight", tmp_path)
    for batch in ids[:2]:
        one_step(first, batch)
    systems.save_checkpoint(first, tmp_path / "saved")
    first.close()
    other = Setup("opt").build()
    with torch.no_grad():
        for parameter in other.parameters():
            parameter.zero_()
    second = with_disk(setup, "angel-ptm", "half", tmp_path)
    systems.load_checkpoint(second, tmp_path / "saved")
    losses = [one_step(second, batch) for batch in ids[2:]]
    run = finished(second, losses)
    assert run.losses == whole.losses[2:]
    assert all(torch.equal(run.parameters[name], value) for name, value in whole.parameters.items())


def test_summoned_values_are_taken_over(tmp_path: Path) -> None:
    engine = with_disk(SETUPS[0], "angel-ptm", "tight", tmp_path)
    one_step(engine, tokens(1, 1)[0])
    with engine.summon(write=True) as held:
        for value in held.values():
            value.mul_(0.5)
        halves = {name: value.clone() for name, value in held.items()}
    with engine.summon() as held:
        assert all(torch.equal(held[name], value) for name, value in halves.items())
    engine.drain()
    check_segments(parts_of(engine))
    engine.close()


# ---- what goes wrong


@pytest.mark.parametrize("nth", [1, 5])
@pytest.mark.parametrize("name", ["preadv", "pwritev"])
def test_a_disk_that_fails_is_told_and_the_engine_closes(
    name: str, nth: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    engine = with_disk(SETUPS[0], "angel-ptm", "tight", tmp_path)
    one_step(engine, tokens(1, 1)[0])
    engine.drain()
    plain_call, calls = getattr(os, name), []

    def fails(file: int, data: Any, offset: int) -> int:
        calls.append(offset)
        if len(calls) == nth:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        done: int = plain_call(file, data, offset)
        return done

    monkeypatch.setattr(disk_module.os, name, fails)

    def go_on() -> None:
        for batch in tokens(3, 1):
            one_step(engine, batch)
        engine.drain()

    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        go_on()
    monkeypatch.undo()
    engine.close()
    assert os.listdir(tmp_path) == []


def test_reads_and_writes_may_be_taken_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_parts(move: Callable[..., int]) -> Callable[..., int]:
        return lambda file, data, offset: move(file, [data[0][:4096]], offset)

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(disk_module.os, name, in_parts(getattr(os, name)))
    assert_equal(reference(SETUPS[0]), train(with_disk(SETUPS[0], "angel-ptm", "tight", tmp_path), tokens(3, 1)))


def test_a_file_system_without_direct_io(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    plain_open = os.open

    def refuses(path: Any, flags: int, *more: Any, **named: Any) -> int:
        if flags & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain_open(path, flags, *more, **named)

    monkeypatch.setattr(disk_module.os, "open", refuses)
    engine = with_disk(SETUPS[0], "angel-ptm", "tight", tmp_path)
    assert engine.memory().disk_direct is False
    assert_equal(reference(SETUPS[0]), train(engine, tokens(3, 1)))


@pytest.mark.parametrize("case", ["nothing there", "a file", "full", "read-only"])
def test_a_folder_that_will_not_do_is_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, said = tmp_path / "disk", "--disk"
    if case == "a file":
        folder.write_text("x")
    elif case != "nothing there":
        folder.mkdir()
    if case == "full":

        def fallocate(*_: Any) -> None:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

        monkeypatch.setattr(disk_module.os, "posix_fallocate", fallocate)
        said = "are free: make room there"
    elif case == "read-only":

        def mkstemp(**_: Any) -> Any:
            raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))

        monkeypatch.setattr(disk_module.tempfile, "mkstemp", mkstemp)
        said = "can be written to"
    with pytest.raises(BudgetError, match=said) as refused:
        with_disk(SETUPS[0], "angel-ptm", "tight", folder)
    assert refused.value.tier == "disk"
    assert case in ("nothing there", "a file") or os.listdir(folder) == []


def test_a_disk_that_is_too_small_is_used_for_what_it_holds(tmp_path: Path) -> None:
    """The rest stays on the device, if that has room for it."""
    setup = SETUPS[0]
    engine = with_disk(setup, "angel-ptm", "above", tmp_path, disk_memory=1 << 20)
    layout = parts_of(engine).layout
    assert 0 < disk_bytes(layout) <= 1 << 20
    assert any(not b.movable for b in layout.bundles)
    assert_equal(reference(setup), train(engine, tokens(3, 1)))
    with pytest.raises(BudgetError, match="or --disk-memory"):
        with_disk(setup, "angel-ptm", "tight", tmp_path, disk_memory=1 << 20)


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="name it with disk"):
        Settings(disk_memory=5)
    with pytest.raises(ValueError, match="disk_memory is -1"):
        Settings(disk="x", disk_memory=-1)


def test_buffers_are_of_the_largest_segment(tmp_path: Path) -> None:
    engine = with_disk(SETUPS[0], "angel-ptm", "tight", tmp_path)
    parts = parts_of(engine)
    longest = max(map(part_bytes, segments_on_disk(parts.layout)))
    disk = parts.store.disk
    assert disk is not None
    assert [len(buffer.parts) for buffer in disk.buffers] == [PARTS] * BUFFERS
    assert all(part.nbytes == longest and part.data_ptr() % 4096 == 0 for buffer in disk.buffers for part in buffer.parts)
    engine.close()
    assert disk.account.live == 0
