"""The meter of activations: what it counts, and what it is told not to."""

from __future__ import annotations

import torch

from systems.device.memory.account import Account
from systems.device.meter import ActivationMeter
from systems.device.watch.events import EventLog
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
