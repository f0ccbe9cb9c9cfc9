"""A forecast of a run that is over: what `harness plan` would have said of it, asked as if nothing had been run."""

from __future__ import annotations

from functools import lru_cache, partial

from harness.optimizer import hyperparameters_of
from harness.options_in_force import otherwise
from harness.record import Record
from models import registry as models_registry
from models.loss import token_loss
from systems import registry
from systems.optimizers.choice import chosen_by
from systems.planning.allowance import CUDA
from systems.planning.hardware import HardwareProfile
from systems.prediction.forecast import Forecast, Observations, Question, forecast
from systems.prediction.meta_step import Unfilled


def hindcast(record: Record, profile: HardwareProfile) -> Forecast:
    """Of the record's system, model, work and budgets, all of which it has to know. Raises ValueError, one line."""
    spec, resolved, memory = record.spec, record.resolved, record.memory
    if None in (resolved.batch_size, resolved.seq_len, memory.device_budget_bytes, resolved.host_budget_bytes):
        raise ValueError(f"{record.run_id} does not say its batch and its budgets")
    question = Question(
        profile=profile,
        device_memory=memory.device_budget_bytes or 0,
        host_memory=resolved.host_budget_bytes or 0,
        ranks=spec.ranks,
        batch_size=resolved.batch_size or 0,
        seq_len=resolved.seq_len or 0,
        dtype=spec.dtype,
        accumulate=spec.accumulate,
        recompute=spec.recompute,
        clip=spec.clip,
        seed=spec.seed,
        allowance=CUDA,
        moments=chosen_by(hyperparameters_of(spec)).moments,
    )
    system = registry.get(spec.system)
    options = registry.parse_options(system, spec.option).model_copy(update=otherwise(record))
    if memory.host_second_version_bytes is None and "run_ahead" in type(options).model_fields:
        options = options.model_copy(update={"run_ahead": False})  # the record is older than updates that run ahead
    return forecast(system, options, question, _observations(spec.model, tuple(spec.set)))


@lru_cache(maxsize=1)
def _observations(name: str, changes: tuple[str, ...]) -> Observations:
    """Of one model at a time: they are large, and runs of one come one behind the other."""
    shape = models_registry.resolve(name, registry.split_assignments("set", changes))
    with Unfilled():
        model = models_registry.build(shape)
    return Observations(model, partial(token_loss, objective=shape.objective))
