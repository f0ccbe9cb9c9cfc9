"""From a spec to everything a run needs, looked up and checked but not built: finds what is wrong with the input."""

from __future__ import annotations

import dataclasses
from dataclasses import dataclass, replace

import torch
from pydantic import BaseModel
from torch import nn

from harness import environment
from harness.availability import load, package_of
from harness.channel import WorkerJob
from harness.measure import CLOCK
from harness.optimizer import as_settings, hyperparameters_of
from harness.record import Resolved, build_part
from harness.spec import Device, RunSpec
from models import registry as models_registry
from models.data import Dataset, open_dataset
from models.family import FillWeights
from models.mixture_shape import divided_among
from models.shape import ModelShape
from systems import checkpoint, registry
from systems.checkpoint import LoopState
from systems.errors import UnavailableError
from systems.machine.limits import MachineLimits
from systems.machine.threads import cores_each
from systems.prediction.meta_step import Unfilled
from systems.pretrained import FolderWeights, folder_of, folder_weights, stored_tensors
from systems.ranks.launchers import chosen_threads
from systems.ranks.ranks import Ranks
from systems.settings import Settings
from systems.system import System


@dataclass(frozen=True, kw_only=True)
class Request:
    """A job, resolved. needs_model: False for a system that runs without one being built."""

    system: System
    options: BaseModel
    shape: ModelShape
    dataset: Dataset
    settings: Settings
    resolved: Resolved
    resumed: LoopState | None

    @property
    def needs_model(self) -> bool:
        return self.system.abilities.model

    def build(self) -> nn.Module:
        """The model on the meta device, without values but for its buffers."""
        with Unfilled():
            model = models_registry.build(self.shape)
        if isinstance(self.settings.initial_weights, FolderWeights):
            with self.settings.initial_weights.beside(model):
                pass  # nothing of it is taken back
        return model

    def on(self, ranks: Ranks) -> Request:
        """With what is only known when they have met: how many of them share this host."""
        return replace(self, settings=replace(self.settings, local_ranks=ranks.local_size))


def choose_device(asked: Device | None) -> Device:
    """cuda if there is one, unless the user says otherwise. Asked for and not there, it makes the run unavailable."""
    found = torch.cuda.is_available()
    if asked == "cuda" and not found:
        raise UnavailableError("--device cuda: torch finds no CUDA device here: see harness doctor, or use --device cpu")
    return asked or ("cuda" if found else "cpu")


def set_threads(limits: MachineLimits, ranks: int) -> None:
    """A rank's part of the usable cores, unless the user's OMP_NUM_THREADS asks for another number. ranks: of this host."""
    torch.set_num_threads(chosen_threads() or cores_each(ranks, limits))


def _check_steps(spec: RunSpec, shape: ModelShape, taken: int) -> tuple[int, int]:
    """(steps, warm-up steps). Raises ValueError for numbers that only the model shows to be wrong."""
    steps, warmup = spec.resolve_steps(taken)
    for name, every in (("--eval-every", spec.eval_every), ("--save-every", spec.save_every)):
        if every and every > steps:  # a resumed run may have its last one behind it: the command is that of the whole
            raise ValueError(f"{name} {every} is never reached in {steps} steps: lower it or raise --steps")
    if isinstance(spec.recompute, tuple) and max(spec.recompute) >= (blocks := models_registry.block_count(shape)):
        raise ValueError(f"--recompute names block {max(spec.recompute)}, {shape.name} has 0-{blocks - 1}")
    return steps, warmup


def _open_data(spec: RunSpec, shape: ModelShape, seq_len: int) -> Dataset:
    dataset = open_dataset(spec.data, vocab_size=shape.vocab_size, seed=spec.seed, objective=shape.objective)
    dataset.check(seq_len)
    if spec.eval_every:
        dataset.check(seq_len, split="validation")
    return dataset


def _first_values(spec: RunSpec, shape: ModelShape) -> FillWeights | None:
    if spec.weights is None:
        return models_registry.initial_weights(shape, spec.seed)
    with Unfilled():
        return folder_weights(models_registry.build(shape), spec.weights)


