"""What every test starts from: the same number of threads, so that sums are made in the same order, and little garbage."""

from __future__ import annotations

import gc
import math
import random
import tempfile
from collections.abc import Iterator

import pytest
import torch

from systems.machine.limits import in_memory
from systems.substrate.bundle import states

states.CHECKED = True  # a bundle's states follow each other as they may, in every test

THREADS = 1  # tiny models: a second thread costs more than it brings, and milliseconds a call on a busy machine
TEMPORARY_IN_MEMORY = in_memory(tempfile.gettempdir()) is not None


def pytest_addoption(parser: pytest.Parser) -> None:
    """For tests/systems/test_fuzz.py; here, where pytest looks whatever it is asked to run."""
    group = parser.getgroup("random runs")
    group.addoption("--draws", type=int, help="how many random runs to draw, each from a seed of its own")
    group.addoption("--seed", type=int, default=0, help="of the first of them; the next one has the next seed")


@pytest.hookimpl(tryfirst=True)
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Of a test marked `one_in(n)` so many of its sets of arguments are not slow, drawn by its name: of many tests each
    strategy has some, and a test has the same ones every time."""
    groups: dict[str, list[pytest.Item]] = {}
    for item in items:
        if item.get_closest_marker("one_in") and not item.get_closest_marker("slow"):
            groups.setdefault(item.nodeid.partition("[")[0], []).append(item)
    for name, group in groups.items():
        mark = group[0].get_closest_marker("one_in")
        assert mark is not None
        often = random.Random(name).sample(range(len(group)), math.ceil(len(group) / mark.args[0]))
        for number in set(range(len(group))).difference(often):
            group[number].add_marker(pytest.mark.slow)


def pytest_collection_finish() -> None:
    """The libraries' million objects stay: no garbage collection looks through them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_threads() -> Iterator[None]:
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(THREADS)


@pytest.fixture(autouse=True)
def _temporary_folders_are_on_a_disk(monkeypatch: pytest.MonkeyPatch) -> None:
    """For tests of the disk, on machines that keep temporary files in memory."""
    if TEMPORARY_IN_MEMORY:
        for user in ("systems.machine.budgets", "harness.profile", "systems.baselines.external.deepspeed_config"):
            monkeypatch.setattr(f"{user}.in_memory", lambda folder: None)
