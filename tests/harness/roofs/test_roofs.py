"""The measurements at sizes of a moment, the host in the place of the devices: what is counted, and that all of it runs."""

from __future__ import annotations

import contextlib
import errno
import os
import threading
import time
from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.roofs import clock, device, host
from harness.roofs import contention as roofs
from harness.roofs.clock import median_s, nothing
from harness.roofs.contention import LEAST_TURNS, Moved, Moving, side_by_side
from harness.roofs.device import BOTH, Devices, DeviceSizes, HostLink, copy_rate
from harness.roofs.disk import DiskSizes, disk
from harness.roofs.host import AdamPass, HostSizes, thread_counts
from harness.spec import BadInputError
from systems.adam.cpu import cpu_kernel
from systems.planning.hardware import Flow, sets_of_flows

HOST_SIZES = HostSizes(
    memory=1 << 16, adam_parameters=1 << 12, large_updates=2, small_updates=8, rounds=2, rebinds=4, over_s=0.0,
)  # fmt: skip
DISK_SIZES = DiskSizes(total=1 << 16, blocks=(1 << 12, 1 << 13), threads=(1, 3))
SIZES = DeviceSizes(
    copies=(1 << 10, 1 << 14), issued=1 << 14, memory=1 << 16, pinned=1 << 16, matmul=16, width=32, tokens=16, sequence=8,
    heads=(8, 16), units=3, rounds=1, over_s=0.0,
)  # fmt: skip


def host_as_devices(count: int) -> Devices:
    """Queues do nothing: what is queued is done."""
    return Devices(
        devices=(torch.device("cpu"),) * count,
        pin=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8),
        stream=lambda device: object(),
        on=lambda queue: contextlib.nullcontext(),
        mark=lambda queue: nothing,
        wait=lambda: None,
        peers=count > 1,
    )


def test_the_median_leaves_the_first_call_out(monkeypatch: pytest.MonkeyPatch) -> None:
    now, durations = 0.0, iter([100.0, 3.0, 1.0, 2.0, 50.0])

    def work() -> None:
        nonlocal now
        now += next(durations)

    waits: list[float] = []
    monkeypatch.setattr(time, "perf_counter", lambda: now)
    assert median_s(work, wait=lambda: waits.append(now), over_s=4.0) == 2.0
    assert len(waits) == 1 + clock.LEAST_CALLS


@pytest.mark.parametrize(("cores", "counts"), [(1, [1]), (2, [1, 2]), (3, [1, 2, 3]), (16, [1, 2, 4, 8, 14, 16])])
def test_threads_to_measure(cores: int, counts: list[int]) -> None:
    assert thread_counts(cores) == counts


