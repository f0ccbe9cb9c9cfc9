"""The clock and everything derived from it, against values worked out by hand (cases C56, C60 and C61)."""

from __future__ import annotations

import gc
import math
import threading
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import pytest
import torch

from harness import derive
from harness.measure import EVAL_BATCHES, Measurement, RawResults, Workload, schedule_factor
from harness.record import Resolved
from models.flops import FlopCount, ForwardFlops
from models.loss import count_labels, token_loss
from systems.baselines.dummy import DummyEngine, DummyOptions
from systems.settings import Settings

BATCH, SEQ = 2, 16


class Clock:
    """Time that passes only in sleep."""

    def __init__(self) -> None:
        self.now, self._lock = 100.0, threading.Lock()

    def __call__(self) -> float:
        return self.now

    def sleep(self, seconds: float) -> None:
        with self._lock:
            self.now += seconds


class Trial:
    """A scripted engine measured by a pretended clock. options are the dummy's, the rest is the measurement's."""

    def __init__(
        self,
        *,
        steps: int,
        warmup: int,
        accumulate: int = 1,
        eval_every: int | None = None,
        save_every: int | None = None,
        taken: int = 0,
        skipped: int = 0,
        schedule: Any = "constant",
        **options: Any,
    ) -> None:
        self.clock, self.phases, self.told = Clock(), [], []  # type: ignore[var-annotated]
        settings = Settings(accumulate=accumulate, clip=1.0)
        self.engine = DummyEngine(DummyOptions(**options), settings, sleep=self.clock.sleep)
        self.warmup, self.accumulate = warmup, accumulate
        work = Workload(
            batch=self._batch,
            loss=token_loss,
            count_labels=count_labels,
            accumulate=accumulate,
            lr=1.0,
            schedule=schedule,
        )
        self.measurement = Measurement(
            self.engine,
            work,
            steps=steps,
            warmup=warmup,
            taken=taken,
            skipped=skipped,
            eval_every=eval_every,
            save_every=save_every,
            save=lambda: self.clock.sleep(7.0),
            clock=self.clock,
            enter=self.phases.append,
            on_step=lambda done, loss: self.told.append((done, loss)),
        )

    @staticmethod
    def _batch(step: int, micro_step: int, split: str) -> dict[str, torch.Tensor]:
        ids = torch.arange(BATCH * SEQ).reshape(BATCH, SEQ) % 8
        return {"input_ids": ids, "labels": ids.clone()}

    def run(self) -> RawResults:
        try:
            return self.measurement.run()
        finally:
            self.engine.close()

    def metrics(self, measured: RawResults, ranks: int = 1, **fields: Any) -> dict[str, Any]:
        samples = BATCH * self.accumulate * ranks
        resolved = Resolved(warmup_steps=self.warmup, global_batch_samples=samples, tokens_per_step=samples * SEQ, **fields)
        flops = FlopCount(ForwardFlops(other=10**9), (ForwardFlops(other=10**8),) * 2)
        work = derive.StepFlops(parameters=10**6, flops=flops, accumulate=self.accumulate, recompute=(0,))
        return derive.metrics(measured, resolved, work, ranks)


@pytest.mark.parametrize("ranks", [1, 3])
@pytest.mark.parametrize("accumulate", [1, 4])
def test_throughput_equals_hand_values(accumulate: int, ranks: int) -> None:
    """C56: 0.1 s a micro-step, batch 2 x 16, 5 steps of which one is skipped."""
    trial = Trial(steps=5, warmup=0, accumulate=accumulate, micro_step_time_s=0.1, skip_at=3)
    metrics = trial.metrics(trial.run(), ranks)
    step_s, useful = 0.1 * accumulate, 4
    per_s = useful / (5 * step_s)
    expected = {
        "timed_region_s": 5 * step_s,
        "mean_step_time_s": step_s,
        "median_step_time_s": step_s,
        "useful_steps": useful,
        "samples_per_s": BATCH * accumulate * ranks * per_s,
        "tokens_per_s": BATCH * SEQ * accumulate * ranks * per_s,
        "tokens_per_s_per_device": BATCH * SEQ * accumulate * per_s,
        "tflops_6n": 6e6 * BATCH * SEQ * accumulate * per_s / 1e12,
        "relative_tflops": 8e6 * BATCH * SEQ * accumulate * per_s / 1e12,
        "model_tflops": 3e9 * accumulate * per_s / 1e12,
        "hardware_tflops": 3.1e9 * accumulate * per_s / 1e12,
    }
    assert {key: metrics[key] for key in expected} == pytest.approx(expected, rel=1e-9)
    assert metrics["mfu"] is None


def test_utilisation_needs_a_known_peak() -> None:
    trial = Trial(steps=2, warmup=1, step_time_s=0.1)
    assert trial.metrics(trial.run(), peak_flops_per_s=3e11)["mfu"] == pytest.approx(0.1)


