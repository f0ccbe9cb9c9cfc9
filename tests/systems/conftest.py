"""One thread: models here are so small that a second one only waits, for long when the machine is busy.

And a summary of random runs (test_fuzz.py), where some were asked for.
"""

from __future__ import annotations

import re
from collections import Counter
from typing import Any

import pytest
import torch

from systems.adam.cpu import cpu_kernel
from systems.device import device


@pytest.fixture(autouse=True)
def _one_thread(_fixed_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`_fixed_threads` sets torch's number back; the Adam kernels give the same bits with any number."""
    torch.set_num_threads(1)
    monkeypatch.setattr(device, "cpu_kernel", lambda threads: cpu_kernel(threads=1))


def pytest_terminal_summary(terminalreporter: Any, config: pytest.Config) -> None:
    if config.getoption("draws") is None:
        return
    reports = [r for kind in ("passed", "failed") for r in terminalreporter.stats.get(kind, []) if r.when != "setup"]
    done = [report for report in reports if "test_a_random_loop" in report.nodeid]
    told = [dict(report.user_properties) for report in done]
    strategies = Counter(each["strategy"] for each in told if "strategy" in each)
    features = Counter(feature for each in told for feature in each.get("features", ()))
    failed = [found[1] for report in done if report.failed and (found := re.search(r"\[(\d+)\]", report.nodeid))]
    terminalreporter.section("random runs")
    for what, counted in ((f"{len(done)} draws", strategies), ("with", features)):
        terminalreporter.line(f"{what}: " + ", ".join(f"{name} {count}" for name, count in sorted(counted.items())))
    terminalreporter.line(f"failed: {len(failed)}")
    for seed in failed:
        terminalreporter.line(f"  seed {seed}: make fuzz SEED={seed} DRAWS=1")
