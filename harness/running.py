"""Inside the process of a run: resolve, build, initialize, measure, and make a record of it, whatever happens.

Up to the phase `build` a ValueError is the user's input and is told in one line without a record. From there on every
exception ends in one.
"""

from __future__ import annotations

import time
import traceback
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field, replace
from functools import partial
from pathlib import Path
from typing import Any

import torch

from harness import derive, doubts, environment, ranks, record, trace
from harness.channel import Channel, WorkerJob
from harness.collecting import uncollected
from harness.failures import from_exception
from harness.measure import Batch, Measurement, RawResults, Workload
from harness.nvml import Watch
from harness.output import complain
from harness.record import MemoryPeaks, PlanFigures, Reason, Record, Status
from harness.request import Request, choose_device, resolve, set_threads
from harness.spec import BadInputError, in_flags
from models.activated import count_parameters
from models.flops import count
from models.loss import count_labels, token_loss
from models.moe import routing_of
from systems import checkpoint
from systems.machine.limits import MachineLimits, process_memory, raise_open_files, read_limits
from systems.machine.threads import cores_each
from systems.messages import one_line
from systems.optimizers.choice import chosen
from systems.ranks.ranks import Ranks, SingleRank
from systems.settings import Settings
from systems.system import Engine

SAID_IN_ONE_LINE = ("refused", "unavailable", "oom")  # the traceback goes into the record
EMULATED = (
    "no CUDA device is here, so the device is emulated, as with --device cpu: its memory and traffic are counted, its times "
    "say nothing of a GPU"
)


@dataclass
class Known:
    """What is known of a run so far. A record can be made of it at any moment."""

    phases_s: dict[str, float]
    limits: MachineLimits
    request: Request | None = None
    environment: record.Environment = field(default_factory=record.Environment)
    work: derive.StepFlops = field(default_factory=derive.StepFlops)
    measured: RawResults = field(default_factory=RawResults)
    watch: Watch = field(default_factory=lambda: Watch(None))
    engine: Engine | None = None
    engine_fields: dict[str, Any] = field(default_factory=dict)
    seen_memory: dict[str, Any] = field(default_factory=dict)  # by torch and the operating system
    found: dict[str, Any] = field(default_factory=dict)  # of `Resolved`: what the model turned out to be
    notes: list[str] = field(default_factory=list)
    ranks: Ranks = field(default_factory=SingleRank)
    memory_by_rank: list[MemoryPeaks] = field(default_factory=list)

    @property
    def resolved(self) -> record.Resolved:
        if self.request is None:
            return record.Resolved()
        return self.request.resolved.model_copy(update=self.work.sizes | self.found)

    def take_figures(self) -> None:
        """The engine's own, and the memory seen from outside, once: what runs later is not in them."""
        assert self.engine is not None
        if not self.engine_fields:
            self.seen_memory = _seen_memory(self.resolved)
            self.engine_fields = _engine_fields(self.engine, self)

    @contextmanager
    def timing(self, phase: str) -> Iterator[None]:
        started_s = time.perf_counter()
        try:
            yield
        finally:
            self.phases_s[phase] = time.perf_counter() - started_s


def host_room(limits: MachineLimits) -> int | None:
    """Bytes that the host could still give this process: what is free, and what its limit leaves."""
    now, resident = read_limits().available_memory_bytes, process_memory("self").get("VmRSS")
    budget = limits.host_budget_bytes
    below_budget = None if budget is None or resident is None else max(0, budget - resident)
    return min((room for room in (now, below_budget) if room is not None), default=None)


def _judge(job: WorkerJob, known: Known) -> tuple[Status, Reason | None]:
    """Status of a run that reached its end."""
    why = derive.diverged(known.measured, known.resolved.warmup_steps or 0, known.resolved.steps_before or 0)
    if why:
        return "diverged", Reason(message=why, phase="step", rank=job.rank)
    why = derive.impossible(derive.utilisation(_metrics(job, known), known.resolved), known.resolved)
    if why:
        return "failed", Reason(message=why, phase="step", rank=job.rank)
    return "ok", None


def _metrics(job: WorkerJob, known: Known) -> dict[str, object]:
    if known.request is None:
        return {}
    return derive.metrics(known.measured, known.resolved, known.work, job.ranks)


