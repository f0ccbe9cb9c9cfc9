"""Losses that a user's forward may end in, whose memory does not grow with tokens times vocabulary."""

from __future__ import annotations

from collections.abc import Callable

import torch
from torch.nn.functional import cross_entropy, pad
from torch.utils.checkpoint import checkpoint

IGNORED = -100  # a label that counts for nothing, as in transformers and torch


def chunked_causal_loss(
    head: Callable[[torch.Tensor], torch.Tensor],
    hidden: torch.Tensor,
    labels: torch.Tensor,
    count: int | torch.Tensor | None = None,
    *,
    chunk: int = 1024,
) -> torch.Tensor:
    """Cross entropy of each next token, a fp32 scalar: what transformers' own causal loss is, by `chunk` tokens at a time.

    head: gives the logits (n, vocabulary) of hidden states (n, width): `model.lm_head`, or a function of the forward's own.
    hidden: (..., tokens, width), the head's input, not cut. labels: (..., tokens), not shifted: hidden state t is to predict
    label t + 1, and labels of -100 count for nothing. count: what the sum is divided by, the labels of the whole step over
    micro-batches and ranks (transformers' num_items_in_batch); None: by this call's own. There is no label smoothing.

    A chunk's logits are made, used and forgotten, and made again in backward, so that one chunk's are there at a time: some 20
    bytes an element in bf16, beside two gradients of the head's weight, which are added up chunk by chunk in its dtype.

    Call it inside the forward that the engine runs; a head that is no module reads its weights for the module around it (see
    `systems.uses`). Raises ValueError where shapes do not fit, or chunk is below 1.
    """
    if hidden.shape[:-1] != labels.shape or not labels.ndim:
        raise ValueError(
            f"labels are {tuple(labels.shape)} and hidden is {tuple(hidden.shape)}: give labels (..., tokens) and hidden "
            "states (..., tokens, width) of the same tokens, neither of them shifted"
        )
    if chunk < 1:
        raise ValueError(f"chunk is {chunk}: give the number of tokens whose logits are made at a time, at least 1")
    targets = pad(labels, (0, 1), value=IGNORED)[..., 1:].reshape(-1).to(hidden.device)
    # By split, whose backward makes one gradient of all chunks; by slices each would make one as large as all.
    chunks = zip(hidden.reshape(-1, hidden.shape[-1]).split(chunk), targets.split(chunk), strict=True)
    total = torch.stack([checkpoint(_summed, head, *each, use_reentrant=False) for each in chunks]).sum()
    if count is None:
        count = (targets != IGNORED).sum()
    return total / (count.to(total.device) if isinstance(count, torch.Tensor) else count)


def _summed(head: Callable[[torch.Tensor], torch.Tensor], hidden: torch.Tensor, targets: torch.Tensor) -> torch.Tensor:
    return cross_entropy(head(hidden).float(), targets, ignore_index=IGNORED, reduction="sum")
