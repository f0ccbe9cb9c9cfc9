"""The record of one run: typed, versioned, strict JSON. Unknown is null, never a default.

Units are in the names, raw bytes and seconds inside. Whatever is derived (`metrics`, `traffic`) can be computed again
from `samples`, `resolved` and `phases_s`. Records are never edited; `store` keeps and reads them.
"""

from __future__ import annotations

import json
import math
from collections.abc import Mapping
from enum import Enum
from typing import Any, Literal, TypeVar

from pydantic import BaseModel, ConfigDict, Field

from harness.spec import RunSpec
from systems.machine.limits import MachineLimits

SCHEMA_VERSION = 1

Status = Literal["ok", "refused", "oom", "diverged", "failed", "timeout", "unavailable", "interrupted"]
_P = TypeVar("_P", bound="Part")


class Part(BaseModel):
    """A part of a record. Fields of other versions are passed over, numbers are finite."""

    model_config = ConfigDict(frozen=True, extra="ignore", allow_inf_nan=False)


class Reason(Part):
    """Why a run did not end well. tier, need and have are of a memory budget, in bytes."""

    message: str
    phase: str | None = Field(
        None, description="plan, start, resolve, join, room, build, initialize, warm-up, step, eval, trace or close"
    )
    tier: Literal["device", "host", "disk"] | None = None
    need: int | None = None
    have: int | None = None
    rank: int | None = None
    follows: bool = Field(False, description="all that the rank knows is that another one was gone")
    signal: str | None = Field(None, description="the signal that ended the process, such as SIGKILL")
    exit_code: int | None = None
    last_known_bytes: int | None = Field(None, description="resident memory of the process when last looked at")
    install: str | None = Field(None, description="the command that brings what an unavailable system lacks")
    advice: list[str] = Field([], description="where memory was short: what was planned and would work here, as commands")
    log: list[str] = Field([], description="the last lines the process wrote, and the traceback of an error")


class DataSource(Part):
    source: str
    sha256: str | None = None


class Resolved(Part):
    """What the spec came to on this machine."""

    device: Literal["cuda", "cpu"] | None = None
    device_label: str | None = Field(None, description="the device's name; cpu-emulated rows never mix with measured ones")
    steps: int | None = Field(None, description="optimizer steps, those of the run that was resumed included")
    steps_before: int | None = Field(None, description="those of the resumed run; null in older records: none")
    warmup_steps: int | None = None
    timed_steps: int | None = Field(None, description="steps inside the timed region: steps - steps_before - warmup_steps")
    batch_size: int | None = Field(None, description="samples per rank and micro-batch")
    seq_len: int | None = None
    global_batch_samples: int | None = Field(None, description="batch_size x accumulate x ranks")
    tokens_per_step: int | None = Field(None, description="global_batch_samples x seq_len")
    parameters: int | None = None
    activated_parameters: int | None = Field(None, description="those that a token uses, of a model with experts; else null")
    host_budget_bytes: int | None = None
    shape: dict[str, Any] | None = None
    options: dict[str, Any] | None = Field(None, description="the system's options, defaults filled in")
    package: str | None = Field(None, description="outside package that trains, with its version; null: none does")
    dtypes: dict[str, str] | None = Field(None, description="of weights, gradients and states (masters and moments)")
    buffer_dtypes: list[str] | None = Field(None, description="those among the model's buffers, which keep their own")
    attention: str | None = Field(None, description="the model's attention, and the fused kernels torch may take for it")
    clock: str | None = Field(None, description="which definition of the timed region the times follow")
    data: DataSource | None = None
    peak_flops_per_s: float | None = Field(None, description="dense peak of one device at this dtype; null: not known")


class Hardware(Part):
    device_name: str | None = None
    device_count: int | None = None
    device_memory_bytes: int | None = None
    device_driver: str | None = None
    device_uuid: str | None = Field(None, description="with boot_id: which machine it was, and since when")
    boot_id: str | None = None
    pcie_generation: int | None = None
    pcie_generation_max: int | None = None
    pcie_width: int | None = None
    pcie_width_max: int | None = None
    cpu_model: str | None = None
    cpu_flags: list[str] = Field([], description="the vector extensions that matter here")


class Code(Part):
    revision: str | None = None
    dirty: bool | None = None
    source_sha256: str | None = Field(None, description="of the program's own source files, changed ones included")


class Threads(Part):
    intra_op: int | None = None
    inter_op: int | None = None


