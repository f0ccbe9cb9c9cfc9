"""OffloadTrainer's runs are those of a loop of one's own, bit for bit, and those of transformers' Trainer to rounding."""

from __future__ import annotations

from collections.abc import Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from transformers import Trainer

import systems
from systems.integrations import OffloadTrainer
from systems.integrations.stand_ins import OptimizerStandIn
from tests.integrations.training import (
    OFFLOAD,
    Ran,
    arguments,
    finished,
    logs_of,
    offloaded,
    opt,
    own_loop,
    plain,
    trainer_of,
)


def assert_same(ran: Ran, other: Ran) -> None:
    assert ran.logs == other.logs
    assert ran.weights.keys() == other.weights.keys()
    for name, value in ran.weights.items():
        assert torch.equal(value, other.weights[name]), name


def assert_near(logs: list[dict[str, float]], theirs: list[dict[str, float]]) -> None:
    assert len(logs) == len(theirs)
    for mine, other in zip(logs, theirs, strict=True):
        assert mine.keys() == other.keys()
        for name, value in mine.items():
            assert value == pytest.approx(other[name], rel=2e-5), (name, mine, other)


@pytest.mark.parametrize(
    "offload",
    [
        {"system": "resident"},
        OFFLOAD | {"recompute": "full"},
        {"system": "patrickstar", "device_memory": "2MiB"},
    ],
    ids=["resident", "elixir", "patrickstar"],
)
@pytest.mark.one_in(3)
def test_a_run_is_that_of_an_own_loop(tmp_path: Path, offload: Mapping[str, Any]) -> None:
    """Two epochs with a short last window each, a binding clip, dropout, a schedule, and evaluations between."""
    trainer = offloaded(tmp_path, offload=offload)
    trainer.train()
    ran = finished(trainer)
    assert_same(ran, own_loop(tmp_path, opt(), offload))
    assert [entry["step"] for entry in ran.logs if "loss" in entry] == [1, 2, 3, 4, 5, 6]
    assert [entry["step"] for entry in ran.logs if "eval_loss" in entry] == [2, 4, 6]


def test_a_norm_that_is_late_is_logged_at_its_step(tmp_path: Path) -> None:
    """Where updates are made in backward, and the norm is known some time after the step."""
    runs = []
    for offload in (OFFLOAD, OFFLOAD | {"options": {"nonfinite": "stop"}}):
        trainer = offloaded(tmp_path, offload=offload, max_grad_norm=0.0)
        trainer.train()
        runs.append(finished(trainer))
    assert_same(*runs)


@pytest.mark.parametrize(
    ("build", "given"),
    [
        (opt, {}),
        (opt, {"max_grad_norm": 0.0}),
        (opt, {"label_smoothing_factor": 0.1}),
        (opt, {"average_tokens_across_devices": False}),
        (plain, {}),
    ],
    ids=["clip", "no clip", "label smoothing", "not averaged", "mean loss"],
)
@pytest.mark.one_in(5)
def test_a_run_is_that_of_trainer(tmp_path: Path, build: Any, given: dict[str, Any]) -> None:
    """Losses scaled by labels or micro-batches, and norms before clipping, as transformers has them."""
    theirs = trainer_of(Trainer, build(), arguments(tmp_path, **given))
    theirs.train()
    with offloaded(tmp_path, build(), **given) as trainer:
        trainer.train()
    assert_near(logs_of(trainer), logs_of(theirs))
    for (name, value), other in zip(trainer.model.named_parameters(), theirs.model.parameters(), strict=True):
        assert torch.allclose(value, other, rtol=1e-3, atol=1e-5), name


def test_the_norm_is_clipped_by_default(tmp_path: Path) -> None:
    """A gradient of norm 1 is what is left, and the norm before that is told."""
    default = arguments(tmp_path).__dataclass_fields__["max_grad_norm"].default
    with offloaded(tmp_path, max_grad_norm=default, max_steps=2, learning_rate=1e-2) as trainer:
        trainer.train()
        assert trainer.engine is not None
        outcomes = trainer.engine.outcomes
    assert default == 1.0
    assert all(outcome.norm is not None and outcome.norm > 1 for outcome in outcomes)
    assert [outcome.clip_factor for outcome in outcomes] == pytest.approx([1 / o.norm for o in outcomes if o.norm], rel=1e-5)


def test_a_skipped_step_moves_no_schedule(tmp_path: Path) -> None:
    seen = []

    def loss(outputs: Any, labels: torch.Tensor, num_items_in_batch: torch.Tensor) -> torch.Tensor:
        seen.append(labels)
        return outputs.logits.float().square().mean() * (float("inf") if len(seen) == 2 else 1.0)

    args = arguments(tmp_path, gradient_accumulation_steps=1, max_steps=4, eval_strategy="no", lr_scheduler_type="linear")
    with trainer_of(OffloadTrainer, opt(), args, offload=OFFLOAD, compute_loss_func=loss) as trainer:
        trainer.train()
        assert [outcome.skipped for outcome in trainer.engine.outcomes] == [False, True, False, False]
    rates = [entry["learning_rate"] for entry in logs_of(trainer)]
    assert rates[1] == rates[2] < rates[3]


