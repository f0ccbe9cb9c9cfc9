"""`harness profile`: this machine's roofs, measured into a hardware profile (systems/planning/hardware.py).

Each number says when and by what it was measured. Without a CUDA device only the host's part is measured and the file has no
device: --like has the rest from another profile. With --ranks the collectives of so
many processes are measured too, on devices or on the host.
"""

from __future__ import annotations

import json
import os
from collections.abc import Callable
from dataclasses import dataclass, field
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

import torch
from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.output import gives_json, progress_console, result_console, say
from harness.profile_spec import ProfileSpec
from harness.roofs import device as on_device
from harness.roofs import host
from harness.roofs.clock import nothing
from harness.roofs.collectives import Collectives, CollectiveSizes, collectives
from harness.roofs.contention import Moving, contention
from harness.roofs.device import Devices, DeviceSizes
from harness.roofs.disk import DiskSizes, disk
from harness.roofs.host import HostSizes
from harness.spec import BadInputError, Device
from systems.adam.cpu import cpu_kernel
from systems.machine.durable import prove_writable, write_whole
from systems.machine.limits import MachineLimits, in_memory, read_limits
from systems.messages import one_line
from systems.planning import hardware
from systems.planning.hardware import Flow, HardwareProfile
from systems.sizes import format_size

SHORTEST_S = 1e-9  # of what took no time that could be seen: a profile's figures are above 0
COPIES = 4  # of the largest tensor of a collective, in each of the processes on a host
LATENCY_AT = 4 << 20  # bytes of the copy whose time beyond its bytes is called the latency


@dataclass
class Figures:
    """Fields of a profile as they come in, each with its source."""

    label: str
    made_at: datetime = field(default_factory=lambda: datetime.now(UTC))
    fields: dict[str, Any] = field(default_factory=dict)
    other: dict[str, Any] = field(default_factory=dict)

    def figure(self, value: float, detail: str) -> dict[str, Any]:
        return {"value": value, "source": self.source(detail)}

    def source(self, detail: str) -> str:
        return f"measured {self.made_at:%Y-%m-%d} by harness profile, torch {torch.__version__}, {self.label}: {detail}"

    def put(self, name: str, value: float, detail: str) -> None:
        assert name in HardwareProfile.model_fields
        self.fields[name] = self.figure(value, detail)

    def add(self, name: str, value: float, detail: str) -> None:
        """Beside the profile's own fields."""
        self.other[name] = self.figure(value, detail)

    def content(self) -> dict[str, Any]:
        ordered = {name: self.fields[name] for name in HardwareProfile.model_fields if name in self.fields}
        return {"description": self.label, **ordered, "other": self.other}


def measure_disk(
    figures: Figures, folder: Path, tell: Callable[[str], None], sizes: DiskSizes, flags: int = os.O_DIRECT
) -> None:
    """flags: how the disk's file is opened."""
    tell("disk")
    found = disk(folder, sizes, flags)
    figures.put("disk_bytes", found.free, "free space")
    figures.put("disk_read_bytes_per_s", found.read.read, f"{found.read.told}: the best of {len(found.tried)} ways")
    figures.put("disk_write_bytes_per_s", found.write.write, f"{found.write.told}: the best of {len(found.tried)} ways")
    figures.put("disk_both_ways_bytes_per_s", 2 * found.both.both, f"read and written at once, {found.both.told}")
    for each in found.tried:
        how = f"{format_size(each.block).lower()}_{each.threads}_threads"
        figures.add(f"disk_read_{how}_bytes_per_s", each.read, each.told)
        figures.add(f"disk_write_{how}_bytes_per_s", each.write, each.told)


def measure_host(
    figures: Figures,
    limits: MachineLimits,
    sizes: HostSizes,
    tell: Callable[[str], None],
) -> None:
    """The host's part but for its disk."""
    tell("host memory")
    figures.put("host_memory_bytes", limits.host_budget_bytes or sizes.need, "smallest limit of machine and cgroups")
    for name, rate in host.dram(sizes).items():
        figures.add(f"host_{name}_bytes_per_s", rate, f"{torch.get_num_threads()} threads, bytes read and written")
    tell("CPU Adam")
    kernel = cpu_kernel().name
    by_threads = host.adam_by_threads(sizes, host.thread_counts(limits.cores))
    for threads, rate in by_threads.items():
        figures.add(f"cpu_adam_{threads}_threads_bytes_per_s", rate, f"{kernel}, 28 bytes a parameter")
    threads = host.updating_threads(limits.cores)
    figures.put("cpu_adam_bytes_per_s", by_threads[threads], f"{kernel}, {threads} threads, 28 bytes a parameter")
    what = f"{sizes.small_updates} updates of CPU Adam over {sizes.large_updates} of as many parameters, {threads} threads"
    figures.put("cpu_update_s", max(host.update_s(sizes, threads), SHORTEST_S), what)