def run(job: WorkerJob, channel: Channel, import_s: float) -> Record:
    """The record of this job. Raises BadInputError."""
    raise_open_files()  # of every system alike, and before limits are read
    known = Known(phases_s={"import": import_s}, limits=read_limits(cgroup_root=Path(job.cgroup_root)))
    status: Status = "ok"
    reason: Reason | None = None
    broke_off: BaseException | None = None
    try:
        _train(job, channel, known)
        status, reason = _judge(job, known)
    except BadInputError:
        raise
    except (Exception, SystemExit) as error:  # noqa: BLE001 - whatever it is becomes the record's reason
        broke_off = error
        status, reason = from_exception(error, channel.phase, rank=job.rank, host_room=host_room(known.limits))
        if status in SAID_IN_ONE_LINE or isinstance(error, checkpoint.SaveError):
            reason = reason.model_copy(update={"log": traceback.format_exc().splitlines()})
        else:
            traceback.print_exc()
    if reason is not None and job.ranks > 1:
        status, reason = ranks.share_end(job, known.ranks, status, reason)
    try:
        _close(channel, known, broke_off)
    except Exception as error:  # noqa: BLE001 - whatever it is becomes the record's reason
        traceback.print_exc()
        if status == "ok":
            status, reason = from_exception(error, channel.phase, rank=job.rank)
    if reason is not None and reason.tier is not None and job.advise and job.ranks == 1:
        reason = reason.model_copy(update={"advice": _advice(job, channel, known)})
    return _record(job, known, status, reason)


def _advice(job: WorkerJob, channel: Channel, known: Known) -> list[str]:
    """What would work where memory was short. A run that has an end set gets none: the looking takes a while."""
    if known.request is None or not known.request.needs_model or job.spec.timeout is not None:
        return []
    channel.enter("advise")
    try:
        with known.timing("advise"):
            from harness.advice import advise  # what plans is imported by those who need it

            return advise(job.spec, known.request)
    except Exception as error:  # noqa: BLE001 - the run's own end is the news
        known.notes.append(one_line(f"what would work here was not found: {type(error).__name__}: {error}"))
        return []


def _train(job: WorkerJob, channel: Channel, known: Known) -> None:
    channel.enter("resolve")
    with known.timing("resolve"), ranks.expected(job):
        device = choose_device(job.spec.device)
        try:
            known.request = request = resolve(job, device)
        except ValueError as error:
            raise BadInputError(in_flags(one_line(str(error)))) from error
    if job.spec.device is None and device == "cpu":
        complain(EMULATED)
    if job.ranks > 1:
        channel.enter("join")
        with known.timing("join"):
            known.ranks = ranks.meet(job, device, request.system, channel)
        known.request = request = request.on(known.ranks)
    set_threads(known.limits, known.ranks.local_size)
    device_nvml = environment.open_nvml() if device == "cuda" else None
    known.watch = Watch(device_nvml)
    known.environment = environment.describe(device, known.limits, job.spec.seed, device_nvml)
    ranks.seed_dropout(job.spec.seed, job.rank)

    channel.enter("room")
    with known.timing("room"):
        model, settings = _look_for_room(known, request)
        _check_room(job, request, model)
    channel.enter("build")
    with known.timing("build"):
        _count(job, known, request, model)
        if request.shape.family == "folder" and request.shape.notes:  # that it begins with random weights
            known.notes.append(request.shape.notes)
            complain(request.shape.notes)
    _tell(channel, known)

    channel.enter("initialize")
    with known.timing("initialize"):
        known.engine = engine = ranks.initialize(request.system, model, settings, request.options, known.ranks)
    known.found = _look_at_model(engine.module, request.resolved)
    if job.spec.checkpoint is not None:
        engine.training_state()  # where there is none, that is told before the work and not after
        _check_room(job, request, engine.module)  # with --disk's files there
    if job.spec.resume is not None:
        channel.enter("resume")
        with known.timing("resume"):
            beside = checkpoint.load(engine, job.spec.resume).beside
            _go_on_at_random(job.spec.resume, engine.ranks.size, beside, known)
    _tell(channel, known)
    work = _work(job, request)
    measurement = _measurement(engine, work, job, channel, known, request)
    known.measured = measurement.measured
    measurement.run()
    known.watch.look()
    if job.ranks > 1:
        known.take_figures()
        known.memory_by_rank = ranks.join_figures(known.ranks, _memory(job, known), known.measured)
    if job.spec.checkpoint is not None:
        known.take_figures()
        channel.enter("save")
        with known.timing("last_save"):
            _save(job, engine)
    broken = False
    for name, asked, take in (
        ("trace", job.spec.trace is not None and job.replicate == 0, _trace),
        ("phases", job.spec.phases, _phases),
    ):
        if not asked:
            continue
        if broken:  # the engine may not be able to step any more
            known.notes.append(f"--{name}: none was taken, for the same reason")
            continue
        known.take_figures()
        channel.enter(name)
        try:
            with known.timing(name):
                take(job, measurement, known)
        except Exception as error:  # noqa: BLE001 - what was measured stands, whatever befalls one more step
            traceback.print_exc()
            known.notes.append(f"--{name}: none was taken: {in_flags(one_line(str(error))) or type(error).__name__}")
            broken = True