@pytest.mark.parametrize(("warmup", "times"), [(0, [1, 1, 1, 0.1, 0.1, 0.1]), (3, [0.1] * 3), (5, [0.1])])
def test_warm_up_is_excluded_exactly(warmup: int, times: list[float]) -> None:
    """C60: the first three steps are ten times slower."""
    trial = Trial(steps=6, warmup=warmup, step_time_s=0.1, slow_steps=3)
    measured = trial.run()
    metrics = trial.metrics(measured)
    assert metrics["step_time_s"] == pytest.approx(times)
    assert metrics["timed_region_s"] == pytest.approx(sum(times))
    assert measured.warmup_s == pytest.approx(3.3 - sum(times))
    assert len(measured.step_time_s) == len(metrics["loss"]) == len(metrics["grad_norm_before_clip"]) == 6


def test_garbage_is_collected_before_the_region_and_what_is_there_not_in_it(monkeypatch: pytest.MonkeyPatch) -> None:
    trial = Trial(steps=3, warmup=1, step_time_s=0.1)
    seen: list[str] = []

    def collect() -> None:
        seen.append("collect")
        trial.clock.sleep(5.0)

    monkeypatch.setattr(gc, "collect", collect)
    monkeypatch.setattr(gc, "freeze", lambda: seen.append("freeze"))
    metrics = trial.metrics(trial.run())
    assert seen == ["collect", "freeze"]
    assert metrics["timed_region_s"] == pytest.approx(0.2)


@pytest.mark.parametrize("warmup", [6, 7])
def test_warm_up_that_leaves_nothing_is_an_error(warmup: int) -> None:
    with pytest.raises(ValueError, match="nothing to time"):
        Trial(steps=6, warmup=warmup)


def test_deferred_work_is_paid_for() -> None:
    """C61: each step queues 1 s of work and returns; the region holds it, and what warm-up queued is not in it."""
    trial = Trial(steps=3, warmup=1, drain_time_s=1.0)
    measured = trial.run()
    assert measured.timed_s == pytest.approx(2.0)
    assert trial.metrics(measured)["mean_step_time_s"] == pytest.approx(1.0)


def test_deferred_work_behind_the_last_step_is_said() -> None:
    measured = RawResults(step_time_s=[0.1, 0.1], timed_s=1.2, complete=True)
    assert "behind the last step boundary" in derive.notes(measured, warmup=0)[0]


def test_validation_is_in_no_timing() -> None:
    trial = Trial(steps=6, warmup=2, eval_every=2, step_time_s=0.1, eval_time_s=5.0, bytes_per_step=12)
    measured = trial.run()
    assert measured.eval_step == [2, 4, 6]
    assert measured.eval_loss == pytest.approx([math.log(8)] * 3)
    assert measured.eval_s == pytest.approx(3 * EVAL_BATCHES * 5.0)
    assert measured.timed_s == pytest.approx(0.4)
    assert measured.warmup_s == pytest.approx(0.2)
    assert measured.step_time_s == pytest.approx([0.1] * 6)
    assert derive.traffic(measured, warmup=2).h2d_bytes == 12
    assert trial.engine.module.training


def unlabelled(trial: Trial, which: Callable[[int, int, str], bool]) -> Trial:
    """The same with labels of -100 alone in the (step, micro-step, split) that `which` names."""
    given = trial.measurement.work.batch

    def batch(step: int, micro_step: int, split: str) -> dict[str, torch.Tensor]:
        found = given(step, micro_step, split)
        return found | {"labels": torch.full_like(found["labels"], -100)} if which(step, micro_step, split) else found

    trial.measurement.work = replace(trial.measurement.work, batch=batch)
    return trial


def test_a_micro_batch_without_a_label_adds_nothing_to_its_step() -> None:
    trial = Trial(steps=3, warmup=1, accumulate=2)
    losses = unlabelled(trial, lambda step, micro, split: (step, micro) == (1, 0)).run().micro_batch_loss
    whole = sum(losses[0])
    assert losses[1] == [0.0, pytest.approx(whole)] and losses[2] == losses[0] == [whole / 2, whole / 2]


def test_a_step_without_a_label_is_an_error_in_a_line() -> None:
    trial = unlabelled(Trial(steps=3, warmup=1, accumulate=2), lambda step, micro, split: step == 1)
    with pytest.raises(ValueError, match=r"^step 2: no token of its batches has a label, all are -100") as told:
        trial.run()
    assert "\n" not in str(told.value) and len(trial.measurement.measured.step_time_s) == 1


