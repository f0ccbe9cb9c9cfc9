"""The closed list of warnings: each is raised by what it is about, and by nothing else."""

from __future__ import annotations

from typing import Any

import pytest

from harness.doubts import CLOSED_LIST, Evidence, judge
from harness.nvml import PcieLink, Watch

STEADY = [1.0] * 10


def codes(**seen: Any) -> list[str]:
    given: dict[str, Any] = {"timed_step_s": STEADY, "threads": 2, "cores": 2}
    return [doubt.code for doubt in judge(Evidence(**(given | seen)))]


def test_a_good_run_raises_none() -> None:
    link = PcieLink(generation=5, generation_max=5, width=16, width_max=16)
    assert codes(swap_bytes=0, other_processes=0, throttled_by=[], link=link, mfu=0.5) == []
    assert codes() == []


@pytest.mark.parametrize(
    ("code", "seen"),
    [
        ("first_timed_step_slow", {"timed_step_s": [1.3, *STEADY]}),
        ("step_time_spread", {"timed_step_s": [*STEADY, 1.06]}),
        ("short_timed_region", {"timed_step_s": [1.0] * 9}),
        ("steps_without_plan", {"steps_without_plan": 1}),
        ("other_processes_on_device", {"other_processes": 1}),
        ("clocks_throttled", {"throttled_by": ["power cap"]}),
        ("pcie_link_below_maximum", {"link": PcieLink(generation=1, generation_max=5)}),
        ("pcie_link_below_maximum", {"link": PcieLink(generation=5, generation_max=5, width=8, width_max=16)}),
        ("swap_in_use", {"swap_bytes": 4096}),
        ("page_cache", {"disk_direct": False}),
        ("fewer_threads_than_cores", {"threads": 1}),
        ("more_threads_than_cores", {"threads": 3}),
        ("utilisation_above_peak", {"mfu": 1.01}),
    ],
)
def test_each_doubt(code: str, seen: dict[str, Any]) -> None:
    assert codes(**seen) == [code]


def test_every_doubt_of_the_list_is_tested() -> None:
    (mark,) = test_each_doubt.pytestmark
    assert {case[0] for case in mark.args[1]} == set(CLOSED_LIST)


def test_few_long_steps_are_no_doubt() -> None:
    assert codes(timed_step_s=[21.0] * 3) == []
    assert codes(timed_step_s=[]) == []


class FakeDevice:
    """Tells one look after another."""

    def __init__(self, looks: list[tuple[list[str], int, PcieLink]]) -> None:
        self._looks, self._now = iter(looks), looks[0]

    def throttled_by(self) -> list[str]:
        self._now = next(self._looks)
        return self._now[0]

    def other_processes(self) -> int:
        return self._now[1]

    def link(self) -> PcieLink:
        return self._now[2]


def test_a_watch_keeps_the_worst_of_clocks_and_the_best_of_the_link() -> None:
    idle, busy = PcieLink(generation=1, width=16), PcieLink(generation=5, width=16)
    watch = Watch(FakeDevice([(["power cap"], 0, busy), ([], 2, idle)]))  # type: ignore[arg-type]
    watch.look()
    watch.look()
    assert (watch.throttled_by, watch.other_processes, watch.best_link) == ({"power cap"}, 2, busy)
    Watch(None).look()
