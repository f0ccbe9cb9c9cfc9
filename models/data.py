"""What a model is trained on: text that is on every machine, a user's own files, or random tokens.

A batch is a function of (seed, split, step, position in the step's global batch) and of nothing before it. So resuming
needs no state, and a step sees the same sequences however its global batch is cut into ranks and micro-batches. Text is
bytes, and a token is a byte: ids below 256, whatever the vocabulary. The last 5 % of the bytes are for validation only.
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

    def __init__(self, source: str, sha256: str, *, seed: int) -> None:
        self.source, self.sha256, self._seed = source, sha256, seed

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
    ) -> dict[str, torch.Tensor]:
        """input_ids and labels, int64 (batch_size, seq_len) on the CPU. Labels are the ids: the loss does the shift.

        Raises ValueError as `check` does.
        """
        self.check(seq_len, split=split)
        first = (micro_step * ranks + rank) * batch_size
        rows = [
            self._sequence(stream_key("data", self._seed, split, step, first + i), seq_len, split)
            for i in range(batch_size)
        ]
        ids = torch.stack(rows)
        return {"input_ids": ids, "labels": ids.clone()}

    @abstractmethod
    def check(self, seq_len: int, *, split: Split = "train") -> None:
        """Raises ValueError, one line, if there is too little data for sequences of seq_len tokens."""

    @abstractmethod
    def _sequence(self, key: int, seq_len: int, split: Split) -> torch.Tensor:
        """int64 (seq_len,), a function of the arguments alone."""


class ByteText(Dataset):
    """Windows at random places of one long text."""

    def __init__(self, text: bytes, source: str, *, seed: int) -> None:
        super().__init__(source, hashlib.sha256(text).hexdigest(), seed=seed)
        validation = int(len(text) * VALIDATION_SHARE)
        # uint8 and not ids: a byte a token in memory, eight only for the sequences in use.
        whole = torch.frombuffer(bytearray(text), dtype=torch.uint8) if text else torch.empty(0, dtype=torch.uint8)
        self._parts: dict[str, torch.Tensor] = {
            "train": whole[: len(text) - validation],
            "validation": whole[len(text) - validation :],
        }

    def check(self, seq_len: int, *, split: Split = "train") -> None:
        have = len(self._parts[split])
        if have < seq_len + 1:
            raise ValueError(
                f"the {split} part of {self.source} has {have} tokens, sequences of {seq_len} need {seq_len + 1}: "
                "give more text with --data or lower --seq-len"
            )

    def _sequence(self, key: int, seq_len: int, split: Split) -> torch.Tensor:
        part = self._parts[split]
        start = key % (len(part) - seq_len)
        return part[start : start + seq_len].to(torch.int64)


class SyntheticTokens(Dataset):
    """Independent uniform tokens over the whole vocabulary: nothing to learn, any amount of it."""

    def __init__(self, *, vocab_size: int, seed: int) -> None:
        source = f"synthetic: uniform tokens below {vocab_size}"
        super().__init__(source, hashlib.sha256(source.encode()).hexdigest(), seed=seed)
        self._vocab_size = vocab_size

    def check(self, seq_len: int, *, split: Split = "train") -> None:
        pass

    def _sequence(self, key: int, seq_len: int, split: Split) -> torch.Tensor:
        return random_words(key, start=0, count=seq_len).bitwise_and_((1 << 63) - 1) % self._vocab_size


def open_dataset(source: str, *, vocab_size: int, seed: int) -> Dataset:
    """`text` (the running Python's standard library), `synthetic`, or a path to a file or folder, read as bytes.

    Raises ValueError, one line, for a path that is not there and for a vocabulary that cannot hold a byte.
    """
    if source == "synthetic":
        return SyntheticTokens(vocab_size=vocab_size, seed=seed)
    if vocab_size < BYTES:
        raise ValueError(
            f"text is read as bytes, which need a vocabulary of {BYTES}, not {vocab_size}: use --data synthetic"
        )
    if source == "text":
        root = Path(os.__file__).parent
        text = _read(_library_files(root), limit=_LIBRARY_LIMIT)
        return ByteText(text, f"text: standard library of Python {platform.python_version()}", seed=seed)
    path = Path(source)
    if not path.exists():
        raise ValueError(f"--data {source}: no such file or folder (or give text or synthetic)")
    files = (p for p in sorted(path.rglob("*")) if p.is_file()) if path.is_dir() else [path]
    try:
        return ByteText(_read(files, limit=_USER_LIMIT), str(path), seed=seed)
    except OSError as error:
        raise ValueError(f"--data {source} cannot be read: {error}") from error


def _library_files(root: Path) -> Iterator[Path]:
    """The library's .py files in the order of their relative paths.

    Left out is what differs from one installation of a version to the next: installed packages, tests, build settings.
    """
    found = []
    for folder, subfolders, names in os.walk(root):
        subfolders[:] = [name for name in subfolders if name not in _SKIPPED_FOLDERS]
        found += [
            Path(folder, name)
            for name in names
            if name.endswith(".py") and not name.startswith(("_sysconfigdata", "sitec"))
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
