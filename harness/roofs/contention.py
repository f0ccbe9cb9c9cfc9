"""What CPU Adam and copies reach beside each other: each goes on by itself, and all are looked at over the same time.

Whatever the machine's neighbours do in the meantime, they do to every set of flows: sets are taken in turn, several times, and
a rate is all bytes over all the time, as a run of many steps has it. A median would leave out what is slow now and then.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass

from harness.roofs.device import Devices, DeviceSizes, Direction, HostLink
from systems.planning.hardware import Flow, sets_of_flows

LEAST_TURNS = 3  # of each flow in a window
LOOK_S = 1e-3  # between two looks at whether a window is over


@dataclass(frozen=True)
class Moving:
    """What a flow does over and over. nbytes: of one turn. begin: start a turn; what it returns waits for the turn's end."""

    nbytes: int
    begin: Callable[[], Callable[[], None]]


@dataclass(frozen=True)
class Moved:
    """What a flow moved from the end of one turn to the end of another."""

    nbytes: int
    seconds: float


def side_by_side(flows: Mapping[Flow, Moving], over_s: float) -> dict[Flow, Moved]:
    """Of each while all of them run, over about `over_s` seconds. The next turn begins before one is over: no queue runs empty.

    Raises what a flow raises.
    """
    ends: dict[Flow, list[float]] = {flow: [] for flow in flows}
    stop = threading.Event()

    def go_on(flow: Flow) -> None:
        over = flows[flow].begin()
        while not stop.is_set():
            following = flows[flow].begin()
            over()
            ends[flow].append(time.perf_counter())
            over = following
        over()

    with ThreadPoolExecutor(len(flows), thread_name_prefix="roof") as pool:
        running = [pool.submit(go_on, flow) for flow in flows]

        def look_until(enough: Callable[[], bool]) -> dict[Flow, int]:
            """Turns of each by then; no flow ends before `stop`, unless it fails."""
            while not enough() and not any(future.done() for future in running):
                time.sleep(LOOK_S)
            return {flow: len(ended) for flow, ended in ends.items()}

        try:
            before = look_until(lambda: all(ends.values()))
            began = time.perf_counter()
            after = look_until(
                lambda: (
                    time.perf_counter() - began >= over_s
                    and all(len(ends[flow]) - before[flow] >= LEAST_TURNS for flow in flows)
                )
            )
        finally:
            stop.set()
        for future in running:
            future.result()
    return {
        flow: Moved((after[flow] - before[flow]) * moving.nbytes, ends[flow][after[flow] - 1] - ends[flow][before[flow] - 1])
        for flow, moving in flows.items()
    }


def contention(kind: Devices, adam: Moving, sizes: DeviceSizes) -> list[dict[Flow, float]]:
    """Bytes a second of each flow, for every set of them: copies are large ones, payload of all devices together."""
    large = sizes.copies[-1]
    links = [HostLink(kind, device, large, kind.pin) for device in kind.devices]
    moving = {Flow.CPU_ADAM: adam, Flow.H2D: _copies(links, "h2d", large, sizes), Flow.D2H: _copies(links, "d2h", large, sizes)}
    seen: dict[tuple[Flow, ...], list[dict[Flow, Moved]]] = {those: [] for those in sets_of_flows()}
    for _ in range(sizes.rounds):
        for those, windows in seen.items():
            windows.append(side_by_side({flow: moving[flow] for flow in those}, sizes.over_s))
    return [{flow: _rate([window[flow] for window in windows]) for flow in those} for those, windows in seen.items()]


def _rate(windows: Sequence[Moved]) -> float:
    return sum(window.nbytes for window in windows) / sum(window.seconds for window in windows)


def _copies(links: Sequence[HostLink], direction: Direction, size: int, sizes: DeviceSizes) -> Moving:
    count = max(sizes.issued // size, 1)

    def begin() -> Callable[[], None]:
        for link in links:
            link.issue(direction, size, count)
        over = [link.mark(direction) for link in links]

        def wait() -> None:
            for one in over:
                one()

        return wait

    return Moving(len(links) * count * size, begin)
