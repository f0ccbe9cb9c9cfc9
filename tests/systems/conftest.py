"""One thread: models here are so small that a second one only waits, for long when the machine is busy."""

from __future__ import annotations

import pytest
import torch

from systems.adam.cpu import cpu_kernel
from systems.device import device


@pytest.fixture(autouse=True)
def _one_thread(_fixed_threads: None, monkeypatch: pytest.MonkeyPatch) -> None:
    """`_fixed_threads` sets torch's number back; the Adam kernels give the same bits with any number."""
    torch.set_num_threads(1)
    monkeypatch.setattr(device, "cpu_kernel", lambda threads: cpu_kernel(threads=1))
