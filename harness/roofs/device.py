"""Roofs of devices and of their links to the host: copies, matrix products, memory. Copies beside CPU Adam: contention.py.

Nothing here names CUDA but `cuda_devices`: what is measured goes through a `Devices`, so that tests run all of it on a host.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Mapping, Sequence
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any, Literal

import torch
from torch import nn
from torch.nn import functional

from harness.roofs.clock import median_s
from harness.roofs.host import GIB, MIB
from systems.device.memory.host import HostMapping, host_account
from systems.device.watch.events import EventLog

Direction = Literal["h2d", "d2h"]
BOTH: tuple[Direction, ...] = ("h2d", "d2h")
LAUNCHES = 200  # in a row, for the time of one
DTYPES: Mapping[str, torch.dtype] = {"bf16": torch.bfloat16, "fp16": torch.float16, "fp32": torch.float32}


@dataclass(frozen=True)
class DeviceSizes:
    """How much is moved, in bytes unless named otherwise. over_s: how long each thing is measured. rounds: how often each set
    of flows beside each other is, in turn.

    copies: by size, ascending; the last is "large". issued: bytes that copies of one size move between two waits.
    matmul: side of the square matrices. width, tokens: of the transformer block, sequences of `sequence` tokens. heads: their
    widths, in elements.
    """

    copies: tuple[int, ...] = (64 << 10, 256 << 10, MIB, 4 * MIB, 16 * MIB, 256 * MIB)
    issued: int = 256 * MIB
    memory: int = GIB
    pinned: int = 2 * GIB
    matmul: int = 8192
    width: int = 4096
    tokens: int = 8192
    sequence: int = 1024
    heads: tuple[int, ...] = (64, 80, 96, 128, 144, 192, 256)
    units: int = 32
    rounds: int = 5
    over_s: float = 0.5


@dataclass(frozen=True)
class Devices:
    """The devices of one kind in this machine.

    pin: host memory that copy engines read, bytes. stream: a new queue of a device. on: within, work goes to that queue.
    mark: what it returns waits until a queue has done all that it has by then, and leaves the core to others meanwhile.
    wait: until all queues of all devices are empty. peers: whether the first two reach each other's memory.
    """

    devices: tuple[torch.device, ...]
    pin: Callable[[int], torch.Tensor]
    stream: Callable[[torch.device], Any]
    on: Callable[[Any], AbstractContextManager[object]]
    mark: Callable[[Any], Callable[[], None]]
    wait: Callable[[], None]
    peers: bool

    @property
    def first(self) -> torch.device:
        return self.devices[0]


def cuda_devices() -> Devices:
    """All that are visible."""
    devices = tuple(torch.device("cuda", index) for index in range(torch.cuda.device_count()))

    def wait() -> None:
        for device in devices:
            torch.cuda.synchronize(device)

    def mark(queue: torch.cuda.Stream) -> Callable[[], None]:
        event = torch.cuda.Event(blocking=True)
        event.record(queue)
        return event.synchronize

    return Devices(
        devices=devices,
        pin=lambda nbytes: torch.empty(nbytes, dtype=torch.uint8, pin_memory=True),
        stream=torch.cuda.Stream,
        on=torch.cuda.stream,
        mark=mark,
        wait=wait,
        peers=len(devices) > 1 and torch.cuda.can_device_access_peer(0, 1),
    )


class HostLink:
    """Memory at both ends of a device's link to the host, apart for each direction, with a queue for each."""

    def __init__(self, kind: Devices, device: torch.device, nbytes: int, host: Callable[[int], torch.Tensor]) -> None:
        self._kind = kind
        self._ends: dict[Direction, tuple[torch.Tensor, torch.Tensor]] = {}
        self._queues = {direction: kind.stream(device) for direction in BOTH}
        for direction in BOTH:
            on_host = host(nbytes).fill_(1)
            on_device = torch.ones(nbytes, dtype=torch.uint8, device=device)
            self._ends[direction] = (on_device, on_host) if direction == "h2d" else (on_host, on_device)
        kind.wait()

    def issue(self, direction: Direction, size: int, count: int) -> None:
        """Queue `count` copies of `size` bytes one behind the other."""
        target, source = (end[:size] for end in self._ends[direction])
        with self._kind.on(self._queues[direction]):
            for _ in range(count):
                target.copy_(source, non_blocking=True)

    def mark(self, direction: Direction) -> Callable[[], None]:
        """What it returns waits until the copies queued so far are done."""
        return self._kind.mark(self._queues[direction])


