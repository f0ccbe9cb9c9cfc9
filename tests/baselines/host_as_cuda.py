"""RoundPipe runs on CUDA only. Here host memory poses as the device, so that its own code, unchanged, can be trained with.

`python -m tests.baselines.host_as_cuda` trains resident and RoundPipe and prints one JSON object. Streams and events do
nothing (the host has no order to keep), pinned memory is plain memory, and a copy to the device is a copy. Whatever this
shows holds for values, gradients and updates; nothing of it holds for time, overlap or memory.
"""

from __future__ import annotations

import contextlib
import json
import sys
from types import SimpleNamespace
from typing import Any

import torch

from systems.ranks.ranks import SingleRank
from systems.settings import AdamSettings, Settings
from systems.system import Engine
from tests.baselines.training import Job, Work, batches, work_of

MEMORY = 8 << 30


class HostEvent:
    """Everything has happened already."""

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def record(self, *args: Any) -> None:
        pass

    wait = synchronize = record

    def query(self) -> bool:
        return True

    def elapsed_time(self, other: HostEvent) -> float:
        return 1.0


class HostStream:
    def __init__(self, *args: Any, **kwargs: Any) -> None:
        pass

    def wait_stream(self, other: HostStream) -> None:
        pass


def _on_host(device: Any) -> Any:
    return "cpu" if isinstance(device, torch.device | str) and str(device).startswith("cuda") else device


def pose_as_cuda() -> None:
    """Replace what RoundPipe and its engine use of torch.cuda. There is no way back: for a process of its own."""
    cuda: Any = torch.cuda
    stream = HostStream()
    cuda.Event, cuda.Stream = HostEvent, HostStream
    cuda.default_stream = cuda.current_stream = lambda *args: stream
    cuda.stream = lambda stream: contextlib.nullcontext()
    cuda.device_count, cuda.current_device = lambda: 1, lambda: 0
    cuda.mem_get_info = lambda *args: (MEMORY, MEMORY)
    cuda.memory_reserved = cuda.max_memory_reserved = lambda *args: 0
    cuda.get_device_properties = lambda *args: SimpleNamespace(total_memory=MEMORY)
    cuda.host_memory_stats = dict
    for name in ("synchronize", "reset_peak_memory_stats", "set_per_process_memory_fraction"):
        setattr(cuda, name, lambda *args: None)
    torch._C._accelerator_setAllocatorSettings = lambda env: None

    tensor: Any = torch.Tensor
    move = tensor.to

    def to(self: torch.Tensor, *args: Any, **kwargs: Any) -> torch.Tensor:
        moved = move(self, *map(_on_host, args), **{key: _on_host(value) for key, value in kwargs.items()})
        return moved.clone() if moved is self and not self.requires_grad else moved

    tensor.to = to
    tensor.pin_memory = lambda self, *args: self.clone()
    tensor.is_pinned = lambda self, *args: True
    for name in ("empty", "empty_like"):
        setattr(torch, name, _unpinned(getattr(torch, name)))


def _unpinned(make: Any) -> Any:
    def made(*args: Any, **kwargs: Any) -> Any:
        kwargs.pop("pin_memory", None)
        return make(*args, **{key: _on_host(value) for key, value in kwargs.items()})

    return made


def _train(engine: Engine, work: Work, job: Job, *, at_once: bool) -> dict[str, Any]:
    """at_once: loss and both passes in the package's one call, as the harness does."""
    losses = []
    for step in batches(job, work.vocabulary, SingleRank()):
        label_count = sum(batch["labels"][:, 1:].numel() for batch in step)
        total = 0.0
        for batch in step:
            if at_once:
                total += float(engine.forward_backward(work.loss, batch, label_count))
            else:
                loss = work.loss(engine, batch, label_count)
                engine.backward(loss)
                total += float(loss.detach())
        engine.step()
        losses.append(total)
    engine.drain()
    with engine.summon() as values:
        end = {name: value.double().sum().item() for name, value in values.items()}
    norms = [outcome.norm for outcome in engine.outcomes]
    engine.close()
    return {"losses": losses, "norms": norms, "end": end}


def main() -> None:
    job = Job("roundpipe", model=sys.argv[1], dtype=sys.argv[2], accumulate=int(sys.argv[3]))
    torch.set_num_threads(1)
    asked: dict[str, Any] = {"dtype": job.dtype, "accumulate": job.accumulate, "clip": job.clip, "recompute": "full"}
    asked |= {"adam": AdamSettings(lr=1e-3), "device_memory": MEMORY, "host_memory": MEMORY}
    found = {}
    from systems.baselines.resident import SYSTEM as RESIDENT
    from systems.baselines.roundpipe import SYSTEM as ROUNDPIPE

    def settings(device: str, work: Work) -> Settings:
        return Settings(device=device, initial_weights=work.initial_weights, **asked)  # type: ignore[arg-type]

    work = work_of(job)
    engine: Engine = RESIDENT.initialize(work.model, settings("cpu", work), RESIDENT.Options())
    found["resident"] = _train(engine, work, job, at_once=True)
    pose_as_cuda()
    for name, at_once, asynchronous in (("fused", True, False), ("called", False, False), ("asynchronous", True, True)):
        work = work_of(job)
        options = ROUNDPIPE.Options(asynchronous=asynchronous)
        engine = ROUNDPIPE.initialize(work.model, settings("cuda", work), options)
        found[name] = _train(engine, work, job, at_once=at_once)
    sys.stdout.write("\n" + json.dumps(found) + "\n")


if __name__ == "__main__":
    main()
