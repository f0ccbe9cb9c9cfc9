"""The scale of a loss: how it moves from step to step, and the backward pass under it.

It is for the engine's own gradients, and goes no further.

A loss may reach leaves that are not the engine's: inputs that want a gradient, modules beside the engine. What comes to them is
divided by the scale, a power of two. Hooks and retained gradients of what is no leaf see it scaled, as do leaves that only a
reentrant checkpoint reaches. Without a scale nothing is looked for; with one it takes about a microsecond a node of the graph.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack

import numpy as np
import torch

from systems.checkpoint import LoopState
from systems.settings import StepOutcome

FP16_FIRST_SCALE = 2.0**16
FP16_GROWTH_STEPS = 2000


def after(loop: LoopState, outcome: StepOutcome, *, moves: bool) -> LoopState:
    """Where the run stands once this step is done: the scale is halved by a skipped step, and doubled after FP16_GROWTH_STEPS
    good ones.

    moves: False where it is constant.
    """
    scale, good, skipped = loop.loss_scale, loop.good_steps, outcome.skipped
    if moves:
        scale, good = (max(scale / 2, 1.0), 0) if skipped else (scale, good + 1)
        if good == FP16_GROWTH_STEPS:
            scale, good = scale * 2, 0
    return LoopState(loop.steps + 1, loop.skipped_steps + skipped, scale, good, loop.skips_in_a_row + 1 if skipped else 0)


def multiplier(outcome: StepOutcome) -> float:
    """What a scaled gradient is multiplied by: loss scale and clipping in one."""
    return float(np.float32(outcome.clip_factor / outcome.loss_scale))


def backward(loss: torch.Tensor, scale: float, parameters: Collection[torch.Tensor]) -> None:
    """parameters: the engine's."""
    if scale == 1.0:
        loss.backward()
        return
    with ExitStack() as hooks:
        for leaf in _leaves(loss, {id(p) for p in parameters}):
            hooks.callback(leaf.register_hook(lambda gradient: gradient / scale).remove)
        (loss * scale).backward()


def _leaves(loss: torch.Tensor, own: Collection[int]) -> list[torch.Tensor]:
    """That the loss depends on, but for those whose id is in `own`."""
    if loss.grad_fn is None:
        return []
    found, seen, ahead = [], {loss.grad_fn}, [loss.grad_fn]
    while ahead:
        node = ahead.pop()
        leaf = getattr(node, "variable", None)
        if isinstance(leaf, torch.Tensor) and leaf.is_leaf and id(leaf) not in own:
            found.append(leaf)
        for before, _ in node.next_functions:
            if before is not None and before not in seen:
                seen.add(before)
                ahead.append(before)
    return found
