"""The loss against the library's own, and its independence of how a batch is cut."""

from __future__ import annotations

from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn

from models import loss as loss_module
from models.data import open_dataset
from models.loss import IGNORED, count_labels, token_loss

MakeModel = Callable[[str], nn.Module]


def gradients(model: nn.Module, loss: torch.Tensor) -> dict[str, torch.Tensor]:
    model.zero_grad()
    loss.backward()
    return {n: p.grad.clone() for n, p in model.named_parameters() if p.grad is not None}


@pytest.mark.parametrize("name", ["opt-tiny", "gpt-tiny"])
def test_loss_and_gradients_are_the_librarys(make_m0: MakeModel, name: str) -> None:
    model = make_m0(name)
    batch = open_dataset("text", vocab_size=257, seed=0).batch(0, batch_size=4, seq_len=16)
    batch["labels"][1, 5:9] = IGNORED
    ours, theirs = token_loss(model, batch, count_labels(batch)), model(**batch).loss
    assert count_labels(batch) == 4 * 15 - 4
    torch.testing.assert_close(ours, theirs, rtol=1e-6, atol=0)
    expected = gradients(model, theirs)
    # Against the largest gradient of all: a key's bias has gradient 0 in exact arithmetic, all else is rounding.
    largest = max(gradient.abs().max().item() for gradient in expected.values())
    for parameter, gradient in gradients(model, token_loss(model, batch, count_labels(batch))).items():
        torch.testing.assert_close(gradient, expected[parameter], rtol=0, atol=1e-6 * largest)


def test_micro_batches_add_up_to_the_whole(make_m0: MakeModel) -> None:
    model, data = make_m0("gpt-tiny"), open_dataset("text", vocab_size=257, seed=0)
    whole = data.batch(0, batch_size=8, seq_len=16)
    whole["labels"][0, :10] = IGNORED  # unequal label counts: a mean of means would differ
    parts = [{k: v[i : i + 2] for k, v in whole.items()} for i in range(0, 8, 2)]
    labels = count_labels(whole)
    assert labels == sum(count_labels(part) for part in parts)
    total = sum((token_loss(model, part, labels) for part in parts), torch.zeros(()))
    torch.testing.assert_close(total, token_loss(model, whole, labels), rtol=1e-6, atol=0)


def test_a_micro_batch_without_a_label_adds_nothing(make_m0: MakeModel) -> None:
    """As in torch's own recipe, a sum over label tokens divided by their number in the step; also of a step without any, where
    that is 0 / 0.
    """
    model = make_m0("gpt-tiny")
    batch = open_dataset("text", vocab_size=257, seed=0).batch(0, batch_size=2, seq_len=16)
    none = {"input_ids": batch["input_ids"].flip(0), "labels": torch.full_like(batch["labels"], IGNORED)}
    labels = count_labels(batch)
    assert count_labels(none) == 0
    alone = gradients(model, token_loss(model, batch, labels))
    together = gradients(model, token_loss(model, batch, labels) + token_loss(model, none, labels))
    assert all(torch.equal(alone[name], together[name]) for name in alone)
    nothing = token_loss(model, none, 0)
    assert nothing.item() == 0.0
    assert all(not gradient.any() for gradient in gradients(model, nothing).values()), "zeros, and no nan"


def test_an_auxiliary_loss_of_a_micro_batch_without_a_label_adds_nothing() -> None:
    batch = {"input_ids": torch.zeros(1, 4, dtype=torch.long), "labels": torch.full((1, 4), IGNORED)}
    logits, auxiliary = torch.zeros(1, 4, 5, requires_grad=True), torch.tensor(3.0, requires_grad=True)
    for labels in (0, 7):
        loss = token_loss(lambda **_: SimpleNamespace(logits=logits, auxiliary_loss=auxiliary), batch, labels)
        loss.backward()
        assert loss.item() == 0.0
        assert all(given.grad is not None and not given.grad.any() for given in (logits, auxiliary))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_slabs_change_no_bit(monkeypatch: pytest.MonkeyPatch, dtype: torch.dtype) -> None:
    torch.manual_seed(0)
    batch = {"input_ids": torch.randint(0, 50, (3, 9)), "labels": torch.randint(0, 50, (3, 9))}
    results = []
    for elements in (1 << 24, 50 * 4):
        monkeypatch.setattr(loss_module, "_SLAB_ELEMENTS", elements)
        logits = torch.linspace(-3, 3, 3 * 9 * 50).sin().view(3, 9, 50).to(dtype).requires_grad_()
        loss = token_loss(lambda logits=logits, **_: SimpleNamespace(logits=logits), batch, 24)
        loss.backward()
        assert loss.dtype == torch.float32 and logits.grad is not None and logits.grad.dtype == dtype
        results.append((loss.detach(), logits.grad))
    assert torch.equal(results[0][0], results[1][0]) and torch.equal(results[0][1], results[1][1])


