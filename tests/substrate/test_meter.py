"""Meters: what they count, and what they are told not to."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

from systems.device.memory.account import Account
from systems.device.meter import ActivationMeter, AllocatorMeter
from systems.device.watch.events import EventLog
from systems.machine.uncounted import uncounted
from systems.planning.plan import Tier


def test_an_exemption_ends_with_its_storage() -> None:
    """Another storage may lie at its address, and its bytes count."""
    account = Account(Tier.DEVICE, 1 << 20, EventLog(keep=False))
    meter = ActivationMeter(account, lambda nbytes: None)
    kept, brief = torch.zeros(64), torch.zeros(64)
    for tensor in (kept, brief):
        meter.exempt(tensor.untyped_storage())
    del brief, tensor
    with meter:
        made = [torch.ones(64) for _ in range(8)]
        kept.add_(1)
    assert account.live == sum(each.nbytes for each in made)


def test_what_is_made_uncounted_is_no_activation() -> None:
    account = Account(Tier.DEVICE, 1 << 20, EventLog(keep=False))
    with ActivationMeter(account, lambda nbytes: None):
        with uncounted():
            aside = torch.ones(64)
        assert account.live == 0
        counted = aside + 1
        assert account.live == counted.nbytes


class StubAllocator:
    """torch.cuda's counts: bytes now and their peaks, which a reset puts back to now."""

    def __init__(self) -> None:
        self.now = self.peak = self.reserved = 0
        self.peak_reserved = 0

    def use(self, nbytes: int, *, reserved: int) -> None:
        self.now, self.peak = nbytes, max(self.peak, nbytes)
        self.reserved, self.peak_reserved = reserved, max(self.peak_reserved, reserved)

    def reset(self, device: torch.device) -> None:
        self.peak, self.peak_reserved = self.now, self.reserved


def test_an_allocators_peaks_outlive_its_resets(monkeypatch: pytest.MonkeyPatch) -> None:
    """The pool's granules are no activations, and count by how many there were when the peak was."""
    allocator, pool = StubAllocator(), SimpleNamespace(reserved_bytes=0)
    monkeypatch.setattr(torch.cuda, "max_memory_allocated", lambda device: allocator.peak)
    monkeypatch.setattr(torch.cuda, "max_memory_reserved", lambda device: allocator.peak_reserved)
    monkeypatch.setattr(torch.cuda, "reset_peak_memory_stats", allocator.reset)
    given: Any = pool
    meter = AllocatorMeter(torch.device("cuda", 0), given)
    allocator.use(50, reserved=80)
    allocator.use(10, reserved=20)
    meter.take_in_peak()  # the pool is about to grow
    pool.reserved_bytes = 100
    allocator.use(130, reserved=140)
    meter.hand_over(7)
    assert meter.start_interval() == (50, 57)
    allocator.use(110, reserved=120)
    assert meter.start_interval() == (30, 30), "what lives when an interval begins counts in it"
    assert meter.start_interval() == (10, 10)
    assert meter.peak_bytes() == 140