def copy_rate(
    kind: Devices, links: Sequence[HostLink], directions: Sequence[Direction], size: int, sizes: DeviceSizes
) -> float:
    """Payload bytes a second of all links in all of the directions at once, copies of `size` back to back."""
    count = max(sizes.issued // size, 1)

    def issue() -> None:
        for link in links:
            for direction in directions:
                link.issue(direction, size, count)

    return len(links) * len(directions) * count * size / median_s(issue, wait=kind.wait, over_s=sizes.over_s)


@dataclass(frozen=True)
class Copies:
    """Payload bytes a second. by_size: of the first device, one direction alone. The last three: of large copies.

    both_ways: one device, sum of both. one_way_all, both_ways_all: of all devices at once, the first host to device.
    """

    by_size: Mapping[Direction, tuple[tuple[int, float], ...]]
    pageable: Mapping[Direction, float]
    both_ways: float
    one_way_all: float
    both_ways_all: float


def copies(kind: Devices, sizes: DeviceSizes) -> Copies:
    large = sizes.copies[-1]
    links = [HostLink(kind, device, large, kind.pin) for device in kind.devices]
    pageable = [HostLink(kind, kind.first, large, lambda nbytes: torch.empty(nbytes, dtype=torch.uint8))]
    one = links[:1]
    return Copies(
        by_size={d: tuple((size, copy_rate(kind, one, [d], size, sizes)) for size in sizes.copies) for d in BOTH},
        pageable={d: copy_rate(kind, pageable, [d], large, sizes) for d in BOTH},
        both_ways=copy_rate(kind, one, BOTH, large, sizes),
        one_way_all=copy_rate(kind, links, ["h2d"], large, sizes),
        both_ways_all=copy_rate(kind, links, BOTH, large, sizes),
    )


def pinning(kind: Devices, sizes: DeviceSizes) -> dict[str, float]:
    """Bytes a second of torch's pinned tensors, and of this project's mappings, registered with the device."""
    began = time.perf_counter()
    tensor = kind.pin(sizes.pinned)
    made = time.perf_counter()
    del tensor
    registering = time.perf_counter()
    mapping = HostMapping("roofs", sizes.pinned, host_account(2 * sizes.pinned, EventLog(keep=False)), pinned=True)
    registered = time.perf_counter()
    mapping.close()
    return {"pinned_tensor": sizes.pinned / (made - began), "map_and_register": sizes.pinned / (registered - registering)}


def matmul_rate(kind: Devices, dtype: torch.dtype, sizes: DeviceSizes) -> float:
    """Operations a second of a large square product of random numbers: equal ones would cost less power, and so go faster."""
    n = sizes.matmul
    a, b = (torch.randn(n, n, device=kind.first).to(dtype) for _ in range(2))
    out = torch.empty_like(a)
    return 2 * n**3 / median_s(lambda: torch.mm(a, b, out=out), wait=kind.wait, over_s=sizes.over_s)


def memory_rate(kind: Devices, sizes: DeviceSizes) -> float:
    """Bytes a second that a copy within the device's memory reads and writes."""
    source = torch.ones(sizes.memory, dtype=torch.uint8, device=kind.first)
    target = torch.empty_like(source)
    return 2 * sizes.memory / median_s(lambda: target.copy_(source), wait=kind.wait, over_s=sizes.over_s)


def peer_rate(kind: Devices, sizes: DeviceSizes) -> float | None:
    """Payload bytes a second from the first device to the second; None where they do not reach each other."""
    if not kind.peers:
        return None
    source = torch.ones(sizes.memory, dtype=torch.uint8, device=kind.devices[0])
    target = torch.empty(sizes.memory, dtype=torch.uint8, device=kind.devices[1])
    return sizes.memory / median_s(lambda: target.copy_(source), wait=kind.wait, over_s=sizes.over_s)


class _Products(nn.Module):
    """The products of a block as OPT's and GPT's, and nothing else: no attention either."""

    def __init__(self, width: int) -> None:
        super().__init__()
        self.qkv, self.out = nn.Linear(width, 3 * width, bias=False), nn.Linear(width, width, bias=False)
        self.up, self.down = nn.Linear(width, 4 * width, bias=False), nn.Linear(4 * width, width, bias=False)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.down(self.up(self.out(self.qkv(x)[..., : x.shape[-1]])))


def product_rate(kind: Devices, sizes: DeviceSizes) -> float:
    """Operations a second of a block's matrix products, forward and backward in bf16."""
    width, sequence = sizes.width, sizes.sequence
    block = _Products(width).to(device=kind.first, dtype=torch.bfloat16)
    shape = (sizes.tokens // sequence, sequence, width)
    x = torch.randn(shape, dtype=torch.bfloat16, device=kind.first, requires_grad=True)
    gradient = torch.randn_like(x)
    operations = 3 * shape[0] * sequence * 24 * width**2

    def step() -> None:
        for tensor in (x, *block.parameters()):
            tensor.grad = None
        block(x).backward(gradient)

    return operations / median_s(step, wait=kind.wait, over_s=sizes.over_s)


def attention_rate(kind: Devices, head: int, sizes: DeviceSizes) -> float:
    """Operations a second of fused causal attention in bf16, forward and backward, half of the pairs counted."""
    batch, sequence, heads = sizes.tokens // sizes.sequence, sizes.sequence, max(sizes.width // head, 1)
    query, key, value = (
        torch.randn(batch, heads, sequence, head, dtype=torch.bfloat16, device=kind.first, requires_grad=True) for _ in range(3)
    )
    gradient = torch.randn_like(query)
    forward = 2 * batch * heads * sequence**2 * head
    operations = forward + forward * 5 // 2  # the backward makes the scores again

    def step() -> None:
        for tensor in (query, key, value):
            tensor.grad = None
        functional.scaled_dot_product_attention(query, key, value, is_causal=True).backward(gradient)

    return operations / median_s(step, wait=kind.wait, over_s=sizes.over_s)


def other_rate(kind: Devices, sizes: DeviceSizes) -> float:
    """Bytes a second, read and written, of a block's other operations in bf16, one kernel each: norm, activation, residual."""
    x = torch.randn(sizes.tokens, sizes.width, dtype=torch.bfloat16, device=kind.first)
    scale, shift = x.new_ones(sizes.width), x.new_zeros(sizes.width)

    def operations() -> None:
        normed = functional.layer_norm(x, (sizes.width,), scale, shift)
        functional.gelu(normed)
        x + normed

    with torch.no_grad():
        return (2 + 2 + 3) * x.nbytes / median_s(operations, wait=kind.wait, over_s=sizes.over_s)


def kernel_launch_s(kind: Devices, sizes: DeviceSizes) -> float:
    """Seconds an operation too small to take any time of its own."""
    x = torch.zeros(16, device=kind.first)

    def operations() -> None:
        for _ in range(LAUNCHES):
            x.add_(1)

    return median_s(operations, wait=kind.wait, over_s=sizes.over_s) / LAUNCHES


class _Chain(nn.Module):
    """Many units that do next to nothing."""

    def __init__(self, units: int) -> None:
        super().__init__()
        self.links = nn.ModuleList([nn.Linear(16, 16) for _ in range(units)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for link in self.links:
            x = link(x)
        return x


def unit_event_s(kind: Devices, sizes: DeviceSizes) -> float:
    """Host seconds a unit event, kernel launches included: a step of units that do next to nothing, over its four a unit."""
    import systems

    chain = _Chain(sizes.units)
    device: Any = kind.first.type
    x = torch.ones(1, 16, device=kind.first)
    with contextlib.closing(systems.initialize(chain, system="elixir", device=device, dtype="fp32")) as engine:

        def step() -> None:
            engine.backward(engine(x).sum())
            engine.step()

        for _ in range(3):  # traced, planned, and once by the plan
            step()
        engine.drain()
        return median_s(step, over_s=sizes.over_s) / (4 * sizes.units)
