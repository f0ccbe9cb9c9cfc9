"""What two runs must share before their speeds may be set against each other, as one table of facts.

A fact that makes it other work, other limits or another machine refuses the pair: no ratio is given. One that says how
the same work was done (versions, recomputation, attention kernel) marks it: the ratio stands, with the difference beside
it. What one of the two does not say is marked too, never taken for equal.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from harness.record import Part, Record
from harness.spec import DEFAULT_WARMUP_STEPS
from systems.sizes import format_size

NOT_KNOWN = "not known"
_NO_WORK = frozenset({"label", "notes", "batch_size", "seq_len"})  # fields of a shape that say nothing of the work done


class Difference(Part):
    """One fact in which a run differs from the reference. refused: the pair gets no ratio; otherwise it is marked."""

    fact: str
    ours: str
    reference: str
    refused: bool

    def __str__(self) -> str:
        return f"{self.fact}: {self.ours}, the reference has {self.reference}"


@dataclass(frozen=True)
class Fact:
    """read: the fact as a record holds it, None where it does not. A mapping is compared key by key."""

    name: str
    read: Callable[[Record], Any]
    refuses: bool = True
    show: Callable[[Any], str] = str


def _model(record: Record) -> Mapping[str, Any] | None:
    shape = record.resolved.shape
    return None if shape is None else {key: value for key, value in shape.items() if key not in _NO_WORK}


def _dtypes(record: Record) -> Mapping[str, str]:
    """As resolved, unless the system says that it departs from what was asked for."""
    asked = {"weights": record.spec.dtype, "gradients": record.spec.dtype, "states": "fp32"}
    return asked | (record.resolved.dtypes or {}) | _said(record, "dtypes", {})


def _said(record: Record, key: str, otherwise: Any) -> Any:
    """What the system's own statistics say of the key."""
    found = (record.strategy or {}).get(key)
    return otherwise if found is None else found


def _recompute(record: Record) -> str:
    asked = _said(record, "recompute", record.spec.recompute)
    return asked if isinstance(asked, str) else "blocks " + ",".join(str(block) for block in asked)


def _data(record: Record) -> str | None:
    data = record.resolved.data
    return None if data is None else f"{data.source} ({(data.sha256 or 'no hash')[:12]})"


def _device_memory_asked(record: Record) -> str:
    asked = record.spec.device_memory
    return "what the device has" if asked is None else format_size(asked)


def _disk_memory_asked(record: Record) -> str:
    if record.spec.disk is None and not any(option.startswith("nvme_path=") for option in record.spec.option):
        return "none"
    return "what is free" if record.spec.disk_memory is None else format_size(record.spec.disk_memory)


def _host_budget(record: Record) -> int | None:
    return record.memory.host_budget_bytes or record.resolved.host_budget_bytes


def _code(record: Record) -> str | None:
    code = record.environment.code
    if code.source_sha256 is not None:
        return f"source {code.source_sha256[:12]}"
    return None if code.revision is None else code.revision[:12] + (" with changes" if code.dirty else "")


def _warm_up(record: Record) -> int | None:
    """As far as it matters to what is timed behind it: a profiler may need more, and is no other work then."""
    steps = record.resolved.warmup_steps
    return None if steps is None else min(steps, DEFAULT_WARMUP_STEPS)


def _off(value: float) -> str:
    return f"{value:g}" if value else "off"