def _check_room(job: WorkerJob, request: Request, model: torch.nn.Module) -> None:
    """For the run's checkpoints, where it writes any; of several ranks the first looks."""
    spec, resolved = job.spec, request.resolved
    if spec.checkpoint is not None and job.rank == 0:
        steps, before = resolved.steps or 0, resolved.steps_before or 0
        within = (steps - 1) // spec.save_every - before // spec.save_every if spec.save_every else 0
        moments = len(chosen(request.settings).moments)
        checkpoint.check_room(model, spec.checkpoint, saves=1 + within, moments=moments)


def _save(job: WorkerJob, engine: Engine) -> None:
    """Batches follow from the step alone, so dropout's random numbers are all that the loop adds."""
    beside = {"random.cpu": torch.get_rng_state()}
    if torch.cuda.is_available():
        beside["random.cuda"] = torch.cuda.get_rng_state()
    checkpoint.save(engine, str(job.spec.checkpoint), own=beside)


def _go_on_at_random(folder: str, ranks: int, beside: dict[str, torch.Tensor], known: Known) -> None:
    """Where as many ranks go on as have saved: each has states of its own."""
    saved = checkpoint.ranks_of(folder)
    if saved != ranks:
        known.notes.append(
            f"--resume: of {saved} ranks, and {ranks} go on: dropout begins anew, and a step's batch is another unless "
            "--batch-size and --accumulate make up for it"
        )
        return
    if "random.cpu" in beside:
        torch.set_rng_state(beside["random.cpu"])
    if "random.cuda" in beside and torch.cuda.is_available():
        torch.cuda.set_rng_state(beside["random.cuda"])


def _trace(job: WorkerJob, measurement: Measurement, known: Known) -> None:
    """See harness/trace.py. Every figure of the record is taken before."""
    if job.rank > 0:
        measurement.extra_step()
        return
    path = Path(str(job.spec.trace))
    trace.take(measurement.extra_step, path, known.resolved.device or "cpu")
    known.notes.append(f"a trace of one more step is in {path}")


def _phases(job: WorkerJob, measurement: Measurement, known: Known) -> None:
    """Where the time of one more step goes, phase by phase. Every figure of the record is taken before."""
    found = measurement.engine.phases_s(measurement.extra_step)
    known.phases_s |= {f"phase.{name}": seconds for name, seconds in found.items()}
    known.notes.append(
        "phases_s.phase.* are of one more step in which nothing overlaps; a conversion that is part of a pass of Adam has no "
        "time of its own"
    )


def _tell(channel: Channel, known: Known) -> None:
    """What is known so far, for the record of a run that dies without a word."""
    told = {"resolved": known.resolved, "environment": known.environment}
    channel.partial({**{name: part.model_dump(mode="json") for name, part in told.items()}, "phases_s": known.phases_s})