def measure_devices(
    figures: Figures,
    kind: Devices,
    limits: MachineLimits,
    host_sizes: HostSizes,
    sizes: DeviceSizes,
    tell: Callable[[str], None],
) -> None:
    """The devices' part, and what they and the host do together."""
    figures.put("nodes", 1, "this machine")
    figures.put("devices_per_node", len(kind.devices), "devices that are visible")
    tell("matrix products and device memory")
    _measure_compute(figures, kind, sizes)
    tell("copies")
    _put_copies(figures, on_device.copies(kind, sizes), len(kind.devices))
    tell("CPU Adam beside copies")
    _put_contention(figures, kind, host.updating_threads(limits.cores), host_sizes, sizes)
    tell("pinning, storages and unit events")
    for name, rate in on_device.pinning(kind, sizes).items():
        figures.add(f"{name}_bytes_per_s", rate, f"{format_size(sizes.pinned)} at once")
    figures.add("storage_rebind_s", host.rebind_s(kind.first, host_sizes), "from Python")
    figures.put(
        "unit_event_s",
        on_device.unit_event_s(kind, sizes),
        f"elixir, everything fits, {sizes.units} units that do next to nothing",
    )


def _put_contention(figures: Figures, kind: Devices, threads: int, host_sizes: HostSizes, sizes: DeviceSizes) -> None:
    one = host.AdamPass(host_sizes.adam_parameters, host_sizes.large_updates)
    update = one.by(cpu_kernel(threads=threads))

    def turn() -> Callable[[], None]:
        update()
        return nothing

    rates = contention(kind, Moving(one.nbytes, turn), sizes)
    how = f"CPU Adam with {threads} threads, and copies of {format_size(sizes.copies[-1])} on {len(kind.devices)} devices"
    what = figures.source(f"{how}: all bytes over all the time of {sizes.rounds} rounds")
    figures.fields["contention"] = {"rates": rates, "source": what}
    alone, together = rates[0][Flow.CPU_ADAM], rates[-1]
    figures.put("cpu_adam_bytes_per_s", alone, f"{how}: alone, 28 bytes a parameter")
    adam, all_of_it = together[Flow.CPU_ADAM], sum(together.values())
    most = max(sum(each.values()) for each in rates)
    figures.put("host_dram_bytes_per_s", most, f"{how}: the most that any of them passed at once")
    figures.put("cpu_adam_dram_share", adam / all_of_it, f"{how}, both ways")
    figures.add("cpu_adam_beside_copies_bytes_per_s", adam, f"{how}, both ways")
    figures.add("copies_beside_cpu_adam_bytes_per_s", all_of_it - adam, f"{how}, both ways")


def _measure_compute(figures: Figures, kind: Devices, sizes: DeviceSizes) -> None:
    rates = {name: on_device.matmul_rate(kind, dtype, sizes) for name, dtype in on_device.DTYPES.items()}
    figures.fields["matmul_flops_per_s"] = {
        name: figures.figure(rate, f"{sizes.matmul}^3{', no TF32' if name == 'fp32' else ''}") for name, rate in rates.items()
    }
    shape = f"{sizes.tokens} tokens, {sizes.width} wide, bf16"
    products, memory = on_device.product_rate(kind, sizes), on_device.memory_rate(kind, sizes)
    what = f"a block's products forward and backward, {shape}, over the large product"
    figures.put("matmul_efficiency", min(products / rates["bf16"], 1.0), what)
    heads = [(head, on_device.attention_rate(kind, head, sizes)) for head in sizes.heads]
    what = f"fused causal attention forward and backward, sequences of {sizes.sequence}, bf16"
    figures.fields["attention_by_width"] = {"points": heads, "source": figures.source(what)}
    figures.put("device_dram_bytes_per_s", memory, "copy, bytes read and written")
    what = f"a block's norm, activation and residual, {shape}, over the copy"
    figures.put("device_dram_efficiency", min(on_device.other_rate(kind, sizes) / memory, 1.0), what)
    figures.put("kernel_launch_s", on_device.kernel_launch_s(kind, sizes), "one after the other, of 16 elements")
    link = on_device.peer_rate(kind, sizes)
    if link is not None:
        figures.put("device_link_bytes_per_s", link, "copy from the first device to the second")