class Environment(Part):
    code: Code = Code()
    versions: dict[str, str | None] = {}
    hardware: Hardware = Hardware()
    limits: MachineLimits | None = None
    threads: Threads = Threads()
    seeds: dict[str, int] = {}
    variables: dict[str, str] = Field({}, description="environment variables, from an allow-list")


class Samples(Part):
    """Raw, one entry per optimizer step in order, warm-up included. norm is null where the system computed none."""

    step_time_s: list[float] = Field([], description="between undrained step boundaries; validation left out")
    micro_batch_loss: list[list[float | None]] = Field(
        [], description="each a micro-batch's share of the step's loss; the ranks' in turn"
    )
    norm: list[float | None] = []
    clip_factor: list[float | None] = []
    loss_scale: list[float | None] = []
    skipped: list[bool] = []
    learning_rate: list[float] = Field([], description="what the optimizer was given for this step")


class Metrics(Part):
    """Derived. loss and the two norms have one entry per step, warm-up included; times are of timed steps.

    Throughput counts useful steps, that is timed steps that were not skipped, over the whole timed region: the wall
    time between two full drains, deferred optimizer work included. Each TFLOPS figure is per device and counts useful
    steps.
    """

    loss: list[float | None] = Field([], description="sum over label tokens / global label count, experts' too; every step")
    grad_norm_before_clip: list[float | None] = Field([], description="every step")
    grad_norm_after_clip: list[float | None] = Field([], description="every step")
    step_time_s: list[float] = Field([], description="timed steps, between undrained boundaries")
    median_step_time_s: float | None = Field(None, description="median of step_time_s")
    timed_region_s: float | None = Field(None, description="wall time of the timed steps between full drains")
    mean_step_time_s: float | None = Field(None, description="timed_region_s / timed steps: the step time to quote")
    useful_steps: int | None = Field(None, description="timed steps that were not skipped")
    tokens_per_s: float | None = Field(None, description="all ranks together")
    samples_per_s: float | None = Field(None, description="all ranks together")
    tokens_per_s_per_device: float | None = None
    tflops_6n: float | None = Field(None, description="6 x parameters x tokens; of experts those that a token uses")
    model_tflops: float | None = Field(None, description="exact matmuls with the causal half, no recomputation")
    hardware_tflops: float | None = Field(None, description="model_tflops plus recomputed forwards, and experts' empty slots")
    relative_tflops: float | None = Field(None, description="Elixir's equation 1: 8 x parameters x tokens; experts as above")
    flops_formula: str | None = Field(None, description="version of the count behind model_tflops and hardware_tflops")
    mfu: float | None = Field(None, description="model_tflops / peak; null where no peak is known and on cpu-emulated")
    eval_step: list[int] = Field([], description="steps done when each validation pass ran")
    eval_loss: list[float | None] = []


class Routing(Part):
    """How tokens went to experts, of the first rank: means over all mixtures of all micro-batches that trained."""

    balance: float | None = Field(None, description="the load-balancing loss: 1 if even, the number of experts at worst")
    load: float | None = Field(None, description="tokens that chose the expert with the most / mean of all")
    dropped: float | None = Field(None, description="share of choices that found no place")
    padding: float | None = Field(None, description="share of experts' slots that nobody took")
    idle: float | None = Field(None, description="share of experts that no token chose")


class Traffic(Part):
    """Payload bytes per step, averaged over the timed region, of the rank with the most."""

    h2d_bytes: int | float | None = None
    d2h_bytes: int | float | None = None
    gather_bytes: int | float | None = None
    reduce_bytes: int | float | None = None
    exchange_bytes: int | float | None = Field(None, description="of tokens, to experts of other ranks and back")
    disk_read_bytes: int | float | None = None
    disk_write_bytes: int | float | None = None


class MemoryPeaks(Part):
    """Peaks over the whole run in bytes. The first eight are the system's own accounts.

    Of several ranks: of devices the maximum; of host and disk the sum over a host's ranks, of the host with the most.
    """

    device_peak_bytes: int | None = None
    device_budget_bytes: int | None = None
    device_model_peak_bytes: int | None = None
    host_peak_bytes: int | None = None
    host_pinned_bytes: int | None = None
    host_budget_bytes: int | None = None
    disk_peak_bytes: int | None = None
    disk_direct: bool | None = Field(None, description="the disk's files are read and written past the page cache")
    host_activation_bytes: int | None = Field(None, description="of host_peak_bytes: block inputs that wait for backward")
    host_second_version_bytes: int | None = Field(
        None, description="of host_peak_bytes: what lets updates run ahead of the norm"
    )
    device_allocated_peak_bytes: int | None = Field(None, description="torch's CUDA allocator: live tensors")
    device_reserved_peak_bytes: int | None = Field(None, description="torch's CUDA allocator: reserved")
    device_used_bytes: int | None = Field(None, description="whole device at the end, contexts and other processes too")
    host_rss_peak_bytes: int | None = Field(None, description="resident memory of the process")
    host: int | None = Field(None, description="of one rank among several: the number of its host")


