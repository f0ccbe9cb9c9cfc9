"""Default budgets: what a machine has, less what no account counts."""

from __future__ import annotations

from types import SimpleNamespace

import pytest
import torch

from systems.machine.budgets import CONTEXT_BYTES, device_budget
from tests.systems.running import settings

GIB = 1 << 30


@pytest.mark.parametrize(("total", "expected"), [(150109880320, 150109880320 - CONTEXT_BYTES), (8 * GIB, 8 * GIB - GIB // 4)])
def test_a_gpu_s_default_budget_leaves_its_context_out(total: int, expected: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 0)
    monkeypatch.setattr(torch.cuda, "get_device_properties", lambda device: SimpleNamespace(total_memory=total))
    assert device_budget(settings(device="cuda", device_memory=None)) == expected
    assert device_budget(settings(device="cuda", device_memory=total)) == total, "what is asked for is taken"