def of_rank(shape: ModelShape, rank: int, ranks: int) -> ModelShape:
    """With the experts that this rank has. Raises ValueError where the ranks are no whole number of sets."""
    shared = divided_among(shape)
    if ranks % shared:
        raise ValueError(
            f"--set expert_ranks={shared} does not divide --ranks {ranks}: each set of experts is shared by so many; change "
            "one of the two"
        )
    return shape if shared == 1 else dataclasses.replace(shape, expert_rank=rank % shared)  # type: ignore[call-arg]


def resolve(job: WorkerJob, device: Device) -> Request:
    """Raises ValueError, one line, for bad input, and UnavailableError for a system that does not load."""
    spec = job.spec
    system = load(spec.system)
    options = registry.parse_options(system, spec.option)
    if spec.trace is not None and not system.abilities.trace:
        raise ValueError(
            f"--trace: {spec.system} does not label its phases: use resident or one of this project's own strategies"
        )
    if spec.phases and not system.abilities.phases:
        raise ValueError(f"--phases: {spec.system} does not tell its phases: use one of this project's own strategies")
    if spec.disk is not None and not system.abilities.disk:
        raise ValueError(f"--disk: {spec.system} keeps no states on a disk: use one of this project's own strategies")
    if spec.weights is not None:
        stored_tensors(folder_of(spec.weights))  # before anything else is made of that folder
    shape = of_rank(models_registry.resolve(spec.model, registry.split_assignments("set", spec.set)), job.rank, job.ranks)
    batch_size, seq_len = spec.batch_size or shape.batch_size, spec.seq_len or shape.seq_len
    shape.check_run(batch_size=batch_size, seq_len=seq_len)
    resumed = None if spec.resume is None else checkpoint.position(spec.resume)
    taken = 0 if resumed is None else resumed.steps
    steps, warmup = _check_steps(spec, shape, taken)
    if spec.checkpoint is not None and job.rank == 0:
        checkpoint.check_folder(spec.checkpoint)
    dataset = _open_data(spec, shape, seq_len)
    label = "cpu-emulated" if device == "cpu" else torch.cuda.get_device_name()
    hyper = as_settings(hyperparameters_of(spec))
    if "optimizer" in hyper and not system.abilities.optimizers:
        raise ValueError(f"--optimizer {spec.optimizer}: {spec.system} trains with Adam alone: leave it out")
    settings = Settings(
        device=device,
        device_memory=spec.device_memory,
        host_memory=job.host_budget_bytes if spec.host_memory is None else spec.host_memory,
        disk=spec.disk,
        disk_memory=spec.disk_memory,
        disk_rate=spec.disk_rate,
        dtype=spec.dtype,
        accumulate=spec.accumulate,
        clip=spec.clip,
        recompute=spec.recompute,
        seed=spec.seed,
        ranks=job.ranks,
        expert_ranks=divided_among(shape),
        **hyper,
        initial_weights=_first_values(spec, shape),
    )
    samples = batch_size * spec.accumulate * job.ranks
    resolved = build_part(
        Resolved,
        device=device,
        device_label=label,
        steps=steps,
        steps_before=taken,
        warmup_steps=warmup,
        timed_steps=steps - taken - warmup,
        batch_size=batch_size,
        seq_len=seq_len,
        global_batch_samples=samples,
        tokens_per_step=samples * seq_len,
        host_budget_bytes=settings.host_memory,
        shape=dataclasses.asdict(shape),
        options=options,
        package=package_of(system),
        dtypes={"weights": spec.dtype, "gradients": spec.dtype, "states": "fp32"},
        clock=CLOCK,
        data={"source": dataset.source, "sha256": dataset.sha256},
        peak_flops_per_s=environment.peak_flops_per_s(label, spec.dtype),
    )
    return Request(
        system=system,
        options=options,
        shape=shape,
        dataset=dataset,
        settings=settings,
        resolved=resolved,
        resumed=resumed,
    )
