"""Hardware profiles: what a machine holds and how fast it moves bytes and multiplies, each number with its source.

The folder `hardware/` is the registry: one JSON file a profile, its name is the profile's. `harness profile` measures a
machine into this type; the simulator gives its lanes these speeds. Bytes, seconds and operations, never GB or TFLOPS.

Note [Bandwidths]
    per device   h2d, d2h (one direction alone), both_ways (sum of both at once), device_link (one direction, out or in)
    per node     node_copy (all devices at once in one direction), node_both_ways (all devices, sum of both), network
                 (one direction), and the host's own: cpu_adam alone, and host_dram, what CPU Adam and copies reach
                 together. Both count a CPU Adam pass as the bytes it reads and writes, and a copy as its payload.
                 contention, where there, says what each of them gets, of all devices' copies at once.
    all devices  gathers, reductions and native_reductions_by_size: of all devices of a node at once, by the bytes that pass
                 each device's port one way, which of N bytes over R devices are N (R - 1) / R
"""

from __future__ import annotations

from collections.abc import Mapping
from enum import StrEnum
from functools import cache, cached_property
from itertools import chain, combinations, pairwise
from pathlib import Path
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from systems.machine.reading import read_json
from systems.messages import invalid_value, one_line, unknown_name

FOLDER = Path(__file__).with_name("hardware")
MAX_CHAIN = 4  # profiles that one is like, one through the other
ASSUMED = ("assumed", "not measured")  # how a source begins that is none
DTypeName = Literal["bf16", "fp16", "fp32"]


