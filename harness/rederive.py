"""A kept record's derived numbers, worked out again from its raw samples by the formulas of derive.py.

Raw are samples, the timed region's seconds, validation losses, counters and peaks; joules and the bytes of the traffic are kept
as shares of a step alone, so only digests hold them (digests.py). FLOPs are counted anew on a model without values.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from functools import cache
from typing import Any

from harness import derive
from harness.environment import versions
from harness.measure import RawResults
from harness.record import Metrics, Record, build_part
from models import registry as models_registry
from models.flops import FORMULA_VERSION, FlopCount, count
from systems import registry
from systems.settings import StepOutcome

NEAR = 1e-13  # relative: of another order of the same operations, not of one among two billion parameters
OF_FLOPS = frozenset({"model_tflops", "hardware_tflops", "mfu"})


def wrong(record: Record) -> Iterator[str]:
    """A line for each derived number that does not follow from the raw ones."""
    if not record.samples.step_time_s or record.resolved.warmup_steps is None:
        if record.metrics != Metrics():
            yield "metrics: there are no samples that they could be of"
        return
    try:
        work = _work(record)
        made = build_part(Metrics, **derive.metrics(_raw(record), record.resolved, work, record.spec.ranks))
    except (ValueError, AssertionError, ZeroDivisionError) as error:
        yield f"metrics: they cannot be worked out from the samples: {type(error).__name__}: {error}"
        return
    for name in Metrics.model_fields:
        kept, again = getattr(record.metrics, name), getattr(made, name)
        if not _same(kept, again, NEAR + (_rotary_share(record, work) if name in OF_FLOPS else 0.0)):
            yield f"metrics.{name} is {_short(kept)}, its samples make {_short(again)}"
    timed, region = record.phases_s.get("timed"), record.metrics.timed_region_s
    if timed is not None and region is not None and not _same(timed, region):
        yield f"metrics.timed_region_s is {region}, phases_s.timed {timed}"
    yield from _counts(record)


def _counts(record: Record) -> Iterator[str]:
    """Lists that are as long as each other, and resolved numbers that are products of others."""
    samples, resolved = record.samples, record.resolved
    steps = len(samples.step_time_s)
    for name in ("norm", "clip_factor", "skipped", "learning_rate"):
        if record.status == "ok" and (found := len(getattr(samples, name))) not in (0, steps):
            yield f"samples.{name} has {found} entries, samples.step_time_s {steps}"
    if None not in (resolved.global_batch_samples, resolved.seq_len, resolved.tokens_per_step):
        assert resolved.global_batch_samples is not None and resolved.seq_len is not None
        if resolved.batch_size is not None:
            product = resolved.batch_size * record.spec.ranks * record.spec.accumulate
            if product != resolved.global_batch_samples:
                yield f"resolved.global_batch_samples is {resolved.global_batch_samples}, its factors make {product}"


def _raw(record: Record) -> RawResults:
    """What the run measured, as far as its record has it."""
    samples, metrics = record.samples, record.metrics
    outcomes = [
        StepOutcome(step, norm, 1.0 if factor is None else factor, 1.0 if scale is None else scale, skipped)
        for step, (norm, factor, scale, skipped) in enumerate(
            zip(samples.norm, samples.clip_factor, samples.loss_scale, samples.skipped, strict=True)
        )
    ]
    return RawResults(
        step_time_s=samples.step_time_s,
        micro_batch_loss=[[math.nan if part is None else part for part in parts] for parts in samples.micro_batch_loss],
        learning_rate=samples.learning_rate,
        outcomes=outcomes,
        eval_step=metrics.eval_step,
        eval_loss=[math.nan if loss is None else loss for loss in metrics.eval_loss],
        timed_s=metrics.timed_region_s,
        complete=metrics.timed_region_s is not None,
    )


def _work(record: Record) -> derive.StepFlops:
    flops = None
    if record.metrics.flops_formula is not None:
        flops = _counted(record)
    resolved, spec = record.resolved, record.spec
    sizes = {"parameters": resolved.parameters, "activated": resolved.activated_parameters}
    return derive.StepFlops(**sizes, flops=flops, accumulate=spec.accumulate, recompute=spec.recompute)


def _rotary_share(record: Record, work: derive.StepFlops) -> float:
    """Of a forward's FLOPs, the most that positions times frequencies of rotary embeddings are: one version of transformers has
    a matrix product there, which is counted, and another has not. 0 by the same version, and of models without them.
    """
    shape, resolved = record.resolved.shape or {}, record.resolved
    same = record.environment.versions.get("transformers") == versions().get("transformers")
    if work.flops is None or same or "key_value_heads" not in shape:
        return 0.0
    assert resolved.batch_size is not None and resolved.seq_len is not None
    head = shape.get("head_size") or shape["hidden_size"] / shape["num_heads"]
    return float(resolved.batch_size * resolved.seq_len * head / work.flops.forward.causal)


def _counted(record: Record) -> FlopCount:
    """Raises ValueError: the model is not one of those here, or is counted by another formula now."""
    if record.metrics.flops_formula != FORMULA_VERSION:
        raise ValueError(f"FLOPs are counted by {FORMULA_VERSION} now, not {record.metrics.flops_formula}")
    assert record.resolved.batch_size is not None and record.resolved.seq_len is not None
    return _count(record.spec.model, tuple(record.spec.set), record.resolved.batch_size, record.resolved.seq_len)


@cache
def _count(model: str, changes: Sequence[str], batch_size: int, seq_len: int) -> FlopCount:
    shape = models_registry.resolve(model, registry.split_assignments("set", changes))
    return count(shape, batch_size=batch_size, seq_len=seq_len)


def _same(kept: Any, again: Any, near: float = NEAR) -> bool:
    if isinstance(kept, list) and isinstance(again, list):
        return len(kept) == len(again) and all(map(_same, kept, again))
    if isinstance(kept, float | int) and isinstance(again, float | int):
        return math.isclose(kept, again, rel_tol=near)
    return bool(kept == again)


def _short(value: Any) -> str:
    text = str(value)
    return text if len(text) <= 60 else f"{text[:57]}..."
