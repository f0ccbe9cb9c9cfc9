"""Several threads at once, and forked children, call the CPU kernels: one team works, nothing is lost, no bit changes."""

from __future__ import annotations

import os
import signal
import threading
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import pytest
import torch

from systems.adam.cpu import cpu_kernel
from systems.adam.kernel import AdamRange

NUMEL = 150_001  # more blocks than stay on the calling thread
RANGE = AdamRange(offset=0, numel=NUMEL, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True, step=1)
STEPS = 20


def state(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    master, exp_avg, exp_avg_sq, gradient = torch.randn(4, NUMEL, generator=generator)
    return {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq.square(), "gradient": gradient}


def train(state: dict[str, Any], threads: int, sums: list[float | torch.Tensor]) -> None:
    kernel = cpu_kernel(threads=threads)
    for step in range(1, STEPS + 1):
        kernel.update(**state, out=None, ranges=[replace(RANGE, step=step)], factor=0.5)
        sums.append(kernel.sum_squares_all([state["master"]])[0])


def bits(states: Sequence[dict[str, torch.Tensor]]) -> list[bytes]:
    return [tensor.numpy().tobytes() for each in states for tensor in each.values()]


def test_threads_that_call_at_once_get_what_each_gets_alone() -> None:
    """Teams of several sizes, and work that its caller does itself."""
    sizes = (2, 3, 2, 4, 1, 2)
    alone, together = ([state(seed) for seed in range(len(sizes))] for _ in range(2))
    sums_alone: list[list[float | torch.Tensor]] = [[] for _ in sizes]
    sums_together: list[list[float | torch.Tensor]] = [[] for _ in sizes]
    for each, sums in zip(alone, sums_alone, strict=True):
        train(each, 1, sums)
    callers = [threading.Thread(target=train, args=args) for args in zip(together, sizes, sums_together, strict=True)]
    for caller in callers:
        caller.start()
    for caller in callers:
        caller.join()
    assert bits(together) == bits(alone) and sums_together == sums_alone


@pytest.mark.filterwarnings("ignore:.*fork:DeprecationWarning")
def test_a_forked_child_has_a_team_of_its_own() -> None:
    """Also one that is forked while the parent's is at work."""
    expected, busy, in_child = state(0), state(1), state(0)
    train(expected, 2, [])
    right = bits([expected])
    other = threading.Thread(target=train, args=(busy, 2, []))
    other.start()
    child = os.fork()
    if child == 0:
        signal.signal(signal.SIGALRM, signal.SIG_DFL)
        signal.alarm(60)  # the end of a child that waits for what it has not
        failed = True
        try:
            train(in_child, 2, [])
            failed = bits([in_child]) != right
        finally:
            os._exit(failed)
    other.join()
    _, status = os.waitpid(child, 0)
    assert status == 0
    train(in_child, 2, [])  # the parent's team still works
    assert bits([in_child]) == right
