"""Master weights and moments on a disk: no bit changes, budgets hold, nothing is left there, and what goes wrong is told."""

from __future__ import annotations

import errno
import fcntl
import os
import time
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

import systems
from systems.device.memory import disk as disk_module
from systems.errors import BudgetError
from systems.planning.disk_layout import BUFFERS, disk_bytes, part_bytes, segments_on_disk
from systems.planning.plan import Tier
from systems.planning.step.operations import LaneOperation
from systems.planning.step.timeline import timeline
from systems.settings import Settings
from systems.strategies.elixir.options import ElixirOptions
from tests.planning.races import find_races, issued_operations
from tests.random_eviction import RandomOptions
from tests.systems.every import STRATEGIES
from tests.systems.models_plain import CASES
from tests.systems.models_plain import build as plain
from tests.systems.models_small import build as small
from tests.systems.models_small import next_token_loss, tokens
from tests.systems.running import (
    RANDOM,
    RESIDENT,
    adam_states,
    angel_ptm,
    assert_equal,
    elixir,
    finished,
    managed,
    one_step,
    parameters_of,
    settings,
    start,
    train,
    waiting,
)
from tests.systems.setups import Setup, budget_of, reference
from tests.systems.test_memory import check_segments

STATES = ("master", "exp_avg", "exp_avg_sq")
SMALL = {
    **{name: (system, system.Options()) for name, system in STRATEGIES.items()},
    "angel-ptm": (angel_ptm(), angel_ptm().Options(page=5120)),  # a matrix takes several still; each is a read and a write
    "elixir": (elixir(), ElixirOptions(chunk_max=8192)),
    "random": (RANDOM, RandomOptions(chunk_parameters=1)),
}
# A whole layer of H3T, on its way to the disk, takes more of the host than these budgets have.
OTHERS = [name for name in STRATEGIES if name not in ("angel-ptm", "elixir", "h3t")]
SETUPS = [
    Setup("opt"),
    Setup("gpt2", "full", accumulate=2, clip=0.5),
    Setup("opt", "non-reentrant", sharing="half-frozen", dtype="bf16", clip=0.5),
]
SHARE = 0.6  # of the host's memory that a run takes without a disk, give or take pages


@cache
def short_of_host(setup: Setup, system: str, level: str) -> int:
    chosen, options = SMALL[system]
    run = setup.run(chosen, budget_of(setup, level), waiting(options))
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
        *((setup, "angel-ptm", ("above", "tight")[number % 2]) for number, setup in enumerate(SETUPS)),
        *(
            pytest.param(setup, "angel-ptm", ("tight", "above")[number % 2], marks=pytest.mark.slow)
            for number, setup in enumerate(SETUPS)
        ),
        *((setup, system, "half") for setup, system in ((SETUPS[0], "elixir"), (SETUPS[1], "random"), (SETUPS[1], "elixir"))),
        *((SETUPS[number % 3], system, "half") for number, system in enumerate(OTHERS)),
    ],
    ids=str,
)
@pytest.mark.one_in(7)
def test_no_bit_changes_and_budgets_hold(setup: Setup, system: str, level: str, tmp_path: Path) -> None:
    engine = with_disk(setup, system, level, tmp_path)
    layout = managed(engine).layout
    assert layout.on_disk, "void: the host held everything"

    def check(step: int, _: object) -> None:
        assert os.listdir(tmp_path) == []  # its files have no name
        engine.drain()
        check_segments(managed(engine))

    run = train(engine, tokens(3, setup.accumulate), each_step=check)
    assert_equal(reference(setup), run)
    assert find_races(issued_operations(engine.log.operations)) == []
    memory = run.memory
    assert (memory.host_peak_bytes or 0) <= (memory.host_budget_bytes or 0)
    assert memory.disk_peak_bytes == disk_bytes(layout)
    assert {event.live for event in engine.log.bytes if event.tier == "disk"} <= {disk_bytes(layout), 0}
    (trace, plan), *_ = engine.planner.plans.values()
    if plan is not None:
        predicted = timeline(layout, trace, plan, engine.strategy._context)
        assert set(predicted.disk_bytes) == {disk_bytes(layout)}
    last = run.per_step[-1]
    assert last["disk_read_bytes"] == last["disk_write_bytes"]
    updated_there = [s for s in segments_on_disk(layout) if plan is None or plan.optimizer_tier[s.index].value != "device"]
    assert last["disk_read_bytes"] == sum(4 * len(STATES) * s.shard_numel for s in updated_there)


