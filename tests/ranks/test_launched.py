"""What a launcher says of a process, and engines of processes that it started, with nothing but `systems.initialize`."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from systems.errors import UnsupportedError
from systems.machine.threads import cores_each
from systems.ranks.launchers import Launched, chosen_threads, launched
from tests.systems.models_small import build, next_token_loss, tokens
from tests.systems.running import RESIDENT, finished, one_step, settings, start

ROOT = Path(__file__).resolve().parents[2]
SAID = {"RANK": "1", "WORLD_SIZE": "4", "LOCAL_RANK": "1", "LOCAL_WORLD_SIZE": "2", "MASTER_ADDR": "a", "MASTER_PORT": "1"}
STEPS = 2
WORK = """
import os, pickle, sys, systems, torch
import torch.distributed as dist
from tests.systems.models_small import build, next_token_loss, tokens
rank, batches = int(os.environ["RANK"]), tokens(2, 2)
if sys.argv[2] == "own":
    dist.init_process_group("gloo")
given = dict(device_memory="2MiB") if sys.argv[3] == "elixir" else {}

def begun():
    return systems.initialize(build("opt"), system=sys.argv[3], device="cpu", dtype="fp32", clip=0.5, **given)

def trained(*engines):
    for batch in batches:
        for engine in engines:
            engine.backward(next_token_loss(engine, batch[rank], batch[:, :, 1:].numel()))
            engine.step()
    for engine in engines:
        engine.drain()
        with engine.summon() as values:
            yield {name: value.clone() for name, value in values.items()}, [each.norm for each in engine.outcomes]
        engine.close()

found = [*trained(begun())]
if sys.argv[3] == "elixir":
    found += trained(begun(), begun())
assert dist.is_initialized() == (sys.argv[2] == "own")
threads = torch.get_num_threads()
open(f"{sys.argv[1]}/found-{rank}", "wb").write(pickle.dumps((found, threads)))
if dist.is_initialized():
    dist.barrier()
    dist.destroy_process_group()
"""
ABSENT = """
import os, sys, systems
from tests.systems.models_small import build
rank = int(os.environ["RANK"])
for dtypes in (("fp32", "int3"), ("fp32", "fp32")):
    try:
        systems.initialize(build("opt"), device="cpu", device_memory="2MiB", dtype=dtypes[rank]).close()
    except ValueError as error:
        open(f"{sys.argv[1]}/told-{rank}", "w").write(f"{type(error).__name__} {error}")
"""


def test_what_a_launcher_says(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("WORLD_SIZE", raising=False)
    assert launched() is None
    for name, value in SAID.items():
        monkeypatch.setenv(name, value)
    assert launched() == Launched(rank=1, size=4, local_rank=1, local_size=2)
    monkeypatch.setenv("RANK", "4")
    with pytest.raises(UnsupportedError, match="RANK is 4 of 4 processes, counted from 0"):
        launched()
    monkeypatch.setenv("RANK", "one")
    with pytest.raises(UnsupportedError, match="RANK is 'one', which is no number"):
        launched()
    monkeypatch.delenv("LOCAL_RANK")
    with pytest.raises(UnsupportedError, match="WORLD_SIZE is 4, .* but LOCAL_RANK is not set: start"):
        launched()
    monkeypatch.setenv("WORLD_SIZE", "1")
    assert launched() is None
    monkeypatch.setenv("WORLD_SIZE", "two")
    with pytest.raises(UnsupportedError, match="WORLD_SIZE is 'two', which is no number"):
        launched()


def test_one_thread_is_torchrun_s_choice_and_not_the_user_s(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("TORCHELASTIC_RUN_ID", raising=False)
    for given, expected in (("1", 1), ("3", 3), ("", None), ("0", None), ("many", None)):
        monkeypatch.setenv("OMP_NUM_THREADS", given)
        assert chosen_threads() == expected
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    assert chosen_threads() is None
    monkeypatch.setenv("OMP_NUM_THREADS", "2")
    assert chosen_threads() == 2


@pytest.mark.parametrize(
    ("group", "system"), [("own", "elixir"), ("none", "elixir"), ("own", "torch-ddp"), ("none", "fsdp2-offload")]
)
@pytest.mark.one_in(4)
@pytest.mark.long
def test_engines_of_torchrun(group: str, system: str, tmp_path: Path) -> None:
    """The bits of one rank that accumulates, also of engines after and beside each other, or torch's of the same. Groups end
    with who made them.
    """
    (tmp_path / "work.py").write_text(WORK)
    command = [sys.executable, "-m", "torch.distributed.run", "--nproc-per-node", "2", "--master-port", "0"]
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    variables.pop("OMP_NUM_THREADS", None)
    command += ["--standalone", str(tmp_path / "work.py"), str(tmp_path), group, system]
    done = subprocess.run(command, env=variables, cwd=ROOT, capture_output=True, text=True, timeout=180)
    assert done.returncode == 0, done.stderr
    expected = start(RESIDENT, build("opt"), settings(accumulate=2, clip=0.5, dtype="fp32"))
    run = finished(expected, [one_step(expected, batch, next_token_loss) for batch in tokens(STEPS, 2)])
    for rank in range(2):
        found, threads = pickle.loads((tmp_path / f"found-{rank}").read_bytes())
        assert threads == cores_each(2)
        assert len(found) == (3 if system == "elixir" else 1)
        for values, norms in found:
            if system == "elixir":
                assert norms == run.norms
                assert all(torch.equal(values[name], value) for name, value in run.parameters.items())
            else:
                assert norms == pytest.approx(run.norms, rel=1e-5)
                assert all(torch.allclose(values[name], value, rtol=0, atol=1e-5) for name, value in run.parameters.items())


@pytest.mark.long
def test_a_process_that_does_not_come_says_why(tmp_path: Path) -> None:
    """The other one would wait for it."""
    (tmp_path / "work.py").write_text(ABSENT)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2"]
    done = subprocess.run(
        [*command, str(tmp_path / "work.py"), str(tmp_path)],
        env={**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"},
        cwd=ROOT,
        capture_output=True,
        text=True,
        timeout=180,
    )
    assert done.returncode == 0, done.stderr
    told = [(tmp_path / f"told-{rank}").read_text() for rank in range(2)]
    assert told[1].startswith("ValueError dtype is 'int3'")
    assert told[0].startswith("UnsupportedError rank 1 does not take part: dtype is 'int3'")
