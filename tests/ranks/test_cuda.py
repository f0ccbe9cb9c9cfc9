"""Ranks with CUDA devices: each its own over NCCL, or all the same one over gloo, which NCCL refuses."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from functools import cache
from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
import torch

from tests.systems.every import STRATEGIES

ROOT = Path(__file__).resolve().parents[2]
SHARED, APART = "shared", "apart"
WORK = """
import os, pickle, sys, systems, torch
import torch.distributed as dist
from torch import nn
folder, where, system, dtype, accumulate, budget, *options = sys.argv[1:]
rank, size, width = int(os.environ["RANK"]), int(os.environ["WORLD_SIZE"]), 512
torch.cuda.set_device(0 if where == "shared" else rank)
torch.use_deterministic_algorithms(True)
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=size)

class Block(nn.Module):
    def __init__(self):
        super().__init__()
        self.norm, self.up, self.down = nn.LayerNorm(width), nn.Linear(width, 4 * width), nn.Linear(4 * width, width)

    def forward(self, x):
        return x + self.down(nn.functional.gelu(self.up(self.norm(x))))

class Model(nn.Module):
    def __init__(self):
        super().__init__()
        self.blocks, self.head = nn.ModuleList(Block() for _ in range(8)), nn.Linear(width, width)

    def forward(self, x):
        for block in self.blocks:
            x = block(x)
        return self.head(x)

torch.manual_seed(0)
model = Model()
given = {"device_memory": int(budget)} if system != "resident" else {}
engine = systems.initialize(
    model, system=system, dtype=dtype, accumulate=int(accumulate), clip=1.0, host_memory="8GiB", **given,
    options=dict(option.split("=") for option in options),
)
luck, losses = torch.Generator().manual_seed(1), []
for step in range(5):
    for _ in range(int(accumulate)):
        batch = [torch.randn(128, width, generator=luck) for _ in range(size)][rank].cuda()
        loss = engine(batch).float().square().mean() / size / int(accumulate)
        engine.backward(loss)
        losses.append(loss.item())
    engine.step()
engine.drain()
with engine.summon() as values:
    parameters = {name: value.clone() for name, value in values.items()}
norms, peak = [outcome.norm for outcome in engine.outcomes], engine.memory().device_peak_bytes
touched = [device for device in range(torch.cuda.device_count()) if torch._C._cuda_hasPrimaryContext(device)]
engine.close()
dist.destroy_process_group()
open(f"{folder}/found-{rank}", "wb").write(pickle.dumps((losses, norms, parameters, peak, touched)))
"""

pytestmark = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@cache
def trained(where: str, system: str, dtype: str, accumulate: int, budget: int = 0, *options: str) -> list[Any]:
    """Of each rank: its losses, the norms, the parameters, the device's peak and the devices that have anything of it."""
    with TemporaryDirectory() as folder:
        arguments = [sys.executable, "-c", WORK, folder, where, system, dtype, str(accumulate), str(budget), *options]
        path = os.pathsep.join([str(ROOT), *filter(None, [os.environ.get("PYTHONPATH")])])
        more = {"PYTHONPATH": path, "GLOO_SOCKET_IFNAME": "lo", "WORLD_SIZE": "2", "CUBLAS_WORKSPACE_CONFIG": ":4096:8"}
        started = [subprocess.Popen(arguments, env=os.environ | more | {"RANK": str(rank)}, cwd=ROOT) for rank in range(2)]
        assert [each.wait(timeout=180) for each in started] == [0, 0]
        return [pickle.loads((Path(folder) / f"found-{rank}").read_bytes()) for rank in range(2)]


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize(("dtype", "accumulate"), [("fp32", 1), ("bf16", 2)])
@pytest.mark.parametrize("where", [SHARED, APART])
def test_ranks_have_the_bits_of_resident_on_them(where: str, strategy: str, dtype: str, accumulate: int) -> None:
    if where == APART and torch.cuda.device_count() < 2:
        pytest.skip("needs two CUDA devices")
    expected = trained(where, "resident", dtype, accumulate)
    found = trained(where, strategy, dtype, accumulate, expected[0][3] // 2)
    for rank, (mine, reference) in enumerate(zip(found, expected, strict=True)):
        (losses, norms, parameters, peak, touched), (their_losses, their_norms, theirs, of_resident, _) = mine, reference
        assert losses == their_losses and norms == their_norms
        assert all(torch.equal(parameters[name], value) for name, value in theirs.items())
        assert peak <= of_resident // 2
        assert touched == [0 if where == SHARED else rank]


@pytest.mark.skipif(torch.cuda.device_count() < 2, reason="needs two CUDA devices")
def test_nccl_s_own_sum_of_two_ranks_has_the_same_bits() -> None:
    """One addition, rounded once, either way."""
    budget = trained(APART, "resident", "bf16", 2)[0][3] // 2
    ordered, native = (trained(APART, "elixir", "bf16", 2, budget, f"reduction={how}") for how in ("ordered", "native"))
    for mine, theirs in zip(native, ordered, strict=True):
        assert mine[:2] == theirs[:2] and all(torch.equal(mine[2][name], value) for name, value in theirs[2].items())
