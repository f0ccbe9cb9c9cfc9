"""Batches as functions of their index, and text that is the same every time it is read."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from models.data import open_dataset


def test_text_is_real_and_stable() -> None:
    first, second = (open_dataset("text", vocab_size=384, seed=1) for _ in range(2))
    assert first.sha256 == second.sha256 and len(first.sha256) == 64
    assert first.source.startswith("text: standard library of Python 3.")
    batch = first.batch(0, batch_size=4, seq_len=256)
    assert batch["input_ids"].shape == (4, 256) and batch["input_ids"].dtype == torch.int64
    assert torch.equal(batch["input_ids"], batch["labels"])
    assert batch["input_ids"].max().item() < 256
    assert b" " in bytes(batch["input_ids"].flatten().tolist())
    assert torch.equal(second.batch(0, batch_size=4, seq_len=256)["input_ids"], batch["input_ids"])


@pytest.mark.parametrize("source", ["text", "synthetic"])
def test_a_step_sees_the_same_sequences_however_it_is_cut(source: str) -> None:
    data = open_dataset(source, vocab_size=300, seed=3)
    whole = data.batch(7, batch_size=8, seq_len=16)["input_ids"]
    in_micro_batches = [data.batch(7, micro_step=m, batch_size=2, seq_len=16)["input_ids"] for m in range(4)]
    on_ranks = [
        data.batch(7, micro_step=m, rank=r, ranks=2, batch_size=2, seq_len=16)["input_ids"] for m in range(2) for r in range(2)
    ]
    assert torch.equal(torch.cat(in_micro_batches), whole) and torch.equal(torch.cat(on_ranks), whole)
    assert len({tuple(row.tolist()) for row in whole}) == 8
    assert not torch.equal(data.batch(8, batch_size=8, seq_len=16)["input_ids"], whole)
    other_seed = open_dataset(source, vocab_size=300, seed=4)
    assert not torch.equal(other_seed.batch(7, batch_size=8, seq_len=16)["input_ids"], whole)


def test_synthetic_uses_the_whole_vocabulary() -> None:
    ids = open_dataset("synthetic", vocab_size=1000, seed=0).batch(0, batch_size=8, seq_len=4096)["input_ids"]
    assert ids.min().item() == 0 and ids.max().item() == 999
    assert ids.double().mean().item() == pytest.approx(499.5, abs=8)


def test_splits_are_disjoint(tmp_path: Path) -> None:
    """Training bytes are all 'a', the last 5 % all 'b'."""
    path = tmp_path / "corpus"
    path.write_bytes(b"a" * 950 + b"b" * 50)
    data = open_dataset(str(path), vocab_size=256, seed=0)
    for step in range(200):
        assert set(data.batch(step, batch_size=2, seq_len=49)["input_ids"].flatten().tolist()) == {ord("a")}
        validation = data.batch(step, batch_size=2, seq_len=49, split="validation")["input_ids"]
        assert set(validation.flatten().tolist()) == {ord("b")}


def test_a_folder_is_read_in_the_order_of_its_names(tmp_path: Path) -> None:
    (tmp_path / "b").mkdir()
    (tmp_path / "b" / "two").write_bytes(b"22")
    (tmp_path / "a.txt").write_bytes(b"1" * 200)
    data = open_dataset(str(tmp_path), vocab_size=256, seed=0)
    single = tmp_path / "c.bin"
    single.write_bytes(b"1" * 200 + b"22")
    assert data.sha256 == open_dataset(str(single), vocab_size=256, seed=0).sha256


@pytest.mark.parametrize(
    ("source", "vocab_size", "said"),
    [
        ("nowhere/at/all", 256, "no such file or folder"),
        ("", 256, "no such file or folder"),
        ("text", 255, "need a vocabulary of 256, not 255"),
    ],
)
def test_bad_sources_are_one_line(source: str, vocab_size: int, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        open_dataset(source, vocab_size=vocab_size, seed=0)
    assert "\n" not in str(error.value)


def test_too_little_text(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"x" * 100)
    data = open_dataset(str(path), vocab_size=256, seed=0)
    data.check(94)
    with pytest.raises(ValueError, match="has 95 tokens, sequences of 95 need 96"):
        data.batch(0, batch_size=1, seq_len=95)
    with pytest.raises(ValueError, match="validation part of .* has 5 tokens"):
        data.check(5, split="validation")
    path.write_bytes(b"")
    with pytest.raises(ValueError, match="has 0 tokens"):
        open_dataset(str(path), vocab_size=256, seed=0).check(2)
