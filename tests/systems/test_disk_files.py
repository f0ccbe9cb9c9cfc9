"""The files of states on a disk: of any size, several engines' in one folder, cut short, and when their process is killed."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import systems
from tests.systems.running import adam_states, managed, parameters_of

# Elements of fp32 around what disks and pages are cut into: a number alone, 508 and 512 bytes, a page and one, nearly 1 MiB.
SIZES = ((), (1,), (127,), (128,), (1025,), (262143,))
FULL = 1 << 30


class Sizes(nn.Module):
    """A block with a parameter of each size."""

    def __init__(self) -> None:
        super().__init__()
        self.scales = nn.ParameterList([nn.Parameter(torch.randn(size)) for size in SIZES])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for scale in self.scales:
            x = x * (1 + 1e-2 * scale.mean())
        return x


class Net(nn.Module):
    def __init__(self, seed: int) -> None:
        super().__init__()
        torch.manual_seed(seed)
        self.blocks = nn.ModuleList(Sizes() for _ in range(4))
        self.head = nn.Linear(8, 8)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return self.head(x).square().mean()


def begin(system: str, seed: int = 0, **given: Any) -> Any:
    return systems.initialize(Net(seed), system=system, device="cpu", dtype="fp32", seed=seed, **given)


def step(engine: Any, number: int) -> float:
    loss = engine(torch.randn(4, 8, generator=torch.Generator().manual_seed(number)))
    engine.backward(loss)
    engine.step()
    return float(loss.detach())


@cache
def expected(seed: int) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    with begin("resident", seed, device_memory=FULL) as engine:
        losses = [step(engine, number) for number in range(4)]
        engine.drain()
        return losses, parameters_of(engine), adam_states(engine)


def short_of_host(seed: int, disk: Path, page: str = "64KiB") -> Any:
    given = {"device_memory": "5MiB", "host_memory": "9MiB", "disk": disk, "options": {"page": page}}
    return begin("angel-ptm", seed, **given)


@pytest.mark.parametrize("page", ["16KiB", "64KiB", "100000"])
@pytest.mark.one_in(3)
def test_sizes_of_all_kinds_and_two_engines_in_one_folder(page: str, tmp_path: Path) -> None:
    """Side by side, a step of each in turn: neither sees the other's values."""
    engines = [short_of_host(seed, tmp_path, page) for seed in (0, 1)]
    for engine in engines:
        assert managed(engine).layout.on_disk, "void: nothing is on the disk"
    losses: list[list[float]] = [[], []]
    for number in range(4):
        for engine, told in zip(engines, losses, strict=True):
            told.append(step(engine, number))
    for seed, engine in enumerate(engines):
        engine.drain()
        wanted, parameters, states = expected(seed)
        assert losses[seed] == wanted
        assert all(torch.equal(value, parameters[name]) for name, value in parameters_of(engine).items())
        found = adam_states(engine)
        assert all(torch.equal(found[name].exp_avg, states[name].exp_avg) for name in states)
        assert all(torch.equal(found[name].exp_avg_sq, states[name].exp_avg_sq) for name in states)
        engine.close()
    assert os.listdir(tmp_path) == []


def test_a_file_that_is_cut_short_is_told_by_its_folder(tmp_path: Path) -> None:
    """By hand, through the process that has it: it has no name by which another could."""
    engine = short_of_host(0, tmp_path)
    step(engine, 0)
    engine.drain()
    assert os.listdir(tmp_path) == []
    for file in managed(engine).disk._files:
        os.ftruncate(file, 4096)

    def go_on() -> None:
        for number in range(1, 4):
            step(engine, number)
        engine.drain()

    with pytest.raises(OSError, match="the disk's file ends too early, with optimizer states on the disk") as cut:
        go_on()
    assert cut.value.filename == str(tmp_path)
    engine.close()


KILLED = """
import os, signal, sys
from tests.systems.test_disk_files import short_of_host, step
from pathlib import Path
engine = short_of_host(0, Path(sys.argv[1]))
step(engine, 0)
print("ran", flush=True)
os.kill(os.getpid(), int(sys.argv[2]))
step(engine, 1)
"""


@pytest.mark.parametrize("number", [signal.SIGKILL, signal.SIGTERM, signal.SIGSEGV], ids=lambda each: each.name)
@pytest.mark.one_in(3)
@pytest.mark.long
def test_nothing_is_left_of_a_process_that_is_killed(number: signal.Signals, tmp_path: Path) -> None:
    """So the next run finds nothing that it had to tell from its own."""
    (tmp_path / "of somebody else").write_text("kept")
    done = subprocess.run([sys.executable, "-c", KILLED, str(tmp_path), str(int(number))], capture_output=True, text=True)
    assert done.stdout == "ran\n" and done.returncode == -number, done.stderr
    assert os.listdir(tmp_path) == ["of somebody else"]