def _look_at_model(module: torch.nn.Module, resolved: record.Resolved) -> dict[str, Any]:
    """Types and attention as the system left them: fields of `Resolved`. A gradient has the type of its weight."""
    weights = "+".join(environment.dtypes_of(module.parameters()))
    seen = {"weights": weights, "gradients": weights} if weights else {}
    return {
        "dtypes": {**(resolved.dtypes or {}), **seen},
        "buffer_dtypes": environment.dtypes_of(module.buffers()),
        "attention": environment.attention(module),
    }


@uncollected()  # what models are made of is imported here
def _look_for_room(known: Known, request: Request) -> tuple[torch.nn.Module, Settings]:
    """The model on the meta device, without values, and the settings with the budgets that hold. Raises BudgetError."""
    if not request.needs_model:
        return torch.nn.Module(), request.settings
    model = request.build()
    counted = count_parameters(model)
    known.work = derive.StepFlops(parameters=counted.total, activated=counted.activated)
    return model, request.system.look_for_room(model, request.settings, request.options)


def _count(job: WorkerJob, known: Known, request: Request, model: torch.nn.Module) -> None:
    """Parameters and FLOPs of a step."""
    spec, resolved = job.spec, request.resolved
    if not request.needs_model:
        return
    assert resolved.batch_size is not None and resolved.seq_len is not None
    try:
        flops = count(model, batch_size=resolved.batch_size, seq_len=resolved.seq_len, objective=request.shape.objective)
    except ValueError as error:
        flops = None
        known.notes.append(one_line(str(error)))
    known.work = replace(known.work, flops=flops, accumulate=spec.accumulate, recompute=spec.recompute)


def _work(job: WorkerJob, request: Request) -> Workload:
    spec, resolved = job.spec, request.resolved

    def batch(step: int, micro_step: int, split: str) -> Batch:
        on_host = request.dataset.batch(
            step,
            micro_step=micro_step,
            rank=job.rank if split == "train" else 0,
            ranks=job.ranks,
            batch_size=resolved.batch_size or 1,
            seq_len=resolved.seq_len or 1,
            split="validation" if split == "validation" else "train",
        )
        if resolved.device == "cpu":
            return on_host
        return {name: tensor.pin_memory().to("cuda", non_blocking=True) for name, tensor in on_host.items()}

    return Workload(
        batch=batch,
        loss=partial(token_loss, objective=request.shape.objective),
        count_labels=partial(count_labels, objective=request.shape.objective),
        accumulate=spec.accumulate,
        lr=spec.lr,
        schedule=spec.schedule,
    )


def _measurement(
    engine: Engine, work: Workload, job: WorkerJob, channel: Channel, known: Known, request: Request
) -> Measurement:
    resolved, resumed = known.resolved, request.resumed
    steps, warmup, taken = resolved.steps or 1, resolved.warmup_steps or 0, resolved.steps_before or 0
    energy: Callable[[], float | None] = known.watch.device.energy_joules if known.watch.device else lambda: None

    def on_step(done: int, loss: float | None) -> None:
        if done == taken + warmup:  # the device is under load here, and the clock is not running yet
            known.watch.look()
        channel.step(done, steps, loss)

    return Measurement(
        engine, work, steps=steps, warmup=warmup, taken=taken, skipped=0 if resumed is None else resumed.skipped_steps,
        eval_every=job.spec.eval_every, save_every=job.spec.save_every, save=partial(_save, job, engine),
        energy=energy, enter=channel.enter, on_step=on_step, ranks=known.ranks,
    )  # fmt: skip


def _close(channel: Channel, known: Known, broke_off: BaseException | None) -> None:
    """Take the engine's own figures, then close it. Nobody uses the model any more: its values are not brought together."""
    engine = known.engine
    if engine is None:
        return
    known.measured.outcomes = known.measured.outcomes or list(engine.outcomes)
    try:
        known.take_figures()
    except Exception as error:  # after a failure an engine may not know its figures any more; the failure is the news
        if known.measured.complete:
            raise
        known.notes.append(one_line(f"the engine's figures are missing: {type(error).__name__}: {error}"))
    if broke_off is not None and known.ranks.size > 1:
        return  # others may be where they wait for this one: the process ends, and with it all that it has
    channel.enter("close")
    with known.timing("close"):
        if broke_off is None:
            engine.close(keep=False)
            known.ranks.close()
        else:
            engine.__exit__(type(broke_off), broke_off, broke_off.__traceback__)