def _put_copies(figures: Figures, found: on_device.Copies, devices: int) -> None:
    by_size, pinned = found.by_size, "pinned, back to back"
    for direction in on_device.BOTH:
        size, rate = by_size[direction][-1]
        figures.put(f"{direction}_bytes_per_s", rate, f"{pinned}, {format_size(size)}")
        figures.add(f"pageable_{direction}_bytes_per_s", found.pageable[direction], format_size(size))
    figures.fields["copies_by_size"] = {"points": list(by_size["h2d"]), "source": figures.source(f"host to device, {pinned}")}
    for size, rate in by_size["d2h"]:
        figures.add(f"d2h_{format_size(size).lower()}_bytes_per_s", rate, pinned)
    size, rate = min(by_size["h2d"], key=lambda point: abs(point[0] - LATENCY_AT))
    latency = size / rate - size / max(rate for _, rate in by_size["h2d"])
    told = f"what {format_size(size)} take beyond the highest rate, host to device"
    figures.put("copy_latency_s", max(latency, SHORTEST_S), told)
    figures.put("both_ways_bytes_per_s", found.both_ways, f"sum of both at once, {pinned}")
    figures.put("node_copy_bytes_per_s", found.one_way_all, f"{devices} devices at once, host to device, {pinned}")
    figures.put("node_both_ways_bytes_per_s", found.both_ways_all, f"{devices} devices at once, sum of both ways, {pinned}")


def put_collectives(figures: Figures, found: Collectives, ranks: int, device: Device) -> None:
    """What a gather and a reduction take, by what passes a port, and what ranks take to tell each other something."""
    way = "NCCL, a device each" if device == "cuda" else "gloo, through the host's memory"
    how = f"{ranks} ranks, {way}, in place, back to back, of bf16"
    for name, points, what in (
        ("gathers_by_size", found.gathers, "all-gather"),
        ("reductions_by_size", found.reductions, "ordered sum"),
        ("native_reductions_by_size", found.native, "reduce-scatter"),
    ):
        if points is not None:
            figures.fields[name] = {
                "points": list(points),
                "source": figures.source(f"{what}, {how}; by bytes that pass a port"),
            }
    figures.put("exchange_s", found.exchange_s, f"{ranks} ranks tell each other a list of numbers over gloo")


def _prepare(spec: ProfileSpec, limits: MachineLimits, sizes: HostSizes) -> None:
    """What can be found wrong before any measurement. Raises BadInputError."""
    try:
        _check(spec, limits, sizes)
    except OSError as error:  # such as a name too long
        raise BadInputError(f"{one_line(str(error))}: name another file or folder") from None


def _check(spec: ProfileSpec, limits: MachineLimits, sizes: HostSizes) -> None:
    if spec.device == "cuda" and not torch.cuda.is_available():
        raise BadInputError("--device cuda: torch finds no CUDA device here: see harness doctor, or use --device cpu")
    on_host = spec.device == "cpu" or not torch.cuda.is_available()
    devices = 0 if on_host else torch.cuda.device_count()
    if spec.ranks is not None and devices and spec.ranks > devices:
        raise BadInputError(f"--ranks {spec.ranks}: NCCL needs a device for each, {devices} are visible: lower it")
    if spec.like is not None:
        _check_like(spec.like, on_host=on_host)
    need = max(sizes.need, COPIES * max(CollectiveSizes().wholes) * spec.ranks if spec.ranks and on_host else 0)
    room = limits.available_memory_bytes
    if room is not None and room < need:
        raise BadInputError(f"harness profile needs {format_size(need)} of host memory, {format_size(room)} are free")
    if spec.disk is not None and not Path(spec.disk).is_dir():
        raise BadInputError(f"--disk {spec.disk} is no folder: name one on the disk to measure")
    if spec.disk is not None and (memory := in_memory(spec.disk)) is not None:
        raise BadInputError(f"--disk {spec.disk} is in memory ({memory}): name a folder on the disk to measure")
    if spec.out is not None:
        out = Path(spec.out)
        if out.suffix != ".json":
            raise BadInputError(f"--out {out}: a hardware profile is a file that ends in .json")
        if out.exists():
            raise BadInputError(f"--out {out} is there already, and measured numbers are never overwritten: name another file")
        if not out.parent.is_dir() or not os.access(out.parent, os.W_OK):
            raise BadInputError(f"--out {out}: {out.parent} is no folder that this user may write to: name another file")
        prove_writable(_behind_links(out), over="nothing")


