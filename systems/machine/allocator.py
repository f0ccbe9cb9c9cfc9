"""torch's allocator on the current CUDA device, held to a budget."""

from __future__ import annotations

import os

import torch

from systems.errors import BudgetError

SETTINGS = ("PYTORCH_ALLOC_CONF", "PYTORCH_CUDA_ALLOC_CONF")


def limit_device_memory(budget: int) -> torch.device:
    """From here on the allocator reserves at most `budget` bytes; returns the device. Raises BudgetError if it has less.

    Its segments may grow and shrink, so that a hole left by one step's tensors does not turn away another's: near a budget,
    logits that are carved out of a cached block of their size are the usual end of a run that fits. Users who set the
    allocator through the environment keep what they set.
    """
    device = torch.device("cuda", torch.cuda.current_device())
    total = torch.cuda.get_device_properties(device).total_memory
    if budget > total:
        message = f"`device_memory` is {budget} bytes, the device has {total}: lower it"
        raise BudgetError(message, tier="device", need=budget, have=total)
    if not any(os.environ.get(name) for name in SETTINGS):
        torch._C._accelerator_setAllocatorSettings("expandable_segments:True")
    torch.cuda.empty_cache()  # what an engine before this one left cached would count as this one's
    torch.cuda.set_per_process_memory_fraction(budget / total, device)
    torch.cuda.reset_peak_memory_stats(device)
    return device


def lift_limit() -> None:
    torch.cuda.set_per_process_memory_fraction(1.0)