def test_what_is_updated_on_the_device_leaves_the_disk_alone(tmp_path: Path) -> None:
    """With all the device's memory the plan has every state there, whatever its home."""
    engine = with_disk(SETUPS[0], "angel-ptm", "above", tmp_path, device_memory=1 << 30)
    run = train(engine, tokens(3, 1))
    assert_equal(reference(SETUPS[0]), run)
    assert run.per_step[-1]["disk_read_bytes"] == run.per_step[-1]["disk_write_bytes"] == 0
    assert run.per_step[0]["disk_read_bytes"] > 0


def test_a_larger_step_sends_states_home_in_its_middle(tmp_path: Path) -> None:
    """None of it is counted as an activation, which there is no room for."""
    lengths, given = (8, 8, 128, 8), {"clip": 0.5, "device_memory": 4_500_000}
    runs = []
    on_disk = {"host_memory": 3_000_000, "disk": tmp_path}
    for (chosen, options), more in (((RESIDENT, None), {"device_memory": 1 << 30}), (SMALL["angel-ptm"], on_disk)):
        engine = start(chosen, small("opt", positions=158), settings(**(given | more)), options)
        runs.append(finished(engine, [one_step(engine, tokens(1, 1, 1, length, seed=length)[0]) for length in lengths]))
    assert runs[1].counters.get("demotions"), "void: nothing was sent home"
    assert runs[1].counters["disk_write_bytes"] > 0, "void: nothing is on the disk"
    assert_equal(*runs)


def test_a_bundle_is_fetched_from_masters_on_the_disk(tmp_path: Path) -> None:
    """Where its slots hold a gradient; what is read for that is on the host, not an activation."""
    engine = with_disk(SETUPS[2], "angel-ptm", "tight", tmp_path)
    ours = managed(engine)
    store, residency, account = ours.store, ours.residency, ours.device.account
    index = max(ours.layout.on_disk)
    residency.drop(index)
    mine = [store.segments[s] for s in ours.layout.bundles[index].segments]
    for each in mine:
        each.slot_holds_gradient = True
        each.slot.fill_(torch.nan)
    with ours.device.metered():
        account.start_interval()
        before = account.other
        residency.fetch(index)
        assert account.start_interval() == before
    engine.drain()
    for each, piece in zip(mine, ours.bundles[index].pieces(ours.bundles[index].block), strict=True):
        assert torch.equal(piece, ours.store.part(each, "master").to(store.dtype))
    engine.close()


def test_a_phased_step_tells_the_disk_s_time(tmp_path: Path) -> None:
    engine, ids = with_disk(SETUPS[0], "angel-ptm", "tight", tmp_path), tokens(3, 1)
    for batch in ids[:2]:
        one_step(engine, batch)
    seconds = engine.phases_s(lambda: one_step(engine, ids[2]))
    assert seconds["disk_read"] > 0 and seconds["disk_write"] > 0
    engine.close()


@pytest.mark.parametrize("model", ["called-twice", "late-leaf", "rounds", "silent", "unused-output"])
def test_gradients_that_are_late_or_missing(model: str, tmp_path: Path) -> None:
    ids = tokens(4, 1)
    expected = train(start(RESIDENT, plain(model), settings()), ids, CASES[model].loss)
    size = 16 * sum(p.numel() for p in plain(model).parameters())
    given = settings(device_memory=400_000, host_memory=int(size * 0.75) + 40_000, disk=tmp_path)
    engine = start(RANDOM, plain(model), given, RandomOptions(chunk_parameters=1))
    assert managed(engine).layout.on_disk
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
    check_segments(managed(engine))
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


@pytest.mark.parametrize("issued", [False, True], ids=["before it is issued", "before it left its ticket"])
@pytest.mark.parametrize("label", ["read-state", "update bundle", "write-state"])
def test_an_interrupt_between_read_update_and_write(label: str, issued: bool, tmp_path: Path) -> None:
    """Every segment is as before the step or as after it, on the disk as in its slot, and no further step is run."""
    engine, ids = with_disk(SETUPS[0], "elixir", "half", tmp_path), tokens(3, 1)
    whole = start(RESIDENT, SETUPS[0].build(), settings())
    expected: list[list[dict[str, torch.Tensor]]] = []  # after each step master and both moments, by name
    for batch in ids[:2]:
        one_step(whole, batch)
        moments = adam_states(whole)
        masters = {name: value.reshape(-1) for name, value in parameters_of(whole).items()}
        first, second = ({name: getattr(mine, role) for name, mine in moments.items()} for role in STATES[1:])
        expected.append([masters, first, second])
    whole.close()
    one_step(engine, ids[0])
    ours = managed(engine)
    transfers, kernel = ours.device.transfers, ours.device.host_kernel
    issue, leave, update, seen = transfers.issue, transfers._leave, kernel.update, list[str]()

    def slow(master: torch.Tensor, *moments: torch.Tensor, **given: Any) -> None:
        """So that a write that does not wait for it would write a mixture."""
        master.neg_()
        time.sleep(0.01)
        master.neg_()
        update(master, *moments, **given)

    def interrupt(found: str) -> None:
        seen.append(found)
        if sum(each.startswith(label) for each in seen) == 3 and found.startswith(label):
            raise KeyboardInterrupt

    def issued_only(operation: LaneOperation, work: Any, **more: Any) -> Any:
        if not issued:
            interrupt(operation.label)
        return issue(operation, work, **more)

    def left_only(ticket: Any, what: LaneOperation | str, *more: Any) -> None:
        if issued and not isinstance(what, str):
            interrupt(what.label)
        leave(ticket, what, *more)

    kernel.update, transfers.issue, transfers._leave = slow, issued_only, left_only
    with pytest.raises(KeyboardInterrupt):
        one_step(engine, ids[1])
    kernel.update, transfers.issue, transfers._leave = update, issue, leave
    engine.drain()
    check_segments(ours)
    names = [described.name for described in engine.index.parameters]
    for stored in ours.store.segments:
        mine = [ours.store.part(stored, part) for part in STATES]
        places = stored.segment.placements
        alike = [
            all(torch.equal(mine[i][p.here], want[i][names[p.parameter]][p.piece]) for i in range(len(STATES)) for p in places)
            for want in expected
        ]
        assert any(alike), f"segment {stored.segment.index} is a mixture"
    with pytest.raises(RuntimeError, match="parameters belong to two steps"):
        one_step(engine, ids[2])
    engine.close()


