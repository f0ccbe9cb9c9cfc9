"""Trains systems in a process of their own: packages change what is global, and one process a system would be slow.

As a module it is the process: `python -m tests.baselines.training JOBS RESULTS`, both files of torch.save. Of several
ranks each is one, `... JOBS RESULTS RANK SIZE MEET`: they meet in a file, and the results are the first one's.
"""

from __future__ import annotations

import os
import subprocess
import sys
import time
import traceback
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from pathlib import Path
from typing import Any

import torch
from torch import nn

from models import registry as models_registry
from models.loss import count_labels, token_loss
from systems import registry
from systems.ranks.joining import begun
from systems.ranks.ranks import Ranks, SingleRank
from systems.settings import AdamSettings, Settings
from systems.system import Engine, on_ranks
from tests.systems import models_plain

ROOT = Path(__file__).resolve().parents[2]
THREADS = 1
STEPS = 4
HOST = 8 << 30
SMALLER = {"opt-tiny": {"num_layers": "2"}}


@dataclass(frozen=True)
class Job:
    """model: a size of models.registry, built on the meta device, or one of tests.systems.models_plain with values."""

    system: str
    model: str = "opt-tiny"
    dtype: str = "fp32"
    accumulate: int = 2
    clip: float = 1.0
    recompute: str = "full"
    options: tuple[str, ...] = ()


@dataclass
class Result:
    """What a job came to. written: values once the first ones were written back, by the first rank;
    written_loss: of the first batch then.

    losses: of a step, all ranks' together. different: names of values that are others on another rank.
    names: of the state dict of the model before a package had it. exported: what the engine gave for it, with `end`.
    """

    error: str | None = None
    start: dict[str, torch.Tensor] = field(default_factory=dict)
    end: dict[str, torch.Tensor] = field(default_factory=dict)
    names: list[str] = field(default_factory=list)
    exported: dict[str, torch.Tensor] = field(default_factory=dict)
    after_lr_0: dict[str, torch.Tensor] = field(default_factory=dict)
    losses: list[float] = field(default_factory=list)
    norms: list[float | None] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)
    eval_loss: float = 0.0
    written_loss: float = 0.0
    written: dict[str, torch.Tensor] = field(default_factory=dict)
    different: list[str] = field(default_factory=list)
    counters: dict[str, int] = field(default_factory=dict)
    memory: dict[str, Any] = field(default_factory=dict)
    statistics: dict[str, Any] = field(default_factory=dict)


Batch = dict[str, torch.Tensor]


@dataclass(frozen=True)
class Work:
    model: nn.Module
    initial_weights: Callable[[str, torch.Tensor], None] | None
    loss: Callable[..., torch.Tensor]
    vocabulary: int


def work_of(job: Job) -> Work:
    if job.model in models_plain.CASES:
        loss = partial(_plain_loss, models_plain.CASES[job.model].loss)
        return Work(models_plain.build(job.model), None, loss, 256)
    shape = models_registry.resolve(job.model, SMALLER.get(job.model, {}))
    weights = models_registry.initial_weights(shape, 0)
    loss = partial(token_loss, objective=shape.objective)
    return Work(models_registry.build(shape).train(), weights, loss, shape.vocab_size)


def _plain_loss(loss: Callable[..., torch.Tensor], model: Any, batch: Batch, label_count: int) -> torch.Tensor:
    return loss(model, batch["input_ids"], label_count)


def batches(job: Job, vocabulary: int, ranks: Ranks, *, steps: int = STEPS) -> list[list[Batch]]:
    """[step][micro-batch] of this rank: random tokens, the same for every system. One rank that accumulates as often has those
    of all ranks, by turns.
    """
    generator = torch.Generator().manual_seed(1)
    ids = torch.randint(0, vocabulary, (steps, job.accumulate, ranks.size, 2, models_plain.LENGTH), generator=generator)
    return [[{"input_ids": micro[ranks.rank], "labels": micro[ranks.rank].clone()} for micro in step] for step in ids]


def start(job: Job, work: Work, ranks: Ranks) -> Engine:
    system = registry.get(job.system)
    settings = Settings(
        device="cpu",
        device_memory=1 << 30,
        host_memory=HOST,
        dtype=job.dtype,  # type: ignore[arg-type]
        accumulate=job.accumulate,
        clip=job.clip,
        recompute=job.recompute,  # type: ignore[arg-type]
        adam=AdamSettings(lr=1e-3),
        initial_weights=work.initial_weights,
        ranks=ranks.size,
    )
    options = registry.parse_options(system, job.options)
    if ranks.size > 1:
        return on_ranks(system).initialize(work.model, settings, options, ranks=ranks)
    return system.initialize(work.model, settings, options)


def _step(engine: Engine, work: Work, step: list[Batch], ranks: Ranks) -> float:
    label_count = sum(ranks.exchange("labels", sum(count_labels(batch) for batch in step)))
    total = sum(float(engine.forward_backward(work.loss, batch, label_count)) for batch in step)
    engine.step()
    return sum(ranks.exchange("loss", total))