FACTS: tuple[Fact, ...] = (
    Fact("model", _model),
    Fact("parameters", lambda r: r.resolved.parameters),
    Fact("dtype", _dtypes),
    Fact("global batch in samples", lambda r: r.resolved.global_batch_samples),
    Fact("batch size per rank and micro-batch", lambda r: r.resolved.batch_size),
    Fact("accumulation", lambda r: r.spec.accumulate),
    Fact("ranks", lambda r: r.spec.ranks),
    Fact("sequence length", lambda r: r.resolved.seq_len),
    Fact("data", _data),
    Fact("clipping", lambda r: r.spec.clip, show=_off),
    Fact("warm-up steps", _warm_up, show=lambda steps: f"{steps}{' or more' * (steps >= DEFAULT_WARMUP_STEPS)}"),
    Fact("timed steps", lambda r: r.resolved.timed_steps),
    Fact("timed region", lambda r: r.resolved.clock),
    Fact("steps between validations", lambda r: r.spec.eval_every or 0, show=_off),
    Fact("steps between checkpoints", lambda r: r.spec.save_every or 0, show=_off),
    Fact("device", lambda r: r.resolved.device_label),
    Fact("device memory asked for", _device_memory_asked),
    Fact("device memory budget in force", lambda r: r.memory.device_budget_bytes, show=format_size),
    Fact("host memory budget", _host_budget, show=format_size),
    Fact("disk memory asked for", _disk_memory_asked),
    Fact("disk rate, bytes a second", lambda r: r.spec.disk_rate or "no limit"),
    Fact("CPU", lambda r: r.environment.hardware.cpu_model),
    Fact("usable cores", lambda r: r.environment.limits.cores if r.environment.limits else None),
    Fact("optimizer", lambda r: " ".join((r.spec.optimizer, *sorted(r.spec.hyper)))),
    Fact("recomputation", _recompute, refuses=False),
    Fact("attention kernel", lambda r: r.resolved.attention, refuses=False),
    Fact("steps taken before a resumption", lambda r: r.resolved.steps_before or 0, show=_off, refuses=False),
    Fact("learning rate", lambda r: r.spec.lr, refuses=False),
    Fact("weight decay", lambda r: r.spec.weight_decay, refuses=False),
    Fact("learning-rate schedule", lambda r: r.spec.schedule, refuses=False),
    Fact("first values", lambda r: "drawn" if r.spec.weights is None else r.spec.weights, refuses=False),
    Fact("seed", lambda r: r.spec.seed, refuses=False),
    Fact("versions", lambda r: r.environment.versions or None, refuses=False),
    Fact("device driver", lambda r: r.environment.hardware.device_driver, refuses=False),
    Fact("code", _code, refuses=False),
    Fact("threads", lambda r: r.environment.threads.intra_op, refuses=False),
    Fact("environment variables", lambda r: r.environment.variables, refuses=False),
)


def differences(ours: Record, reference: Record) -> list[Difference]:
    """Every fact in which the two differ, in the order of the table."""
    found = (_difference(fact, fact.read(ours), fact.read(reference)) for fact in FACTS)
    return [one for one in found if one is not None]


def alike(ours: Record, other: Record) -> bool:
    """Whether they may be replicates: nothing that both know differs."""
    return all(NOT_KNOWN in (one.ours, one.reference) for one in differences(ours, other))


def machine(record: Record) -> str | None:
    """Which one it was, and since when it was up; None where a record, as older ones, does not say."""
    hardware = record.environment.hardware
    return None if hardware.boot_id is None else f"{hardware.device_uuid or 'no device'} {hardware.boot_id}"


def of_one_machine(ours: Sequence[Record], reference: Sequence[Record]) -> tuple[list[Record], list[Record]]:
    """Those of both on machines that both have run on; all of them where one does not say where it was."""
    here, there = ({machine(record) for record in records} for records in (ours, reference))
    shared = here | there if None in here | there else here & there
    return [r for r in ours if machine(r) in shared], [r for r in reference if machine(r) in shared]


def elsewhere(ours: Sequence[Record], reference: Sequence[Record]) -> Difference | None:
    """That no machine has run both."""
    if not ours or not reference or of_one_machine(ours, reference)[0]:
        return None
    return Difference(fact="machine", ours="one that the reference did not run on", reference="others", refused=True)


def _difference(fact: Fact, ours: Any, reference: Any) -> Difference | None:
    if ours == reference:
        return None
    if isinstance(ours, Mapping) and isinstance(reference, Mapping):
        keys = [key for key in {**reference, **ours} if ours.get(key) != reference.get(key)]
        texts = [", ".join(f"{key}={side.get(key)}" for key in keys) for side in (ours, reference)]
        return Difference(fact=fact.name, ours=texts[0], reference=texts[1], refused=fact.refuses)
    known = ours is not None and reference is not None
    if isinstance(ours, Mapping) or isinstance(reference, Mapping):
        texts = [NOT_KNOWN if side is None else "known" for side in (ours, reference)]
    else:
        texts = [NOT_KNOWN if side is None else fact.show(side) for side in (ours, reference)]
    return Difference(fact=fact.name, ours=texts[0], reference=texts[1], refused=fact.refuses and known)
