"""What a model is trained on: text that is on every machine, a user's own files, or random tokens.

A batch is a function of (seed, split, step, position in the step's global batch) and of nothing before it. So resuming
needs no state, and a step sees the same sequences however its global batch is cut into ranks and micro-batches. Text is
bytes, and a token is a byte: ids below 256, whatever the vocabulary. The last 5 % of the bytes are for validation only.
What is made of a window of text is the objective's business (`models.objective`).
"""

from __future__ import annotations

import hashlib
import os
import platform
from abc import ABC, abstractmethod
from collections.abc import Iterable, Iterator
from pathlib import Path
from typing import Literal

import torch

from models.counter import random_words, stream_key
from models.objective import OBJECTIVES, Batch, Objective
from models.shape import ObjectiveName

Split = Literal["train", "validation"]

VALIDATION_SHARE = 0.05
BYTES = 256
_LIBRARY_LIMIT = 16 << 20
_USER_LIMIT = 1 << 30
_SKIPPED_FOLDERS = frozenset({"site-packages", "dist-packages", "__pycache__", "test", "tests", "idle_test"})


class Dataset(ABC):
    """source: what it is, in words. sha256: of its content (of its law, where content is made up)."""

    source: str
    sha256: str

    def __init__(self, source: str, sha256: str, *, objective: Objective, vocab_size: int, seed: int) -> None:
        self.source, self.sha256 = source, sha256
        self._objective, self._vocab_size, self._seed = objective, vocab_size, seed

    def batch(
        self,
        step: int,
        *,
        micro_step: int = 0,
        rank: int = 0,
        ranks: int = 1,
        batch_size: int,
        seq_len: int,
        split: Split = "train",
    ) -> Batch:
        """The objective's examples: input_ids and labels, int64 (batch_size, seq_len) on the CPU.

        Raises ValueError as `check` does.
        """
        self.check(seq_len, split=split)
        first = (micro_step * ranks + rank) * batch_size
        keys = [stream_key("data", self._seed, split, step, first + i) for i in range(batch_size)]
        length = seq_len * self._objective.windows_per_sequence
        windows = torch.stack([self._window(key, length, split) for key in keys])
        return self._objective.examples(windows, keys, vocab_size=self._vocab_size)

    @abstractmethod
    def check(self, seq_len: int, *, split: Split = "train") -> None:
        """Raises ValueError, one line, if there is too little data for sequences of seq_len tokens."""

    @abstractmethod
    def _window(self, key: int, length: int, split: Split) -> torch.Tensor:
        """int64 (length,), a function of the arguments alone."""


class ByteText(Dataset):
    """Windows at random places of one long text."""

    def __init__(self, text: bytes, source: str, *, objective: Objective, vocab_size: int, seed: int) -> None:
        sha256 = hashlib.sha256(text).hexdigest()
        super().__init__(source, sha256, objective=objective, vocab_size=vocab_size, seed=seed)
        validation = int(len(text) * VALIDATION_SHARE)
        # uint8 and not ids: a byte a token in memory, eight only for the sequences in use.
        whole = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
        self._parts: dict[str, torch.Tensor] = {
            "train": whole[: len(text) - validation],
            "validation": whole[len(text) - validation :],
        }

    def check(self, seq_len: int, *, split: Split = "train") -> None:
        have, need = len(self._parts[split]), seq_len * self._objective.windows_per_sequence + 1
        if have < need:
            raise ValueError(
                f"the {split} part of {self.source} has {have} tokens, sequences of {seq_len} need {need}: "
                "give more text with --data or lower --seq-len"
            )

    def _window(self, key: int, length: int, split: Split) -> torch.Tensor:
        part = self._parts[split]
        start = key % (len(part) - length)
        return part[start : start + length].to(torch.int64)


class SyntheticTokens(Dataset):
    """Independent uniform tokens over all that the objective leaves of the vocabulary: nothing to learn, no end to it."""

    def __init__(self, *, objective: Objective, vocab_size: int, seed: int) -> None:
        self._below = vocab_size - objective.reserved_tokens
        if self._below < 1:
            raise ValueError(f"a vocabulary of {vocab_size} leaves no token to train on: raise it with --set vocab_size")
        source = f"synthetic: uniform tokens below {self._below}"
        sha256 = hashlib.sha256(source.encode()).hexdigest()
        super().__init__(source, sha256, objective=objective, vocab_size=vocab_size, seed=seed)

    def check(self, seq_len: int, *, split: Split = "train") -> None:
        pass

    def _window(self, key: int, length: int, split: Split) -> torch.Tensor:
        return random_words(key, start=0, count=length).bitwise_and_((1 << 63) - 1) % self._below


def open_dataset(source: str, *, vocab_size: int, seed: int, objective: ObjectiveName = "causal") -> Dataset:
    """`text` (the running Python's standard library), `synthetic`, or a path to a file or folder, read as bytes.

    vocab_size, objective: the shape's. Raises ValueError, one line, for a path that is not there and for a vocabulary
    that cannot hold a byte and what the objective needs beside it.
    """
    goal = OBJECTIVES[objective]
    if source == "synthetic":
        return SyntheticTokens(objective=goal, vocab_size=vocab_size, seed=seed)
    least = BYTES + goal.reserved_tokens
    if vocab_size < least:
        beside = f", the {objective} objective {goal.reserved_tokens} more" if goal.reserved_tokens else ""
        raise ValueError(
            f"text is read as bytes, which need a vocabulary of {BYTES}{beside}, not {vocab_size}: "
            "use --data synthetic or raise it with --set vocab_size"
        )
    text, name = _library() if source == "text" else _user_text(source)
    return ByteText(text, name, objective=goal, vocab_size=vocab_size, seed=seed)


def _library() -> tuple[bytes, str]:
    text = _read(_library_files(Path(os.__file__).parent), limit=_LIBRARY_LIMIT)
    return text, f"text: standard library of Python {platform.python_version()}"


def _user_text(source: str) -> tuple[bytes, str]:
    path = Path(source)
    try:
        if not source or not path.exists():
            raise FileNotFoundError
        if not path.is_dir() and not path.is_file():
            raise ValueError("it is a pipe, a socket or a device, not a file or folder")
        files = (p for p in sorted(path.rglob("*")) if p.is_file()) if path.is_dir() else [path]
        return _read(files, limit=_USER_LIMIT), str(path)
    except FileNotFoundError:
        raise ValueError(f"--data {source}: no such file or folder (or give text or synthetic)") from None
    except (OSError, ValueError) as error:
        raise ValueError(f"--data {source} cannot be read: {error}") from error


def _library_files(root: Path) -> Iterator[Path]:
    """The library's .py files in the order of their relative paths.

    Left out is what differs from one installation of a version to the next: installed packages, tests, build settings.
    """
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        found += [
            Path(folder, name) for name in names if name.endswith(".py") and not name.startswith(("_sysconfigdata", "sitec"))
        ]
    return iter(sorted(found, key=lambda path: path.relative_to(root).as_posix()))


def _read(files: Iterable[Path], *, limit: int) -> bytes:
    """The files one behind the other, cut off at `limit` bytes."""
    text = bytearray()
    for path in files:
        with path.open("rb") as file:
            text += file.read(limit - len(text))
        if len(text) >= limit:
            break
    return bytes(text)