def _engine_fields(engine: Engine, known: Known) -> dict[str, Any]:
    statistics = engine.statistics()
    try:
        record.clean(statistics, "strategy")
    except TypeError as error:  # the run and its times stand; what cannot be kept is named
        known.notes.append(f"the system's statistics are missing: {error}")
        statistics = None
    return {
        "memory": vars(engine.memory()),
        "counters": {key: value for key, value in engine.counters().items() if key not in derive.TRAFFIC_KEYS},
        "plan": vars(engine.plan_report()),
        "strategy": statistics,
        "routing": routing_of(engine.module),
        "startup": engine.startup_s(),
    }


def _memory(job: WorkerJob, known: Known) -> MemoryPeaks:
    """The engine's accounts and, beside them, what torch and the operating system saw.

    The host's budget holds for every system alike: one that keeps no account of the host has none to tell of it. All of it is
    this rank's.
    """
    accounts = known.engine_fields.get("memory", {})
    seen = known.seen_memory or _seen_memory(known.resolved)
    if accounts.get("host_budget_bytes") is None:
        budget = known.resolved.host_budget_bytes
        seen = seen | {"host_budget_bytes": None if budget is None else budget // known.ranks.local_size}
    return record.build_part(MemoryPeaks, **(accounts | seen))


def _seen_memory(resolved: record.Resolved) -> dict[str, Any]:
    seen: dict[str, Any] = {"host_rss_peak_bytes": process_memory("self").get("VmHWM")}
    if resolved.device == "cuda":
        free, total = torch.cuda.mem_get_info()
        seen |= {
            "device_allocated_peak_bytes": torch.cuda.max_memory_allocated(),
            "device_reserved_peak_bytes": torch.cuda.max_memory_reserved(),
            "device_used_bytes": total - free,
        }
    return seen


def _record(job: WorkerJob, known: Known, status: Status, reason: Reason | None) -> Record:
    measured, resolved, fields = known.measured, known.resolved, known.engine_fields
    warmup = resolved.warmup_steps or 0
    metrics = _metrics(job, known)
    phases = dict(known.phases_s)
    if measured.complete:
        phases |= {"warm_up": measured.warmup_s or 0.0, "timed": measured.timed_s or 0.0, "eval": measured.eval_s}
        phases |= {"save": measured.save_s} if job.spec.save_every else {}
    phases |= {f"startup.{name}": seconds for name, seconds in fields.get("startup", {}).items()}
    seen = doubts.Evidence(
        timed_step_s=measured.step_time_s[warmup:] if measured.complete else (),
        threads=torch.get_num_threads(),
        cores=cores_each(known.ranks.local_size, known.limits),
        steps_without_plan=measured.timed_counters["steps_without_plan"],
        swap_bytes=process_memory("self").get("VmSwap"),
        other_processes=known.watch.other_processes,
        throttled_by=sorted(known.watch.throttled_by),
        link=known.watch.best_link,
        mfu=derive.utilisation(metrics, resolved),
        disk_direct=fields.get("memory", {}).get("disk_direct"),
    )
    return record.build(
        {
            "run_id": job.run_id,
            "status": status,
            "reason": reason,
            "started_at": job.started_at,
            "replicate": job.replicate,
            "spec": job.spec,
            "resolved": resolved,
            "environment": known.environment,
            "samples": derive.samples(measured),
            "metrics": metrics,
            "phases_s": phases,
            "traffic": derive.traffic(measured, warmup),
            "memory": ranks.together(known.memory_by_rank) if known.memory_by_rank else _memory(job, known),
            "memory_by_rank": known.memory_by_rank,
            "counters": fields.get("counters", {}),
            "timed_counters": {k: v for k, v in measured.timed_counters.items() if k not in derive.TRAFFIC_KEYS},
            "plan": PlanFigures(**fields.get("plan", {})),
            "strategy": fields.get("strategy"),
            "routing": fields.get("routing"),
            "energy": derive.energy(measured, resolved),
            "doubts": doubts.judge(seen),
            "notes": known.notes + derive.notes(measured, warmup),
        }
    )
