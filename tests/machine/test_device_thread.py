"""Threads of an engine are on its process's device, and its updates take the process's share of the host's cores."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest
import torch

from systems.device import make
from systems.device.cuda import CudaDevice
from systems.device.watch.events import EventLog
from systems.machine.device_thread import DeviceThread
from tests.systems.running import settings


@pytest.mark.parametrize(("begun", "expected"), [(True, [3]), (False, [])])
def test_a_thread_is_on_the_device_of_who_makes_it(begun: bool, expected: list[int], monkeypatch: pytest.MonkeyPatch) -> None:
    chosen: list[int] = []
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: begun)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 3)
    monkeypatch.setattr(torch.cuda, "set_device", chosen.append)
    thread = DeviceThread(lambda: chosen.append(-1), "a thread")
    thread.start()
    thread.join()
    assert chosen == [*expected, -1] and thread.daemon


def test_ranks_of_a_host_share_its_cores(monkeypatch: pytest.MonkeyPatch) -> None:
    """Else each takes all of them, and what launches kernels has none."""
    made: list[Any] = []
    monkeypatch.setattr(make, "CudaDevice", lambda budget, log, cores: made.append(cores))
    monkeypatch.setattr(make, "cores_each", lambda ranks: 32 // ranks)
    for ranks in (1, 2):
        make.make_device(replace(settings(), device="cuda", ranks=ranks), 1, EventLog(keep=False))
    device: Any = CudaDevice.__new__(CudaDevice)
    device._cores = made[1]
    assert made == [32, 16] and device._update_threads() == 14