class _Sourced(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid", allow_inf_nan=False)

    source: str = Field(min_length=1)


class SourcedNumber(_Sourced):
    """A positive number and where it comes from: "measured 2026-11-27, torch 2.11", "H3T section C.2", "data sheet"."""

    value: float = Field(gt=0)


class Share(_Sourced):
    value: float = Field(gt=0, le=1)


class Count(_Sourced):
    value: int = Field(gt=0)


class _Points(_Sourced):
    """A rate that depends on a size: points (size, units of work a second), sizes ascending."""

    columns: ClassVar[str]
    sizes: ClassVar[str]

    points: tuple[tuple[int, float], ...] = Field(min_length=1)

    @model_validator(mode="after")
    def _ascending(self) -> Self:
        if any(size <= 0 or rate <= 0 for size, rate in self.points):
            raise ValueError(f"points are {self.columns}, both above 0")
        if any(b[0] <= a[0] for a, b in pairwise(self.points)):
            raise ValueError(f"points must have ascending {self.sizes}")
        return self


class BySize(_Points):
    """Rate of a copy or a collective by its size."""

    columns, sizes = "(bytes, bytes a second)", "sizes"

    @property
    def best(self) -> float:
        """The highest rate."""
        return max(rate for _, rate in self.points)

    def overhead_s(self, size: float) -> float:
        """Seconds that it takes beyond its size at the highest rate: interpolated between points, constant outside."""
        best = self.best
        known = [(s, s / rate - s / best) for s, rate in self.points]
        if size <= known[0][0]:
            return known[0][1]
        for (low, a), (high, b) in pairwise(known):
            if size <= high:
                return a + (b - a) * (size - low) / (high - low)
        return 0.0


class ByWidth(_Points):
    """Rate of fused attention by the width of a head. Forward and backward together, of a causal mask half of the pairs."""

    columns, sizes = "(elements, operations a second)", "widths"

    def rate(self, width: int) -> float:
        """Kernels pad a head to the next width that they know, so that of the next wider point; of the last beyond it."""
        return next((rate for known, rate in self.points if known >= width), self.points[-1][1])


class Flow(StrEnum):
    """What moves bytes through the host's DRAM side by side."""

    CPU_ADAM = "cpu_adam"
    H2D = "h2d"
    D2H = "d2h"


def sets_of_flows() -> list[tuple[Flow, ...]]:
    """All that may run at a time: each alone first, all of them last."""
    return list(chain.from_iterable(combinations(Flow, count) for count in range(1, len(Flow) + 1)))


class Contention(_Sourced):
    """Bytes a second that each of CPU Adam and copies either way reaches while all of a set run, for every set of them."""

    rates: tuple[Mapping[Flow, float], ...]

    @model_validator(mode="after")
    def _every_set_once(self) -> Self:
        if sorted(map(sorted, self.rates)) != sorted(map(sorted, sets_of_flows())):
            raise ValueError(f"rates must have each set of {', '.join(Flow)} once, {len(sets_of_flows())} in all")
        if any(rate <= 0 for rates in self.rates for rate in rates.values()):
            raise ValueError("rates are bytes a second above 0")
        return self

    @cached_property
    def most(self) -> float:
        """Of all that run together, in the set in which that is most."""
        return max(sum(rates.values()) for rates in self.rates)

    @cached_property
    def kept(self) -> Mapping[frozenset[str], Mapping[str, float]]:
        """Of its rate alone, by what runs; never more than all of it."""
        alone = {flow: rates[flow] for rates in self.rates if len(rates) == 1 for flow in rates}
        return {frozenset(rates): {flow: min(1.0, rates[flow] / alone[flow]) for flow in rates} for rates in self.rates}


class HardwareProfile(BaseModel):
    """One kind of machine, or several nodes of it. See Note [Bandwidths].

    device_memory_bytes, host_memory_bytes (per node), disk_bytes (per node, None: no disk to offload to).
    disk_both_ways_bytes_per_s: read and written together, where both are done at once; None: each as fast as alone.
    matmul_flops_per_s: per dtype the device multiplies in, a large square product; matmul_efficiency: the share of that
    rate which a transformer's products reach in training; attention_by_width: None if fused attention is as fast as they are.
    device_dram_efficiency: the same of the device's DRAM for all its
    other operations, one kernel each; None: all of it, which flatters.
    copy_latency_s: fixed part of a copy of any size; copies_by_size, where there, is used instead.
    device_link_bytes_per_s: None if devices have no link of their own, so that collectives share the host link.
    gathers_by_size, reductions_by_size: collectives as they are carried out, reductions by the ordered sum of ranks/link.py;
    native_reductions_by_size: by the library's own; None: at the link's rate, with a copy's latency.
    exchange_s: of all ranks telling each other a few bytes through the host; None: no time.
    cpu_adam_dram_share: what CPU Adam gets of host_dram while copies contend for it; None: in proportion to what each
    would take alone. contention: what each gets beside the others, measured; it then rules instead, scaled to the rates that
    each has alone. cpu_update_s: fixed part of an update by CPU Adam, beside its bytes; None: no time. unit_event_s: time of
    the host for each unit event (hooks, issue of operations). kernel_launch_s: for each operation of the model, which small
    ones cannot undercut; None: no time.
    other: figures that nothing computes with, such as pageable copies, pinning, or Adam by number of threads.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    description: str = Field(min_length=1)
    device_name: str = Field(min_length=1)
    nodes: Count
    devices_per_node: Count
    device_memory_bytes: Count
    host_memory_bytes: Count
    disk_bytes: Count | None = None
    disk_read_bytes_per_s: SourcedNumber | None = None
    disk_write_bytes_per_s: SourcedNumber | None = None
    disk_both_ways_bytes_per_s: SourcedNumber | None = None
    matmul_flops_per_s: Mapping[DTypeName, SourcedNumber] = Field(min_length=1)
    matmul_efficiency: Share
    attention_by_width: ByWidth | None = None
    device_dram_bytes_per_s: SourcedNumber
    device_dram_efficiency: Share | None = None
    h2d_bytes_per_s: SourcedNumber
    d2h_bytes_per_s: SourcedNumber
    both_ways_bytes_per_s: SourcedNumber
    node_copy_bytes_per_s: SourcedNumber
    node_both_ways_bytes_per_s: SourcedNumber
    copy_latency_s: SourcedNumber
    copies_by_size: BySize | None = None
    device_link_bytes_per_s: SourcedNumber | None = None
    network_bytes_per_s: SourcedNumber | None = None
    gathers_by_size: BySize | None = None
    reductions_by_size: BySize | None = None
    native_reductions_by_size: BySize | None = None
    exchange_s: SourcedNumber | None = None
    host_dram_bytes_per_s: SourcedNumber
    cpu_adam_bytes_per_s: SourcedNumber
    cpu_adam_dram_share: Share | None = None
    contention: Contention | None = None
    cpu_update_s: SourcedNumber | None = None
    unit_event_s: SourcedNumber
    kernel_launch_s: SourcedNumber | None = None
    other: Mapping[str, SourcedNumber] = {}

    @model_validator(mode="after")
    def _whole(self) -> HardwareProfile:
        if self.nodes.value > 1 and self.network_bytes_per_s is None:
            raise ValueError("network_bytes_per_s is missing: several nodes need it")
        if self.disk_bytes is not None and None in (self.disk_read_bytes_per_s, self.disk_write_bytes_per_s):
            raise ValueError("disk_read_bytes_per_s and disk_write_bytes_per_s are needed where there is disk_bytes")
        return self

    @property
    def devices(self) -> int:
        return self.nodes.value * self.devices_per_node.value

    @property
    def assumed(self) -> tuple[str, ...]:
        """Fields that say of themselves that nobody measured or published them."""
        fields = ((name, getattr(self, name)) for name in sorted(type(self).model_fields))
        return tuple(name for name, found in fields if isinstance(found, _Sourced) and found.source.startswith(ASSUMED))

    def summing_natively(self) -> HardwareProfile:
        """The same where ranks add gradients in the library's own way."""
        return self.model_copy(update={"reductions_by_size": self.native_reductions_by_size or self.reductions_by_size})

    def matmul_rate(self, dtype: str) -> float:
        """Operations a second that training reaches. ValueError if the device does not multiply in this type."""
        for name, rate in self.matmul_flops_per_s.items():
            if name == dtype:
                return rate.value * self.matmul_efficiency.value
        allowed = " or ".join(f"`dtype={name!r}`" for name in sorted(self.matmul_flops_per_s))
        raise ValueError(f"{self.device_name} has no matmul rate for {dtype}: use {allowed}")

    def copy_overhead_s(self, size: float) -> float:
        """Seconds of a host copy of this size beside its bytes at full bandwidth."""
        return self.copy_latency_s.value if self.copies_by_size is None else self.copies_by_size.overhead_s(size)


def names() -> list[str]:
    return sorted(path.stem for path in FOLDER.glob("*.json"))


@cache
def of_device(device_name: str) -> str | None:
    """The shipped profile of a machine with one such device, by the name that CUDA gives it."""
    machines = ((name, load(name)) for name in names())
    return next((name for name, found in machines if found.devices == 1 and found.device_name == device_name), None)


def load(given: str) -> HardwareProfile:
    """A profile by name, or by the path of a file ending in .json. ValueError, one line, naming what is wrong."""
    return _parse(given, _read(given))


def _parse(given: str, content: Mapping[str, Any]) -> HardwareProfile:
    try:
        return HardwareProfile.model_validate(content)
    except ValidationError as error:
        first = error.errors(include_url=False)[0]
        field = ".".join(str(part) for part in first["loc"]) or "the profile"
        told = invalid_value(error, lambda *_: field) if first["loc"] else f"{field}: {invalid_value(error, lambda *_: field)}"
        raise ValueError(f"hardware profile {given}: {told}") from None


def _read(given: str, depth: int = 0) -> dict[str, Any]:
    """The file's content; one that says what it is `like` has that one's fields wherever it gives none itself."""
    path = Path(given) if given.endswith(".json") else FOLDER / f"{given}.json"
    if not given.endswith(".json") and given not in names():
        raise ValueError(unknown_name("hardware profile", given, names()))
    try:
        content = read_json(path)
    except (OSError, ValueError) as error:
        raise ValueError(f"hardware profile {given} cannot be read: {one_line(str(error))}") from None
    if not isinstance(content, dict):
        raise ValueError(f"hardware profile {given}: the file must hold one JSON object")
    like = content.pop("like", None)
    if like is None:
        return content
    if not isinstance(like, str) or depth == MAX_CHAIN:
        raise ValueError(f"hardware profile {given}: like must name another profile, {MAX_CHAIN} deep at most")
    return {**_read(like, depth + 1), **content}
