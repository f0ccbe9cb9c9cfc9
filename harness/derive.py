"""From raw samples to a record's derived numbers. Every formula of the harness is here, once.

FLOPs formulas are the models' own (`models.flops`); nothing here knows how a step ran.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from harness.measure import RawResults
from harness.record import Energy, Metrics, Resolved, Samples, Traffic
from models.flops import FlopCount, Recompute, hardware_tflops, model_tflops, relative_tflops, tflops_6n
from systems.settings import StepOutcome

TRAFFIC_KEYS = tuple(Traffic.model_fields)
DEFERRED_SHARE = 0.1


@dataclass(frozen=True, kw_only=True)
class StepFlops:
    """What one optimizer step of one rank computes. parameters, flops: None where no model was built or counted.

    activated: parameters that a token uses, None where that is all.
    """

    parameters: int | None = None
    activated: int | None = None
    flops: FlopCount | None = None
    accumulate: int = 1
    recompute: Recompute = "none"

    @property
    def sizes(self) -> dict[str, int | None]:
        """Fields of `Resolved`."""
        return {"parameters": self.parameters, "activated_parameters": self.activated}

    def tflops(self, step_time_s: float, tokens: int) -> dict[str, float | str | None]:
        """Fields of `Metrics`. tokens: of one rank in one optimizer step."""
        fields: dict[str, float | str | None] = {}
        if self.parameters is not None:
            used = self.parameters if self.activated is None else self.activated
            size = {"parameters": used, "tokens": tokens, "step_time_s": step_time_s}
            fields |= {"tflops_6n": tflops_6n(**size), "relative_tflops": relative_tflops(**size)}  # type: ignore[arg-type]
        if self.flops is not None:
            model = model_tflops(self.flops, step_time_s=step_time_s, accumulate=self.accumulate)
            hardware = hardware_tflops(
                self.flops, recompute=self.recompute, step_time_s=step_time_s, accumulate=self.accumulate
            )
            fields |= {"model_tflops": model, "hardware_tflops": hardware, "flops_formula": self.flops.formula_version}
        return fields


def _sum(parts: Sequence[float]) -> float:
    """Exactly rounded sum; NaN, not an error, for infinities of both signs."""
    return math.fsum(parts) if all(map(math.isfinite, parts)) else sum(parts)


def _after_clip(outcome: StepOutcome) -> float | None:
    return None if outcome.norm is None else outcome.norm * outcome.clip_factor


def samples(measured: RawResults) -> dict[str, object]:
    """Fields of `Samples`, not yet cleaned: a norm may be infinite."""
    outcomes = measured.outcomes
    fields: dict[str, object] = {
        "step_time_s": measured.step_time_s,
        "micro_batch_loss": measured.micro_batch_loss,
        "norm": [outcome.norm for outcome in outcomes],
        "clip_factor": [outcome.clip_factor for outcome in outcomes],
        "loss_scale": [outcome.loss_scale for outcome in outcomes],
        "skipped": [outcome.skipped for outcome in outcomes],
        "learning_rate": measured.learning_rate,
    }
    assert set(fields) == set(Samples.model_fields)
    return fields


def useful_steps(measured: RawResults, warmup: int) -> int:
    """Timed steps that updated the model."""
    timed = len(measured.step_time_s) - warmup
    return timed - sum(outcome.skipped for outcome in measured.outcomes[warmup:])


def metrics(measured: RawResults, resolved: Resolved, work: StepFlops, ranks: int) -> dict[str, object]:
    """Fields of `Metrics`, not yet cleaned. Rates are left out (null) unless the timed region was completed."""
    assert resolved.warmup_steps is not None
    losses = [_sum(parts) for parts in measured.micro_batch_loss]
    times = measured.step_time_s[resolved.warmup_steps :]
    fields: dict[str, object] = {
        "loss": losses,
        "grad_norm_before_clip": [outcome.norm for outcome in measured.outcomes],
        "grad_norm_after_clip": [_after_clip(outcome) for outcome in measured.outcomes],
        "step_time_s": times,
        "median_step_time_s": statistics.median(times) if times else None,
        "eval_step": measured.eval_step,
        "eval_loss": measured.eval_loss,
    }
    if measured.complete and measured.timed_s:
        assert resolved.tokens_per_step is not None and resolved.global_batch_samples is not None
        useful = useful_steps(measured, resolved.warmup_steps)
        steps_per_s = useful / measured.timed_s
        fields |= {
            "timed_region_s": measured.timed_s,
            "mean_step_time_s": measured.timed_s / len(times),
            "useful_steps": useful,
            "tokens_per_s": resolved.tokens_per_step * steps_per_s,
            "samples_per_s": resolved.global_batch_samples * steps_per_s,
            "tokens_per_s_per_device": resolved.tokens_per_step * steps_per_s / ranks,
        }
        if useful:
            fields |= work.tflops(1 / steps_per_s, resolved.tokens_per_step // ranks)
        share = utilisation(fields, resolved)
        fields["mfu"] = None if share is not None and share > 1 else share
    assert set(fields) <= set(Metrics.model_fields)
    return fields


def utilisation(metrics: Mapping[str, object], resolved: Resolved) -> float | None:
    """model_tflops as a share of the device's peak; above 1 it cannot be true, and no record holds it as mfu."""
    achieved, peak = metrics.get("model_tflops"), resolved.peak_flops_per_s
    return achieved * 1e12 / peak if isinstance(achieved, float) and peak else None