def test_validation_counts_only_what_has_labels() -> None:
    """The loss of each batch weighs as many tokens as it has, and a batch without any says nothing."""
    whole = Trial(steps=2, warmup=1, eval_every=2).run().eval_loss
    part = unlabelled(Trial(steps=2, warmup=1, eval_every=2), lambda step, micro, split: split == "validation" and step == 0)
    assert part.run().eval_loss == pytest.approx(whole) and math.isfinite(whole[0])
    nothing = unlabelled(Trial(steps=2, warmup=1, eval_every=2), lambda step, micro, split: split == "validation")
    with pytest.raises(ValueError, match="^validation after step 2: no token of its batches has a label"):
        nothing.run()


def test_checkpoints_are_in_no_timing() -> None:
    trial = Trial(steps=8, warmup=2, taken=1, eval_every=4, save_every=2, step_time_s=0.1, eval_time_s=5.0)
    measured = trial.run()
    assert trial.phases == ["warm-up", "save", "warm-up", "step", "eval", "step", "save", "step", "save", "step", "eval"] + [
        "step"
    ]
    assert measured.save_s == pytest.approx(3 * 7.0), "after steps 2, 4 and 6; the last one is the caller's"
    assert measured.eval_step == [4, 8]
    assert measured.timed_s == pytest.approx(0.5)
    assert measured.warmup_s == pytest.approx(0.2)
    assert measured.step_time_s == pytest.approx([0.1] * 7)


def test_the_schedule_goes_on_where_it_was() -> None:
    trial = Trial(steps=8, warmup=0, taken=4, skipped=1, schedule="linear", skip_at=2)
    trial.run()
    rates = trial.measurement.measured.learning_rate
    assert rates == pytest.approx([1 - 3 / 8, 1 - 4 / 8, 1 - 4 / 8, 1 - 5 / 8])


def test_traffic_is_per_timed_step_and_unknown_is_null() -> None:
    measured = Trial(steps=5, warmup=2, bytes_per_step=7).run()
    del measured.timed_counters["disk_read_bytes"]
    traffic = derive.traffic(measured, warmup=2)
    assert (traffic.h2d_bytes, traffic.d2h_bytes, traffic.disk_read_bytes) == (7, 0, None)


def test_losses_are_told_one_step_late() -> None:
    trial = Trial(steps=3, warmup=1)
    trial.run()
    (first, unknown), (second, loss), _ = trial.told
    assert (first, unknown, second) == (1, None, 2)
    assert loss == pytest.approx(math.log(8))
    assert trial.phases == ["warm-up", "step"]


def test_a_step_that_fails_is_not_counted() -> None:
    trial = Trial(steps=5, warmup=1, step_time_s=0.1, crash_at=4)
    with pytest.raises(RuntimeError, match="step 4"):
        trial.run()
    measured = trial.measurement.measured
    metrics = trial.metrics(measured)
    assert len(measured.step_time_s) == 3
    assert "tokens_per_s" not in metrics
    assert derive.traffic(measured, warmup=1).h2d_bytes is None


@pytest.mark.parametrize(
    ("schedule", "rates"),
    [("constant", [1, 1, 1, 1]), ("linear", [1, 0.75, 0.75, 0.5]), ("cosine", [1, 0.8535534, 0.8535534, 0.5])],
)
def test_a_skipped_step_does_not_advance_the_schedule(schedule: str, rates: list[float]) -> None:
    trial = Trial(steps=4, warmup=1, skip_at=2, schedule=schedule)
    measured = trial.run()
    assert measured.learning_rate == pytest.approx(rates)
    assert trial.engine.learning_rates == ([] if schedule == "constant" else pytest.approx(rates))


def test_schedules_fall_to_zero() -> None:
    assert schedule_factor("linear", 10, 10) == schedule_factor("cosine", 10, 10) == 0
    assert schedule_factor("constant", 10, 10) == 1


def test_norms_before_and_after_clipping() -> None:
    trial = Trial(steps=2, warmup=1)  # the dummy's norm is 2, clipped to 1
    metrics = trial.metrics(trial.run())
    assert metrics["grad_norm_before_clip"] == [2.0, 2.0]
    assert metrics["grad_norm_after_clip"] == [1.0, 1.0]


def test_what_counts_as_diverged() -> None:
    assert "step 2 is not finite" in (derive.diverged(Trial(steps=4, warmup=1, nan_at=2).run(), 1) or "")
    assert "step 7 is not finite" in (derive.diverged(Trial(steps=4, warmup=1, nan_at=2).run(), 1, taken=5) or "")
    assert derive.diverged(Trial(steps=4, warmup=1, nan_at=2, skip_at=2).run(), 1) is None
    assert derive.diverged(Trial(steps=4, warmup=1, nan_at=4, skip_at=4).run(), 1)
    assert "every timed step" in (derive.diverged(Trial(steps=2, warmup=1, skip_at=2).run(), 1) or "")
    assert derive.diverged(Trial(steps=4, warmup=1).run(), 1) is None