def _evaluate(engine: Engine, work: Work, batch: Batch) -> float:
    engine.eval()
    with torch.no_grad():
        value = float(work.loss(engine, batch, count_labels(batch)))
    engine.train()
    return value


def _values(engine: Engine) -> dict[str, torch.Tensor]:
    with engine.summon() as values:
        return {name: value.clone() for name, value in values.items()}


def train(job: Job, ranks: Ranks | None = None) -> Result:
    """Some steps, a validation, a step at rate 0, the first values written back, and all that an engine tells."""
    result, ranks = Result(), ranks or SingleRank()
    work = work_of(job)
    steps = batches(job, work.vocabulary, ranks)
    result.names = list(work.model.state_dict())
    engine = start(job, work, ranks)
    result.start = _values(engine)
    result.losses = [_step(engine, work, step, ranks) for step in steps[:-1]]
    engine.drain()
    result.eval_loss = _evaluate(engine, work, steps[0][0])
    result.end, result.exported = _values(engine), dict(engine.state_dict())
    engine.set_lr(0.0)
    result.losses.append(_step(engine, work, steps[-1], ranks))
    result.after_lr_0 = _values(engine)
    with engine.summon(write=True) as values:
        for name in values if ranks.rank == 0 else ():  # its edits count
            values[name].copy_(result.start[name])
    result.written_loss = _evaluate(engine, work, steps[0][0])
    result.written = _values(engine)
    engine.drain()
    for mine in (result.end, result.written):
        for theirs in ranks.exchange("values", mine):
            result.different += [name for name, value in theirs.items() if not torch.equal(value, mine[name])]
    result.norms = [outcome.norm for outcome in engine.outcomes]
    result.skipped = [outcome.skipped for outcome in engine.outcomes]
    result.counters, result.memory = engine.counters(), vars(engine.memory())
    statistics = engine.statistics()
    result.statistics = {} if statistics is None else statistics.model_dump()
    engine.close()
    engine.close()
    return result


class Training:
    """Every job, one after the other in one new process a rank, which run beside the caller. folder: for their files."""

    def __init__(self, jobs: Sequence[Job], folder: Path, *, ranks: int = 1) -> None:
        self._jobs, self._given, self._told = jobs, folder / "results.pt", folder / "told.txt"
        asked = folder / "jobs.pt"
        torch.save(list(jobs), asked)
        command = [sys.executable, "-m", "tests.baselines.training", str(asked), str(self._given)]
        meet = [str(ranks), f"file://{folder}/meet"]
        self._processes = []
        with self._told.open("w") as told:
            for rank in range(ranks):
                self._processes.append(
                    subprocess.Popen(
                        [*command, *([str(rank), *meet] if ranks > 1 else [])],
                        cwd=ROOT,
                        env=os.environ | {"OMP_NUM_THREADS": str(THREADS), "GLOO_SOCKET_IFNAME": "lo"},
                        stdout=told,
                        stderr=subprocess.STDOUT,
                    )
                )

    def results(self) -> dict[Job, Result]:
        """Waits for the processes. A rank that fails leaves the others waiting: they are ended."""
        while None in (codes := [process.poll() for process in self._processes]):
            if any(codes):
                self.stop()
            time.sleep(0.1)
        assert not any(codes), self._told.read_text()[-3000:]
        return dict(zip(self._jobs, torch.load(self._given, weights_only=False), strict=True))

    def stop(self) -> None:
        """Ends those that still run."""
        for process in self._processes:
            process.kill()
            process.wait()


def train_all(jobs: Sequence[Job], folder: Path, *, ranks: int = 1) -> dict[Job, Result]:
    training = Training(jobs, folder, ranks=ranks)
    try:
        return training.results()
    finally:
        training.stop()


def main() -> None:
    torch.set_num_threads(THREADS)
    sys.modules["tests.baselines.training"] = sys.modules["__main__"]  # one class Job, under either name
    asked, given, *rest = sys.argv[1:]
    ranks: Ranks = SingleRank()
    if rest:
        rank, size, meet = int(rest[0]), int(rest[1]), rest[2]
        ranks = begun("cpu", rank=rank, size=size, local_rank=rank, where=meet)
    results = []
    for job in torch.load(asked, weights_only=False):
        try:
            results.append(train(job, ranks))
        except Exception:  # noqa: BLE001 - the test of this job fails with it, the others go on
            results.append(Result(error=f"{job}: {traceback.format_exc()}"))
            if ranks.size > 1:
                traceback.print_exc()
                sys.exit(1)  # others may be where they wait for this one
    for result in results:
        result.__class__.__module__ = "tests.baselines.training"
    if ranks.rank == 0:
        torch.save(results, given)
    ranks.close()


if __name__ == "__main__":
    main()
