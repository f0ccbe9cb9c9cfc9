"""A finished record, logged to Weights & Biases: per-step curves, and the derived numbers as the run's summary.

After the run and not during it, so that nothing is sent from inside a timed step.
"""

from __future__ import annotations

import importlib
from collections.abc import Sequence
from typing import Any, Literal

from harness.record import Record

PROJECT = "offload-training"


def _curves(record: Record) -> list[dict[str, float]]:
    """One dict of what is known of it for each step the run took itself."""
    lists: dict[str, Sequence[float | None]] = {
        "loss": record.metrics.loss,
        "grad_norm_before_clip": record.metrics.grad_norm_before_clip,
        "step_time_s": record.samples.step_time_s,
        "learning_rate": record.samples.learning_rate,
    }
    steps = max((len(values) for values in lists.values()), default=0)
    rows: list[dict[str, float]] = [{} for _ in range(steps)]
    for name, values in lists.items():
        for row, value in zip(rows, values, strict=False):
            if value is not None:
                row[name] = value
    for step, loss in zip(record.metrics.eval_step, record.metrics.eval_loss, strict=True):
        if loss is not None:
            rows[step - 1 - (record.resolved.steps_before or 0)]["eval_loss"] = loss
    return rows


def log(record: Record, mode: Literal["offline", "online"]) -> None:
    wandb: Any = importlib.import_module("wandb")
    tree = record.model_dump(mode="json")
    config = {"spec": tree["spec"], "resolved": tree["resolved"], "environment": tree["environment"]}
    with wandb.init(project=PROJECT, name=record.run_id, mode=mode, config=config, tags=[record.status]) as run:
        for step, row in enumerate(_curves(record), start=1 + (record.resolved.steps_before or 0)):
            run.log(row, step=step)
        scalars = {key: value for key, value in tree["metrics"].items() if not isinstance(value, list)}
        run.summary.update({**scalars, "status": record.status, **{f"memory.{k}": v for k, v in tree["memory"].items()}})