@pytest.mark.parametrize(("flag", "dtype"), [("bf16", torch.bfloat16), ("fp16", torch.float16)])
def test_the_flags_say_the_dtype(tmp_path: Path, flag: str, dtype: torch.dtype) -> None:
    given: dict[str, Any] = {"max_steps": 2, flag: True}
    with offloaded(tmp_path, **given) as trainer:
        trainer.train()
        assert trainer.accelerator.mixed_precision == "no" and trainer.accelerator.scaler is None
    assert {value.dtype for value in trainer.model.parameters()} == {dtype}


def test_without_flags_the_dtype_is_the_model_s(tmp_path: Path) -> None:
    with offloaded(tmp_path, opt().bfloat16(), max_steps=2) as trainer:
        trainer.train()
        trainer.save_model(str(tmp_path / "saved"))
    assert {value.dtype for value in trainer.model.parameters()} == {torch.bfloat16}
    assert type(opt()).from_pretrained(tmp_path / "saved").dtype == torch.bfloat16


def test_evaluation_needs_no_training(tmp_path: Path) -> None:
    theirs = trainer_of(Trainer, opt(), arguments(tmp_path))
    with offloaded(tmp_path) as trainer:
        found = trainer.evaluate()
        assert found["eval_loss"] == pytest.approx(theirs.evaluate()["eval_loss"], rel=1e-5)
        predicted = trainer.predict(trainer.eval_dataset)
        assert predicted.predictions.shape == (10, 16, 128)
        trainer.train()
        assert trainer.state.global_step == 6


def test_nobody_moves_or_wraps_the_model(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """On a GPU the whole model would be there before an engine is; and Accelerate would put all moments on it."""
    model = opt()

    def moved(*_: Any, **__: Any) -> Any:
        raise AssertionError("the model is moved")

    for name in ("to", "cuda", "_apply"):
        monkeypatch.setattr(type(model), name, moved)
    with offloaded(tmp_path, model) as trainer:
        trainer.evaluate()
        trainer.train()
        assert trainer.engine is not None
        assert trainer.model is model is trainer.engine.module
        assert trainer.accelerator._models == []
        assert type(trainer.optimizer) is OptimizerStandIn
        assert trainer.accelerator._optimizers == [trainer.optimizer]


def test_one_trainer_trains_on_and_again(tmp_path: Path) -> None:
    """With a model it goes on with the moments that it has; with `model_init` each run begins anew, as the first did."""
    with offloaded(tmp_path, eval_strategy="no") as trainer:
        trainer.train()
        engine = trainer.engine
        trainer.train()
        assert trainer.engine is engine and engine is not None and len(engine.outcomes) == 12
    args = arguments(tmp_path, eval_strategy="no")
    with trainer_of(OffloadTrainer, None, args, offload=OFFLOAD, model_init=lambda: opt()) as trainer:
        trainer.train()
        first, engine = logs_of(trainer), trainer.engine
        trainer.train()
        assert trainer.engine is not engine and logs_of(trainer) == first


def test_an_optimizer_and_a_schedule_may_be_given(tmp_path: Path) -> None:
    model = opt()
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-3)
    schedule = torch.optim.lr_scheduler.StepLR(optimizer, step_size=2, gamma=0.5)
    args = arguments(tmp_path, eval_strategy="no")
    with trainer_of(OffloadTrainer, model, args, offload=OFFLOAD, optimizers=(optimizer, schedule)) as trainer:
        trainer.train()
    assert [entry["learning_rate"] for entry in logs_of(trainer)] == [1e-3, 1e-3, 5e-4, 5e-4, 2.5e-4, 2.5e-4]


def test_what_fails_is_what_is_told(tmp_path: Path) -> None:
    """`with` closes a trainer whose training broke off, and its model says that its weights are gone."""
    trainer = offloaded(tmp_path)

    def breaks(*_: Any) -> Any:
        raise KeyError("broke")

    trainer.training_step = breaks
    with pytest.raises(KeyError, match="broke"), trainer:
        trainer.train()
    with pytest.raises(RuntimeError, match="weights are gone"):
        trainer.model(torch.zeros(1, 4, dtype=torch.long))


def test_a_model_without_values_begins_with_a_folder_s(tmp_path: Path) -> None:
    """Whose weights are read into the engine; the run is that of a model that has them."""
    opt().save_pretrained(tmp_path / "given")
    whole = offloaded(tmp_path)
    whole.train()
    trainer = offloaded(tmp_path, systems.model_of(tmp_path / "given"), offload=OFFLOAD | {"weights": tmp_path / "given"})
    trainer.train()
    assert_same(finished(trainer), finished(whole))
