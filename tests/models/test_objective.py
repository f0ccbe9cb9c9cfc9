"""Masked and sequence-to-sequence examples, and the loss on them against the library's own."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch
from torch import nn

from models.data import Dataset, open_dataset
from models.loss import count_labels, token_loss
from models.objective import IGNORED, MASKED_SHARE, OBJECTIVES, START_TOKEN
from models.registry import resolve
from models.shape import ObjectiveName

MakeModel = Callable[[str], nn.Module]
NEW = ("bert-tiny", "t5-tiny", "albert-tiny")


def text(objective: ObjectiveName, *, vocab_size: int = 257, seed: int = 0) -> Dataset:
    return open_dataset("text", vocab_size=vocab_size, seed=seed, objective=objective)


@pytest.mark.parametrize(("seq_len", "count"), [(2, 1), (16, 2), (128, 19), (1000, 150)])
def test_masked_tokens_are_a_fixed_share_of_each_sequence(seq_len: int, count: int) -> None:
    batch = text("masked", vocab_size=300).batch(0, batch_size=8, seq_len=seq_len)
    ids, labels = batch["input_ids"], batch["labels"]
    masked = labels != IGNORED
    assert count == max(1, round(MASKED_SHARE * seq_len))
    assert masked.sum(dim=1).tolist() == [count] * 8
    assert count_labels(batch, objective="masked") == 8 * count
    assert torch.equal(masked, ids == 299), "masked where there is a label, and nowhere else"
    assert labels[masked].min() >= 0 and labels[masked].max() < 256 and ids[~masked].max() < 256
    if seq_len > 2:
        assert len({tuple(row.nonzero().flatten().tolist()) for row in masked}) > 1


def test_masked_text_is_the_text_that_a_causal_model_sees() -> None:
    masked, causal = (text(o).batch(3, batch_size=4, seq_len=64) for o in ("masked", "causal"))
    whole = torch.where(masked["labels"] == IGNORED, masked["input_ids"], masked["labels"])
    assert torch.equal(whole, causal["input_ids"])


def test_masks_fall_everywhere() -> None:
    labels = text("masked").batch(0, batch_size=400, seq_len=16)["labels"]
    assert ((labels != IGNORED).sum(dim=0) > 20).all(), "400 x 2 masks over 16 places"


def test_a_decoder_continues_what_its_encoder_reads(tmp_path: Path) -> None:
    path = tmp_path / "text"
    path.write_bytes(bytes(range(200)) * 20)
    batch = open_dataset(str(path), vocab_size=256, seed=0, objective="seq2seq").batch(0, batch_size=6, seq_len=10)
    assert batch["input_ids"].shape == batch["labels"].shape == (6, 10)
    joined = torch.cat([batch["input_ids"], batch["labels"]], dim=1)
    assert ((joined[:, 1:] - joined[:, :-1]) % 200 == 1).all()


def test_decoder_inputs_are_the_labels_one_place_later() -> None:
    batch = {"input_ids": torch.arange(4).view(1, 4), "labels": torch.tensor([[7, IGNORED, 8, 9]])}
    inputs = OBJECTIVES["seq2seq"].inputs(batch)
    assert inputs.keys() == {"input_ids", "decoder_input_ids"}
    assert inputs["decoder_input_ids"].tolist() == [[START_TOKEN, 7, START_TOKEN, 8]]


@pytest.mark.parametrize("objective", ["masked", "seq2seq"])
@pytest.mark.parametrize("source", ["text", "synthetic"])
def test_examples_depend_on_their_index_alone(objective: ObjectiveName, source: str) -> None:
    data = open_dataset(source, vocab_size=300, seed=3, objective=objective)
    whole = data.batch(7, batch_size=4, seq_len=16)
    parts = [data.batch(7, micro_step=m, rank=r, ranks=2, batch_size=1, seq_len=16) for m in (0, 1) for r in (0, 1)]
    for name, tensor in whole.items():
        assert torch.equal(torch.cat([part[name] for part in parts]), tensor)
    for other in (data.batch(8, batch_size=4, seq_len=16), data.batch(7, batch_size=4, seq_len=16, split="validation")):
        assert not torch.equal(other["labels"], whole["labels"])


def test_synthetic_tokens_leave_the_mask_alone() -> None:
    batch = open_dataset("synthetic", vocab_size=8, seed=0, objective="masked").batch(0, batch_size=8, seq_len=500)
    assert set(batch["labels"].unique().tolist()) == {IGNORED, *range(7)}
    assert set(batch["input_ids"].unique().tolist()) == set(range(8))


@pytest.mark.parametrize(
    ("source", "vocab_size", "said"),
    [("text", 256, "a vocabulary of 256, the masked objective 1 more, not 256"), ("synthetic", 1, "leaves no token")],
)
def test_a_mask_needs_a_place_in_the_vocabulary(source: str, vocab_size: int, said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        open_dataset(source, vocab_size=vocab_size, seed=0, objective="masked")
    assert "\n" not in str(error.value)


def test_two_windows_need_twice_the_text(tmp_path: Path) -> None:
    path = tmp_path / "short"
    path.write_bytes(b"x" * 100)
    data = open_dataset(str(path), vocab_size=256, seed=0, objective="seq2seq")
    data.check(47)
    with pytest.raises(ValueError, match="has 95 tokens, sequences of 48 need 97"):
        data.check(48)


@pytest.mark.parametrize("name", NEW)
def test_loss_and_gradients_are_the_librarys(make_m0: MakeModel, name: str) -> None:
    model, objective = make_m0(name), resolve(name).objective
    batch = text(objective).batch(0, batch_size=4, seq_len=16)
    if objective == "seq2seq":
        batch["labels"][1, 5:9] = IGNORED
    labels = count_labels(batch, objective=objective)
    assert labels == {"masked": 4 * 2, "seq2seq": 4 * 16 - 4}[objective]
    gradients = []
    for loss in (token_loss(model, batch, labels, objective=objective), model(**batch).loss):
        model.zero_grad()
        loss.backward()
        gradients.append((loss.item(), {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}))
    (ours, our_gradients), (theirs, their_gradients) = gradients
    assert ours == pytest.approx(theirs, rel=1e-6)
    assert our_gradients.keys() == their_gradients.keys() == dict(model.named_parameters()).keys()
    largest = max(gradient.abs().max().item() for gradient in their_gradients.values())
    for parameter, gradient in our_gradients.items():
        torch.testing.assert_close(gradient, their_gradients[parameter], rtol=0, atol=1e-6 * largest)


@pytest.mark.parametrize("name", NEW)
def test_micro_batches_add_up_to_the_whole(make_m0: MakeModel, name: str) -> None:
    model, objective = make_m0(name), resolve(name).objective
    data = text(objective)
    labels = count_labels(data.batch(0, batch_size=4, seq_len=16), objective=objective)
    whole = token_loss(model, data.batch(0, batch_size=4, seq_len=16), labels, objective=objective)
    parts = [data.batch(0, micro_step=m, batch_size=2, seq_len=16) for m in range(2)]
    total = sum((token_loss(model, part, labels, objective=objective) for part in parts), torch.zeros(()))
    torch.testing.assert_close(total, whole, rtol=1e-6, atol=0)


@pytest.mark.parametrize("name", NEW)
def test_models_learn_it(make_m0: MakeModel, name: str) -> None:
    """One batch over and over: a loss or a label in the wrong place would not go down."""
    model, objective = make_m0(name), resolve(name).objective
    batch = text(objective).batch(0, batch_size=2, seq_len=16)
    labels = count_labels(batch, objective=objective)
    optimizer = torch.optim.Adam(model.parameters(), lr=1e-2)
    losses = []
    for _ in range(12):
        optimizer.zero_grad()
        loss = token_loss(model, batch, labels, objective=objective)
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    assert 4.5 < losses[0] < 8 and losses[-1] < 0.6 * losses[0]