def test_reads_and_writes_may_be_taken_in_parts(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def in_parts(move: Callable[..., int]) -> Callable[..., int]:
        return lambda file, data, offset: move(file, [data[0][:4096]], offset)

    for name in ("preadv", "pwritev"):
        monkeypatch.setattr(disk_module.os, name, in_parts(getattr(os, name)))
    assert_equal(reference(SETUPS[0]), train(with_disk(SETUPS[0], "angel-ptm", "tight", tmp_path), tokens(3, 1)))


@pytest.mark.parametrize("refused", ["open", "preadv"])
def test_a_file_system_without_direct_io(refused: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some take the flag and then read nothing."""
    plain_call = getattr(os, refused)

    def refuses(what: Any, flags: Any, *more: Any, **named: Any) -> Any:
        asked = flags if refused == "open" else fcntl.fcntl(what, fcntl.F_GETFL)
        if asked & os.O_DIRECT:
            raise OSError(errno.EINVAL, os.strerror(errno.EINVAL))
        return plain_call(what, flags, *more, **named)

    monkeypatch.setattr(disk_module.os, refused, refuses)
    engine = with_disk(SETUPS[0], "angel-ptm", "tight", tmp_path)
    assert engine.memory().disk_direct is False
    assert_equal(reference(SETUPS[0]), train(engine, tokens(3, 1)))


@pytest.mark.parametrize("case", ["nothing there", "a file", "full", "read-only"])
def test_a_folder_that_will_not_do_is_refused(case: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    folder, said = tmp_path / "disk", "`disk`"
    if case == "a file":
        folder.write_text("x")
    elif case != "nothing there":
        folder.mkdir()
    if case == "full":
        plain_call, calls = os.posix_fallocate, list[int]()

        def fallocate(file: int, *given: int) -> None:
            calls.append(file)
            if len(calls) == len(STATES):
                raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
            plain_call(file, *given)

        monkeypatch.setattr(disk_module.os, "posix_fallocate", fallocate)
        said = "are free: make room there"
    elif case == "read-only":
        plain_open = os.open

        def refuses(name: Any, flags: int, *more: Any, **named: Any) -> int:
            if flags & os.O_CREAT:
                raise PermissionError(errno.EACCES, os.strerror(errno.EACCES))
            return plain_open(name, flags, *more, **named)

        monkeypatch.setattr(disk_module.os, "open", refuses)
        said = "can be written to"
    host_memory, opened = short_of_host(SETUPS[0], "angel-ptm", "tight"), os.listdir("/proc/self/fd")
    with pytest.raises(BudgetError, match=said) as refused:
        with_disk(SETUPS[0], "angel-ptm", "tight", folder, host_memory=host_memory)
    assert os.listdir("/proc/self/fd") == opened
    assert refused.value.tier == "disk"
    assert case in ("nothing there", "a file") or os.listdir(folder) == []


def test_a_disk_that_is_too_small_is_used_for_what_it_holds(tmp_path: Path) -> None:
    """The rest stays on the device, if that has room for it."""
    setup = SETUPS[0]
    engine = with_disk(setup, "angel-ptm", "above", tmp_path, disk_memory=1 << 20)
    layout = managed(engine).layout
    assert 0 < disk_bytes(layout) <= 1 << 20
    assert any(not b.movable for b in layout.bundles)
    assert_equal(reference(setup), train(engine, tokens(3, 1)))
    with pytest.raises(BudgetError, match="or `disk_memory`"):
        with_disk(setup, "angel-ptm", "tight", tmp_path, disk_memory=1 << 20)


def test_settings_that_make_no_sense() -> None:
    with pytest.raises(ValueError, match="name it with disk"):
        Settings(disk_memory=5)
    with pytest.raises(ValueError, match="disk_memory is -1"):
        Settings(disk="x", disk_memory=-1)


def test_buffers_are_of_the_largest_segment(tmp_path: Path) -> None:
    engine = with_disk(SETUPS[0], "angel-ptm", "tight", tmp_path)
    ours = managed(engine)
    longest = max(map(part_bytes, segments_on_disk(ours.layout)))
    disk = ours.store.disk
    assert disk is not None
    assert [len(buffer.parts) for buffer in disk.buffers] == [len(STATES)] * BUFFERS
    assert all(part.nbytes == longest and part.data_ptr() % 4096 == 0 for buffer in disk.buffers for part in buffer.parts)
    engine.close()
    assert disk.account.live == 0


def on_device_though_home_is_the_disk(engine: Any) -> list[int]:
    """After steps under a plan that has room for them."""
    for batch in tokens(2, 1):
        one_step(engine, batch)
    engine.drain()
    stored = managed(engine).store.segments
    return [s.segment.index for s in stored if s.tier is Tier.DEVICE and s.at_home is not None and s.at_home.tier is Tier.DISK]


@pytest.mark.parametrize("way", ["host", "device"])
def test_a_state_that_cannot_move_stays_where_it_is(way: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    engine = with_disk(SETUPS[1], "angel-ptm", "above", tmp_path, device_memory=1 << 30, accumulate=1)
    store, tiers = managed(engine).store, managed(engine).tiers
    stored = store.segments[on_device_though_home_is_the_disk(engine)[0]]
    if way == "device":
        tiers.to_home(stored.segment.index)
        engine.drain()
    before = stored.tier, store.host.live, store.device.account.pool

    def fails(*_: Any) -> int:
        raise OSError(errno.EIO, os.strerror(errno.EIO))

    monkeypatch.setattr(disk_module.os, "pwritev" if way == "host" else "preadv", fails)
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):
        (tiers.to_home if way == "host" else tiers.to_device)(stored.segment.index)
    monkeypatch.undo()
    assert (stored.tier, store.host.live, store.device.account.pool) == before
    with pytest.raises(OSError, match=os.strerror(errno.EIO)):  # which the engine itself has told nobody
        engine.close()


def test_copies_from_and_for_the_disk_are_no_activations(tmp_path: Path) -> None:
    """Where the device is full, room would be made for them by what is under way already."""
    engine = with_disk(SETUPS[0], "angel-ptm", "above", tmp_path, device_memory=1 << 30)
    ours = managed(engine)
    index, device = on_device_though_home_is_the_disk(engine)[0], ours.device
    (stretch, *_) = ours.bundles[ours.layout.bundle_of_segment[index]].stretches
    before = device.account.other
    device.account.start_interval()
    with device.metered():
        ours.tiers.to_home(index)
        ours.residency._master(stretch)
        ours.tiers.to_device(index)
    device.drain()
    assert device.account.start_interval() <= before
    engine.close()


@pytest.mark.parametrize(("label", "nth"), [("read-state", 2), ("update bundle", 1), ("write-state", 1)])
def test_an_interrupt_among_a_bundles_updates_during_backward(label: str, nth: int, tmp_path: Path) -> None:
    """One bundle is several updates, so that even the first may break off in the middle of it."""
    setup, system = SETUPS[0], angel_ptm()
    host = short_of_host(setup, "angel-ptm", "tight") // 2  # all states are on the disk
    asked = settings(device_memory=budget_of(setup, "tight"), host_memory=host, disk=tmp_path)
    engine = start(system, setup.build(), asked, system.Options(nonfinite="stop"))
    transfers, seen, ids = managed(engine).device.transfers, [], tokens(2, 1)
    issue = transfers.issue
    layout = managed(engine).layout
    assert layout.on_disk == {b.index for b in layout.bundles} and max(len(b.segments) for b in layout.bundles) > 2

    def interrupted(operation: LaneOperation, work: Callable[[], None], **more: Any) -> Any:
        if operation.label.startswith(label):
            seen.append(operation.label)
            if len(seen) == nth:
                raise KeyboardInterrupt
        return issue(operation, work, **more)

    transfers.issue = interrupted
    with pytest.raises(KeyboardInterrupt):
        one_step(engine, ids[0])
    transfers.issue = issue
    with pytest.raises(RuntimeError, match="parameters belong to two steps"):
        one_step(engine, ids[1])
    engine.close()