def test_host_memory_and_adam_count_what_is_read_and_written(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(host, "median_s", lambda work, **_: (work(), 2.0)[1])
    assert host.dram(HOST_SIZES) == {"copy": 1 << 16, "add_in_place": 1 << 16}
    assert host.adam_by_threads(HOST_SIZES, [1, 2]) == {1: 14 << 12, 2: 14 << 12}
    assert host.rebind_s(torch.device("cpu"), HOST_SIZES) == 2.0 / 8


@pytest.mark.parametrize("pieces", [1, 2, 5])
def test_a_pass_is_the_project_s_adam_of_every_parameter_once(pieces: int) -> None:
    """In pieces as in one, whichever of the two threads takes them."""
    one = AdamPass(1000, pieces)
    assert one.nbytes == 28 * 1000 and one.pieces == pieces
    one.by(cpu_kernel())()
    tasks = [task for share in one._shares for task in share]
    assert len(tasks) == pieces and sum(task.master.numel() for task in tasks) == 1000
    for task in tasks:
        assert task.out is task.gradient
        assert torch.equal(task.master, tasks[0].master[:1].expand_as(task.master)) and bool((task.master < 0).all())
        assert bool((task.exp_avg > 0).all())


def test_what_an_update_takes_beside_its_bytes(monkeypatch: pytest.MonkeyPatch) -> None:
    """Passes in 2 and in 8 updates take 5 s and 6.5: each of the six more takes a quarter of a second."""
    times = iter([5.0, 6.5] * HOST_SIZES.rounds)
    monkeypatch.setattr(host, "median_s", lambda work, **_: (work(), next(times))[1])
    assert host.update_s(HOST_SIZES, 2) == 0.25
    monkeypatch.setattr(host, "median_s", lambda work, **_: 1.0)
    assert host.update_s(HOST_SIZES, 2) == 0.0


def test_disk(tmp_path: Path) -> None:
    found = disk(tmp_path, DISK_SIZES, flags=0)
    assert {(each.block, each.threads) for each in found.tried} == {(1 << 12, 1), (1 << 12, 3), (1 << 13, 1), (1 << 13, 3)}
    assert found.free > 0
    assert all(0 < each.read <= found.read.read for each in found.tried)
    assert all(0 < each.write <= found.write.write for each in found.tried)
    assert all(0 < each.both <= found.both.both for each in found.tried)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize(
    ("sizes", "failure", "said"),
    [
        (DiskSizes(total=1 << 62), None, "are needed: make room"),
        (DISK_SIZES, OSError(errno.EINVAL, "Invalid argument"), "takes no file opened past the page cache (Invalid argument)"),
    ],
)
def test_a_disk_that_cannot_be_measured(
    sizes: DiskSizes, failure: OSError | None, said: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    if failure is not None:
        given = os.open

        def opened(name: Any, flags: int, *mode: Any, **more: Any) -> int:
            if flags & os.O_DIRECT:
                raise failure
            return given(name, flags, *mode, **more)

        monkeypatch.setattr(os, "open", opened)
    with pytest.raises(BadInputError) as raised:
        disk(tmp_path, sizes)
    assert said in str(raised.value)
    assert not list(tmp_path.iterdir())


@pytest.mark.parametrize("devices", [1, 2])
def test_copies_count_payload_of_all_links_and_directions(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    kind = host_as_devices(devices)
    monkeypatch.setattr(device, "median_s", lambda work, **_: (work(), 2.0)[1])
    found = device.copies(kind, SIZES)
    size, half = 1 << 14, (1 << 14) / 2
    assert found.by_size == dict.fromkeys(BOTH, ((1 << 10, half), (size, half)))
    assert found.pageable == {"h2d": half, "d2h": half}
    assert (found.both_ways, found.one_way_all, found.both_ways_all) == (2 * half, devices * half, 2 * devices * half)


def test_a_link_copies_from_one_end_to_the_other() -> None:
    kind = host_as_devices(1)
    link = HostLink(kind, kind.first, 64, kind.pin)
    for direction in BOTH:
        target, source = link._ends[direction]
        source.fill_(7)
        link.issue(direction, 32, 1)
        assert target.tolist() == [7] * 32 + [1] * 32


def test_flows_go_on_beside_each_other_until_all_have_been_seen() -> None:
    """A slow one has its turns, and the fast one's rate is of the same time."""
    seen: dict[Flow, set[str]] = {Flow.CPU_ADAM: set(), Flow.H2D: set()}

    def moving(flow: Flow, turn_s: float) -> Moving:
        def begin() -> Callable[[], None]:
            seen[flow].add(threading.current_thread().name)
            return partial(time.sleep, turn_s)

        return Moving(1000, begin)

    windows = side_by_side({Flow.CPU_ADAM: moving(Flow.CPU_ADAM, 0.01), Flow.H2D: moving(Flow.H2D, 0.001)}, over_s=0.0)
    turns = {flow: window.nbytes // 1000 for flow, window in windows.items()}
    assert turns[Flow.CPU_ADAM] >= LEAST_TURNS and turns[Flow.H2D] >= LEAST_TURNS
    assert windows[Flow.CPU_ADAM].seconds >= 0.01 * turns[Flow.CPU_ADAM]
    assert windows[Flow.H2D].seconds >= 0.001 * turns[Flow.H2D]
    assert all(len(names) == 1 for names in seen.values()) and not set.intersection(*seen.values())


def test_a_flow_that_fails_ends_all_of_them() -> None:
    def fails() -> Callable[[], None]:
        raise RuntimeError("no more")

    with pytest.raises(RuntimeError, match="no more"):
        side_by_side({Flow.CPU_ADAM: Moving(1, lambda: partial(time.sleep, 0.001)), Flow.D2H: Moving(1, fails)}, over_s=60.0)


@pytest.mark.parametrize("devices", [1, 2])
def test_every_set_of_flows_is_measured_in_rounds(devices: int, monkeypatch: pytest.MonkeyPatch) -> None:
    """Rates are all bytes over all seconds: rounds of 1 s and 3 s with as many bytes count as 2 in 4."""
    asked: list[tuple[Flow, ...]] = []

    def window(flows: Mapping[Flow, Moving], over_s: float) -> dict[Flow, Moved]:
        asked.append(tuple(flows))
        for moving in flows.values():
            moving.begin()()
        return {flow: Moved(moving.nbytes, 1.0 if len(asked) <= 7 else 3.0) for flow, moving in flows.items()}

    monkeypatch.setattr(roofs, "side_by_side", window)
    found = roofs.contention(host_as_devices(devices), Moving(1000, lambda: nothing), replace(SIZES, rounds=2))
    assert asked == 2 * sets_of_flows()
    assert [tuple(rates) for rates in found] == sets_of_flows()
    copied = devices * (1 << 14) / 2
    assert found[-1] == {Flow.CPU_ADAM: 500.0, Flow.H2D: copied, Flow.D2H: copied}


def test_rates_of_compute_are_operations_over_time(monkeypatch: pytest.MonkeyPatch) -> None:
    kind = host_as_devices(2)
    monkeypatch.setattr(device, "median_s", lambda work, **_: (work(), 2.0)[1])
    assert [device.matmul_rate(kind, dtype, SIZES) for dtype in device.DTYPES.values()] == [16**3] * 3
    assert device.product_rate(kind, SIZES) == 3 * 16 * 24 * 32**2 / 2
    assert device.attention_rate(kind, 16, SIZES) == 3.5 * 16 * 2 * 8 * 32 / 2
    assert device.other_rate(kind, SIZES) == 7 * 16 * 32 * 2 / 2
    assert device.kernel_launch_s(kind, SIZES) == 2.0 / device.LAUNCHES
    assert device.memory_rate(kind, SIZES) == 1 << 16
    assert device.peer_rate(kind, SIZES) == 1 << 15
    assert device.peer_rate(host_as_devices(1), SIZES) is None


def test_the_rest_is_measured() -> None:
    kind = host_as_devices(1)
    assert set(device.pinning(kind, SIZES)) == {"pinned_tensor", "map_and_register"}
    assert copy_rate(kind, [HostLink(kind, kind.first, 1 << 14, kind.pin)], BOTH, 1 << 10, SIZES) > 0
    assert 0 < device.unit_event_s(kind, SIZES) < 1
