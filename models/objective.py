"""What a model learns to predict: how a window of text becomes an example, what the model is shown, what it should say.

`ModelShape.objective` names one of `OBJECTIVES`. Data calls `examples`, the loss `inputs` and `targets`, so that neither
knows the three apart. A batch holds what the model's library calls `input_ids` and `labels`, and is a function of its
windows and their keys alone.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping, Sequence
from types import MappingProxyType
from typing import ClassVar

import torch

from models.counter import random_words, stream_key
from models.shape import ObjectiveName

IGNORED = -100  # a label that counts for nothing
MASKED_SHARE = 0.15  # of a sequence's tokens (Devlin et al. 2019)
START_TOKEN = 0  # what a decoder sees before its first token: T5's padding token

Batch = dict[str, torch.Tensor]


class Objective(ABC):
    """reserved_tokens: ids at the end of the vocabulary that text does not use. windows_per_sequence: seq_len's read."""

    reserved_tokens: ClassVar[int] = 0
    windows_per_sequence: ClassVar[int] = 1

    @abstractmethod
    def examples(self, windows: torch.Tensor, keys: Sequence[int], *, vocab_size: int) -> Batch:
        """input_ids and labels, int64 (batch, seq), of windows (batch, seq x windows_per_sequence).

        keys: one of `models.counter` for each row, for what is drawn at random.
        """

    def inputs(self, batch: Mapping[str, torch.Tensor]) -> Batch:
        """The keyword arguments a model is called with: all but its labels."""
        return {name: tensor for name, tensor in batch.items() if name != "labels"}

    def targets(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        """(batch, seq): the token that the logits at each place should name, or IGNORED."""
        return batch["labels"]


class Causal(Objective):
    """Token i predicts token i + 1. Labels are the ids, as transformers has it: the shift is made in `targets`."""

    def examples(self, windows: torch.Tensor, keys: Sequence[int], *, vocab_size: int) -> Batch:
        return {"input_ids": windows, "labels": windows.clone()}

    def targets(self, batch: Mapping[str, torch.Tensor]) -> torch.Tensor:
        # Shifting the labels instead of the logits leaves the logits contiguous, so that they need not be copied.
        return torch.nn.functional.pad(batch["labels"][:, 1:], (0, 1), value=IGNORED)


class Masked(Objective):
    """MASKED_SHARE of the tokens are replaced by the mask token, the vocabulary's last, and are to be named.

    Always the same number a sequence, at least one, so that every micro-batch has labels. BERT leaves a tenth of the
    chosen tokens as they are and makes another tenth random; here all are masked: the work is the same.
    """

    reserved_tokens: ClassVar[int] = 1

    def examples(self, windows: torch.Tensor, keys: Sequence[int], *, vocab_size: int) -> Batch:
        seq_len = windows.shape[1]
        count = max(1, round(MASKED_SHARE * seq_len))
        chosen = torch.zeros_like(windows, dtype=torch.bool)
        for row, key in enumerate(keys):
            order = random_words(stream_key("mask", key), start=0, count=seq_len).argsort()
            chosen[row, order[:count]] = True
        return {
            "input_ids": windows.masked_fill(chosen, vocab_size - 1),
            "labels": windows.masked_fill(~chosen, IGNORED),
        }


class Seq2Seq(Objective):
    """The encoder reads a window, the decoder continues it: labels are the window that follows, of the same length.

    So encoder and decoder each see seq_len tokens of a sequence, and batch x seq_len tokens through all parameters is
    right for formulas that go by parameters.
    """

    windows_per_sequence: ClassVar[int] = 2

    def examples(self, windows: torch.Tensor, keys: Sequence[int], *, vocab_size: int) -> Batch:
        first, second = windows.chunk(2, dim=1)
        return {"input_ids": first.contiguous(), "labels": second.contiguous()}

    def inputs(self, batch: Mapping[str, torch.Tensor]) -> Batch:
        """The decoder is given the labels one place later, as transformers makes them when it is given labels.

        Labels themselves would have the library work out a loss of its own beside ours.
        """
        shifted = torch.nn.functional.pad(batch["labels"][:, :-1], (1, 0), value=START_TOKEN)
        return {"decoder_input_ids": shifted.masked_fill(shifted == IGNORED, START_TOKEN)} | super().inputs(batch)


OBJECTIVES: Mapping[ObjectiveName, Objective] = MappingProxyType({"causal": Causal(), "masked": Masked(), "seq2seq": Seq2Seq()})
