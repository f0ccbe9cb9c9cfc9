"""A process that trains and saves its checkpoint over the last one, again and again, until it is killed; and what it trains.

State n, after n steps, is the same whoever trains and however often it went on from a checkpoint.
"""

from __future__ import annotations

import hashlib
import itertools
import os
from collections.abc import Iterator, Mapping
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import torch
import torch._dynamo  # initialize asks it what a module is; here, that is once for all processes
from torch import nn

from systems import checkpoint
from systems.settings import Settings
from systems.system import Engine
from tests.systems.every import RESIDENT, STRATEGIES

WIDTH, LAYERS = 192, 6
SYSTEMS: Mapping[str, Any] = {**STRATEGIES, "resident": RESIDENT}
FILE_BYTES = 1 << 20  # so that a checkpoint has several files


def begin(system: str, *, seed: int = 0) -> Engine:
    """seed: of the first weights."""
    torch.manual_seed(seed)
    blocks = nn.ModuleList([nn.Sequential(nn.Linear(WIDTH, WIDTH), nn.Tanh()) for _ in range(LAYERS)])
    model = nn.Sequential(*blocks, nn.BatchNorm1d(WIDTH))
    memory = 3_000_000 if system in STRATEGIES else 1 << 30
    given = Settings(dtype="fp32", clip=0.5, device_memory=memory, host_memory=1 << 30)
    return SYSTEMS[system].initialize(model, given, SYSTEMS[system].Options())


def step(engine: Engine, number: int) -> None:
    """The one that ends in state `number`."""
    batch = torch.randn(4, WIDTH, generator=torch.Generator().manual_seed(number))
    engine.backward(engine(batch).sub(batch.roll(1, -1)).square().mean())
    engine.step()
    engine.drain()


def digests(engine: Engine) -> dict[str, str]:
    """Of every weight, moment and buffer, and every count as it is."""
    state = engine.training_state()
    found = {"loop": str(state.control.loop), "updates": str(state.control.updates)}
    for number, described in enumerate(state.parameters):
        for part in ("value", *state.moments):
            found[f"{part} of {described.name}"] = _digest(state.read(number, part))
    return found | {name: _digest(buffer) for name, buffer in engine.module.named_buffers()}


def _digest(tensor: torch.Tensor) -> str:
    return hashlib.sha256(tensor.detach().contiguous().numpy().tobytes()).hexdigest()


def states() -> Iterator[dict[str, str]]:
    """The digests of state 0, 1 and so on."""
    with begin("resident") as engine:
        for number in itertools.count(1):
            yield digests(engine)
            step(engine, number)


def beside(number: int) -> dict[str, torch.Tensor]:
    return {"number": torch.tensor(number)}


def train_and_save(system: str, folder: Path, told: Connection) -> None:
    """Tells (number, entries of the folder): none as the save of state `number` begins, what is there when it is done."""
    torch.set_num_threads(1)
    checkpoint.tensors.FILE_BYTES = FILE_BYTES
    there = (folder / checkpoint.MANIFEST).exists()
    engine = begin(system, seed=1 if there else 0)
    done = checkpoint.load(engine, folder)[0].steps if there else 0
    for number in itertools.count(done + 1):
        step(engine, number)
        told.send((number, None))
        checkpoint.save(engine, folder, beside=beside(number))
        told.send((number, sorted(os.listdir(folder))))