class PlanFigures(Part):
    predicted_step_time_s: float | None = None
    predicted_device_peak_bytes: int | None = None


class Energy(Part):
    joules_per_sample: float | None = Field(None, description="device energy over the timed region, useful steps only")


class Doubt(Part):
    """One warning of the closed list in `doubts`: what was seen, what may cause it, what to do."""

    code: str
    seen: str
    cause: str
    advice: str


class Record(Part):
    """One run. `samples` and `metrics` say which lists include the warm-up."""

    schema_version: int = SCHEMA_VERSION
    run_id: str
    status: Status
    reason: Reason | None = None
    started_at: str = Field(description="UTC, ISO 8601")
    wall_s: float | None = Field(None, description="of the whole process, start-up included")
    replicate: int = Field(0, description="0 .. repeat - 1")
    spec: RunSpec
    resolved: Resolved = Resolved()
    environment: Environment = Environment()
    samples: Samples = Samples()
    metrics: Metrics = Metrics()
    phases_s: dict[str, float] = Field(
        {},
        description="import, resolve, join, build, initialize, warm_up, timed, eval, trace, phases, close; a system's start-up "
        "as startup.*; with --phases those of one more step as phase.*",
    )
    traffic: Traffic = Traffic()
    memory: MemoryPeaks = MemoryPeaks()
    memory_by_rank: list[MemoryPeaks] = Field([], description="of several ranks: what each has, its share of host budgets too")
    counters: dict[str, int] = Field({}, description="the system's own, over the whole run")
    timed_counters: dict[str, int] = Field({}, description="the same, over the timed region")
    plan: PlanFigures = PlanFigures()
    strategy: dict[str, Any] | None = Field(None, description="typed by the system")
    routing: Routing | None = Field(None, description="null of a model without mixtures of this project's")
    energy: Energy = Energy()
    doubts: list[Doubt] = []
    notes: list[str] = []


def clean(value: Any, where: str = "", notes: list[str] | None = None) -> Any:
    """Plain JSON data from nested data: NaN and infinities become None with a note, arrays become lists.

    Raises TypeError, naming the place, for anything else: a record holds no object that only prints well.
    """
    notes = [] if notes is None else notes
    if isinstance(value, Enum):
        value = value.value
    if isinstance(value, str):
        return value.encode("utf-8", "backslashreplace").decode()  # of bytes that are no UTF-8 the system makes half letters
    if value is None or isinstance(value, bool) or type(value) is int:
        return value
    if isinstance(value, BaseModel):
        value = {name: getattr(value, name) for name in type(value).model_fields}
    if isinstance(value, Mapping):
        return {clean(str(key)): clean(item, f"{where}.{key}" if where else str(key), notes) for key, item in value.items()}
    if isinstance(value, list | tuple | set | frozenset):
        items = sorted(value) if isinstance(value, set | frozenset) else value
        return [clean(item, f"{where}[{index}]", notes) for index, item in enumerate(items)]
    if hasattr(value, "tolist"):  # numpy scalars and arrays, torch tensors
        return clean(value.tolist(), where, notes)
    if isinstance(value, int):
        return int(value)
    if isinstance(value, float):
        if math.isfinite(value):
            return float(value)
        notes.append(f"{where or 'value'} was {float(value)}")
        return None
    raise TypeError(f"{where or 'value'} is a {type(value).__name__}, which a record cannot hold")


def build_part(part: type[_P], **fields: Any) -> _P:
    """A part of a record from nested plain data and models, cleaned."""
    return part.model_validate(clean(fields))


def build(fields: Mapping[str, Any]) -> Record:
    """A record from nested plain data and models; what `clean` had to change is said in its notes."""
    notes: list[str] = clean(fields.get("notes", []))
    tree = clean({key: item for key, item in fields.items() if key != "notes"}, notes=notes)
    return Record.model_validate({**tree, "notes": notes})


def to_json(record: Record) -> str:
    """One line of strict JSON, fields in the order of the classes above."""
    return json.dumps(record.model_dump(mode="json"), allow_nan=False)
