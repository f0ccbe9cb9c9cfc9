"""A forecast of a run that is over: what `harness plan` would have said of it, asked as if nothing had been run."""

from __future__ import annotations

from collections.abc import Sequence
from functools import lru_cache, partial

from harness.optimizer import hyperparameters_of
from harness.options_in_force import otherwise
from harness.record import Record
from harness.request import of_rank
from harness.spec import RunSpec
from models import registry as models_registry
from models.loss import token_loss
from models.mixture_shape import divided_among
from models.shape import ModelShape
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
    shape = _shape(spec.model, spec.set, spec.ranks)
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
        disk_memory=_disk_memory(spec, profile),
        moments=chosen_by(hyperparameters_of(spec)).moments,
        expert_ranks=divided_among(shape),
    )
    system = registry.get(spec.system)
    options = registry.parse_options(system, spec.option).model_copy(update=otherwise(record))
    if memory.host_second_version_bytes is None and "run_ahead" in type(options).model_fields:
        options = options.model_copy(update={"run_ahead": False})  # the record is older than updates that run ahead
    return forecast(system, options, question, _observations(spec.model, tuple(spec.set), spec.ranks))


def _disk_memory(spec: RunSpec, profile: HardwareProfile) -> int:
    """Of a node: the run's budget, or else the profile's disk, for what was free then is in no record. 0 without a disk."""
    if spec.disk is None:
        return 0
    if profile.disk_bytes is None:
        raise ValueError(f"it had a disk, and {profile.description} has none")
    return profile.disk_bytes.value if spec.disk_memory is None else spec.disk_memory


def _shape(name: str, changes: Sequence[str], ranks: int) -> ModelShape:
    return of_rank(models_registry.resolve(name, registry.split_assignments("set", changes)), 0, ranks)


@lru_cache(maxsize=1)
def _observations(name: str, changes: tuple[str, ...], ranks: int) -> Observations:
    """Of one model at a time: they are large, and runs of one come one behind the other."""
    shape = _shape(name, changes, ranks)
    with Unfilled():
        model = models_registry.build(shape)
    return Observations(model, partial(token_loss, objective=shape.objective))