def test_only_labels_stay_behind(make_m0: MakeModel) -> None:
    seen: list[set[str]] = []

    def model(**inputs: torch.Tensor) -> torch.Tensor:
        seen.append(set(inputs))
        return torch.zeros(2, 4, 10)

    batch = {k: torch.zeros(2, 4, dtype=torch.int64) for k in ("input_ids", "attention_mask", "labels")}
    assert token_loss(model, batch, 6).item() == pytest.approx(2.302585)
    assert seen == [{"input_ids", "attention_mask"}]


class Handed(torch.autograd.Function):
    """What packages wrap around modules to hear of their backward."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor) -> torch.Tensor:
        return tensor.view_as(tensor)

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> torch.Tensor:
        return gradient


class Capped(torch.autograd.Function):
    """A user's own head end, whose backward wants its result."""

    @staticmethod
    def forward(ctx: Any, tensor: torch.Tensor, saved: bool) -> torch.Tensor:
        result = torch.tanh(tensor)
        ctx.saved = saved
        if saved:
            ctx.save_for_backward(result)
        else:
            ctx.kept = [result.detach()]
        return result

    @staticmethod
    def backward(ctx: Any, gradient: torch.Tensor) -> tuple[torch.Tensor, None]:
        result = ctx.saved_tensors[0] if ctx.saved else ctx.kept[0]
        return gradient * (1 - result * result), None


HEADS: dict[str, tuple[Callable[[torch.Tensor], torch.Tensor], bool]] = {
    "product": (lambda logits: logits, True),
    "handed on": (Handed.apply, True),
    "a copy": (lambda logits: logits.clone(), True),
    "capped": (lambda logits: 30 * torch.tanh(logits / 30), False),
    "capped by a function that saves": (lambda logits: Capped.apply(logits, True), False),
    "capped by a function that keeps": (lambda logits: Handed.apply(Capped.apply(logits, False)), False),
    "capped and handed on": (lambda logits: Handed.apply(torch.tanh(logits)), False),
}


@pytest.mark.parametrize("bias", [True, False])
@pytest.mark.parametrize("head", HEADS)
def test_the_gradient_takes_the_place_of_logits_that_nobody_else_needs(head: str, bias: bool) -> None:
    after, overwritten = HEADS[head]
    torch.manual_seed(0)
    linear = nn.Linear(8, 50, bias=bias)
    hidden = torch.randn(3, 9, 8, requires_grad=True)
    batch = {"input_ids": torch.randint(0, 50, (3, 9)), "labels": torch.randint(0, 50, (3, 9))}
    made: list[torch.Tensor] = []

    def model(**_: torch.Tensor) -> torch.Tensor:
        made.append(after(linear(hidden)))
        return made[-1]

    token_loss(model, batch, 24).backward()
    found = [p.grad.clone() for p in (hidden, *linear.parameters()) if p.grad is not None]
    logits = after(linear(hidden)).detach()
    assert torch.equal(made[0], logits) != overwritten
    linear.zero_grad()
    hidden.grad = None
    rows, targets = after(linear(hidden))[:, :-1].reshape(-1, 50), batch["labels"][:, 1:].reshape(-1)
    (nn.functional.cross_entropy(rows, targets, reduction="sum") / 24).backward()
    expected = [p.grad for p in (hidden, *linear.parameters()) if p.grad is not None]
    for ours, theirs in zip(found, expected, strict=True):
        torch.testing.assert_close(ours, theirs, rtol=1e-5, atol=1e-6)
