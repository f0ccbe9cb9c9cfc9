"""How large a micro-batch is, known before it runs: what tells that it may need more memory than any that was measured.

Elements alone would not do: one long sequence needs other activations than many short ones of as many tokens.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass

import torch


@dataclass(frozen=True)
class BatchShape:
    """elements: of all tensors that the model is called with. longest: of their dimensions but the first, the batch."""

    elements: int = 0
    longest: int = 0

    def within(self, other: BatchShape) -> bool:
        return self.elements <= other.elements and self.longest <= other.longest

    def join(self, other: BatchShape) -> BatchShape:
        """The smallest that holds both."""
        return BatchShape(max(self.elements, other.elements), max(self.longest, other.longest))


def batch_shape_of(inputs: object) -> BatchShape:
    """Of the tensors in lists, tuples and dictionaries."""
    tensors = list(_tensors(inputs))
    sizes = [size for tensor in tensors for size in tensor.shape[1:]]
    return BatchShape(sum(tensor.numel() for tensor in tensors), max(sizes, default=0))


def _tensors(given: object) -> Iterable[torch.Tensor]:
    if isinstance(given, torch.Tensor):
        yield given
    elif isinstance(given, Mapping):
        yield from (tensor for value in given.values() for tensor in _tensors(value))
    elif isinstance(given, Sequence) and not isinstance(given, str | bytes):
        yield from (tensor for value in given for tensor in _tensors(value))
