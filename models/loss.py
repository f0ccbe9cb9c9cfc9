"""The loss every system trains on: summed token cross entropy over the global number of label tokens.

Dividing by the global count, not by each micro-batch's own, makes the loss and its gradient independent of how a batch
is cut into ranks and micro-batches. Logits are the largest activation of a small model, so they are never copied to
fp32 as a whole: rows are worked off in slabs, forward and backward, with fp32 arithmetic inside.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from typing import Any

import torch
from torch.autograd.function import BackwardCFunction, once_differentiable
from torch.utils._pytree import tree_leaves

from models.objective import IGNORED, OBJECTIVES
from models.shape import ObjectiveName

_SLAB_ELEMENTS = 1 << 24  # 64 MiB of fp32
_PRODUCTS = frozenset({"MmBackward0", "AddmmBackward0"})
_VIEWS = frozenset({"ViewBackward0", "UnsafeViewBackward0", "ReshapeAliasBackward0", "CloneBackward0"})


def count_labels(batch: Mapping[str, torch.Tensor], *, objective: ObjectiveName = "causal") -> int:
    """Tokens of this micro-batch that the model is to predict: of a causal one, all labels but each sequence's first."""
    return int((OBJECTIVES[objective].targets(batch) != IGNORED).sum())


def token_loss(
    model: Callable[..., Any],
    batch: Mapping[str, torch.Tensor],
    label_count: int,
    *,
    objective: ObjectiveName = "causal",
) -> torch.Tensor:
    """This micro-batch's share of the step's loss, a fp32 scalar: sum over its label tokens / label_count.

    model: called with the objective's inputs; returns logits (batch, seq, vocab) or an output with them as .logits.
    batch: as the dataset makes it; input_ids and labels, both (batch, seq).
    label_count: of the whole step, over all ranks and micro-batches; of a micro-batch without one the share is 0, and so it is
    of a step without one. objective: the shape's.
    An output with an .auxiliary_loss, a mean over this micro-batch's tokens, has it added, by its share of the label tokens.

    Backward may write the logits' gradient over them, so that they are worth nothing afterwards, and can be done once.
    """
    goal = OBJECTIVES[objective]
    output = model(**goal.inputs(batch))
    logits = output if isinstance(output, torch.Tensor) else output.logits
    targets = goal.targets(batch)
    losses = _CrossEntropy.apply(logits.reshape(-1, logits.shape[-1]), targets.reshape(-1))
    auxiliary, divisor = getattr(output, "auxiliary_loss", None), max(label_count, 1)
    if auxiliary is None:
        return losses.sum() / divisor
    return (losses.sum() + auxiliary * (targets != IGNORED).sum()) / divisor


class _CrossEntropy(torch.autograd.Function):
    """(rows, vocab) logits and (rows,) targets to (rows,) fp32 losses, 0 for ignored rows."""

    @staticmethod
    def forward(ctx: Any, logits: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
        losses = torch.empty(len(targets), dtype=torch.float32, device=logits.device)
        normalizers = torch.empty_like(losses)
        for rows in _slabs(logits):
            part, target = logits[rows].float(), targets[rows]
            normalizers[rows] = torch.logsumexp(part, dim=-1)
            picked = part.gather(1, target.clamp(min=0).unsqueeze(1)).squeeze(1)
            losses[rows] = (normalizers[rows] - picked).masked_fill_(target == IGNORED, 0.0)
        ctx.save_for_backward(logits, targets, normalizers)
        ctx.overwrite = _only_used_here(logits)
        return losses

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, grad_losses: torch.Tensor) -> tuple[torch.Tensor, None]:
        """Softmax minus one at the target, times the incoming gradient, rounded once to the logits' dtype.

        Written over the logits where nobody else needs them: with a large vocabulary they are what sets a step's peak.
        """
        logits, targets, normalizers = ctx.saved_tensors
        grad = logits if ctx.overwrite else torch.empty_like(logits)
        for rows in _slabs(logits):
            target = targets[rows]
            part = (logits[rows] - normalizers[rows].unsqueeze(1)).exp_()  # fp32, as the normalizers are
            part.scatter_add_(1, target.clamp(min=0).unsqueeze(1), torch.full_like(part[:, :1], -1.0))
            grad[rows] = part.mul_(grad_losses[rows].masked_fill(target == IGNORED, 0.0).unsqueeze(1))
        return grad, None


def _only_used_here(logits: torch.Tensor) -> bool:
    """True if a matrix product made the logits, whose backward does without them, as that of a tanh would not.

    Functions on the way that a package wrapped around modules hand on what they are given, and keep no tensor. One that keeps
    some may want its result, which nothing tells.
    """
    node = logits.grad_fn
    while node is not None and (node.name() in _VIEWS or (isinstance(node, BackwardCFunction) and not _keeps_tensors(node))):
        node = node.next_functions[0][0]
    return node is not None and node.name() in _PRODUCTS


def _keeps_tensors(node: Any) -> bool:
    """Saved or as attributes; what is saved is not looked at, which could begin a recomputation."""
    return bool(node._raw_saved_tensors) or any(isinstance(kept, torch.Tensor) for kept in tree_leaves(vars(node)))


def _slabs(logits: torch.Tensor) -> Iterator[slice]:
    rows = max(1, _SLAB_ELEMENTS // logits.shape[1])
    for start in range(0, logits.shape[0], rows):
        yield slice(start, start + rows)