def _check_like(given: str, *, on_host: bool) -> None:
    if not on_host:
        raise BadInputError(f"--like {given}: there is a device here, and all of it is measured: leave it out")
    try:
        hardware.load(given)
    except ValueError as error:
        raise BadInputError(f"--like {given}: {error}") from None


def _behind_links(out: Path) -> Path:
    """Where the profile comes to be: a link to what is not there yet leads there."""
    return Path(os.path.realpath(out))


def take_profile(
    spec: ProfileSpec,
    host_sizes: HostSizes | None = None,
    device_sizes: DeviceSizes | None = None,
    collective_sizes: CollectiveSizes | None = None,
    disk_sizes: DiskSizes | None = None,
) -> int:
    """Measure, write and print. The exit code. Raises BadInputError."""
    host_sizes, device_sizes = host_sizes or HostSizes(), device_sizes or DeviceSizes()
    limits = read_limits()
    _prepare(spec, limits, host_sizes)
    torch.set_num_threads(limits.cores)
    console = progress_console()
    kind = on_device.cuda_devices() if torch.cuda.is_available() and spec.device != "cpu" else None
    memory = format_size(limits.host_budget_bytes) if limits.host_budget_bytes else "memory without a limit"
    around = f"{limits.cores} cores and {memory}"
    if kind is None:
        figures = Figures(f"a host of {around}")
    else:
        properties = torch.cuda.get_device_properties(kind.first)
        figures = Figures(f"{len(kind.devices)} x {properties.name} with {around}")
        figures.fields["device_name"] = properties.name
        figures.put("device_memory_bytes", torch.cuda.mem_get_info(kind.first)[0], "free before anything was taken")
    if spec.disk is not None:
        measure_disk(figures, Path(spec.disk), console.print, disk_sizes or DiskSizes())
    measure_host(figures, limits, host_sizes, console.print)
    if kind is None:
        figures.add("storage_rebind_s", host.rebind_s(torch.device("cpu"), host_sizes), "from Python")
        missing = "there is no device in this profile: --like h100-80g-x1 has one from another"
        console.print(missing if spec.like is None else f"the device is that of {spec.like}", markup=False)
    else:
        measure_devices(figures, kind, limits, host_sizes, device_sizes, console.print)
    if spec.ranks is not None:
        console.print("collectives")
        at: Device = "cpu" if kind is None else "cuda"
        put_collectives(figures, collectives(spec.ranks, at, collective_sizes or CollectiveSizes()), spec.ranks, at)
    content = figures.content() if spec.like is None else {"like": spec.like, **figures.content()}
    if kind is not None:
        HardwareProfile.model_validate(content)
    if gives_json():
        say(json.dumps(content))
    else:
        _show(content, result_console())
    if spec.out is not None:
        try:
            made = json.dumps(content, indent=1) + "\n"
            write_whole(_behind_links(Path(spec.out)), made.encode(), over="nothing")
        except OSError as error:
            if not gives_json():
                say(json.dumps(content))
            raise BadInputError(f"--out {spec.out} cannot be written: {error.strerror}: the profile is on stdout") from None
    return 0


def _show(content: dict[str, Any], console: Console) -> None:
    """Every number of a profile and where it comes from, for a person."""
    table = Table("figure", "value", "source", title=escape(content["description"]))
    for name, found in {**content, **content["other"]}.items():
        parts = found.items() if name == "matmul_flops_per_s" else [("", found)]
        for part, one in parts:
            if isinstance(one, dict) and "value" in one:
                table.add_row(f"{name} {part}".strip(), f"{one['value']:,.6g}", escape(one["source"]))
    console.print(table)