def impossible(share: float | None, resolved: Resolved) -> str | None:
    """What makes the numbers of a run that reached its end untrue, or None. share: as `utilisation` gives it."""
    if share is None or share <= 1:
        return None
    peak = (resolved.peak_flops_per_s or 0) / 1e12
    return (
        f"model_tflops is {share:.0%} of the {peak:g} TFLOPS that {resolved.device_label} can do: correct its entry in "
        "PEAK_FLOPS_PER_S (harness/environment.py) or the FLOPs count; use none of this record's rates"
    )


def _per_step(total: int, steps: int) -> int | float:
    return total // steps if total % steps == 0 else total / steps


def traffic(measured: RawResults, warmup: int) -> Traffic:
    """Bytes a step over the timed region; null for what the engine does not count, or where no region was completed."""
    timed = len(measured.step_time_s) - warmup
    if not measured.complete or timed < 1:
        return Traffic()
    counted: Mapping[str, int] = measured.timed_counters
    return Traffic(**{key: _per_step(counted[key], timed) for key in TRAFFIC_KEYS if key in counted})


def energy(measured: RawResults, resolved: Resolved) -> Energy:
    if not measured.complete or measured.timed_joules is None or not resolved.global_batch_samples:
        return Energy()
    useful = useful_steps(measured, resolved.warmup_steps or 0)
    return Energy(joules_per_sample=measured.timed_joules / (useful * resolved.global_batch_samples) if useful else None)


def notes(measured: RawResults, warmup: int) -> list[str]:
    """What a reader of the numbers should know."""
    found = []
    skipped = sum(outcome.skipped for outcome in measured.outcomes)
    if skipped:
        timed = sum(outcome.skipped for outcome in measured.outcomes[warmup:])
        found.append(f"{skipped} steps were skipped, {timed} of them timed; throughput counts the useful steps only")
    if measured.complete and measured.timed_s:
        deferred = measured.timed_s - math.fsum(measured.step_time_s[warmup:])
        if deferred > DEFERRED_SHARE * measured.timed_s:
            found.append(f"{deferred:.4g} s of the timed region lie behind the last step boundary: quote mean_step_time_s")
    if measured.eval_step:
        found.append("validation passes were cut out of the timed region by drains, which also end overlap across steps")
    return found


def diverged(measured: RawResults, warmup: int, taken: int = 0) -> str | None:
    """What makes a run that reached its end a diverged one, or None. taken: steps of the run that it resumed.

    A loss that is not finite counts if its step updated the model or was the last; so do timed steps all skipped.
    """
    last = len(measured.outcomes) - 1
    for step, (parts, outcome) in enumerate(zip(measured.micro_batch_loss, measured.outcomes, strict=False)):
        if not math.isfinite(_sum(parts)) and (step == last or not outcome.skipped):
            return f"the loss of step {taken + step + 1} is not finite"
    timed = measured.outcomes[warmup:]
    if timed and all(outcome.skipped for outcome in timed):
        return f"every timed step was skipped ({len(timed)} of them)"
    return None
