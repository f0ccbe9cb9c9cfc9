"""The backward pass of a scaled loss: the scale is for the engine's own gradients, and goes no further.

A loss may reach leaves that are not the engine's: inputs that want a gradient, modules beside the engine. What comes to them is
divided by the scale, a power of two. Hooks and retained gradients of what is no leaf see it scaled, as do leaves that only a
reentrant checkpoint reaches. Without a scale nothing is looked for; with one it takes about a microsecond a node of the graph.
"""

from __future__ import annotations

from collections.abc import Collection
from contextlib import ExitStack

import torch


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
