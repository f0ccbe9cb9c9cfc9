"""Trainer on two ranks that torchrun starts: the run of one rank that accumulates two micro-batches."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch

from tests.integrations.training import finished, offloaded, opt

ROOT = Path(__file__).resolve().parents[2]
LAUNCH = ("-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "tests.integrations.training")


@pytest.mark.slow
def test_two_ranks_train_as_one(tmp_path: Path) -> None:
    """Norms and weights to the bit, though the two saved and went on; all that is logged as transformers' own Trainer does
    on two ranks, which evaluates other batches than on one.
    """
    trainer = offloaded(tmp_path / "one", opt(dropout=0.0), gradient_accumulation_steps=2)
    trainer.train()
    one = finished(trainer)
    command, environment = [sys.executable, *LAUNCH, str(tmp_path)], {**os.environ, "OMP_NUM_THREADS": "1"}
    done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=280, check=False)
    assert done.returncode == 0, done.stderr[-3000:]
    logs = json.loads(next(line for line in reversed(done.stdout.splitlines()) if line.startswith("[{")))
    for mine, theirs in zip(logs, json.loads((tmp_path / "theirs.json").read_text()), strict=True):
        assert mine == pytest.approx(theirs, rel=2e-5)
    assert [entry.get("grad_norm") for entry in logs] == [entry.get("grad_norm") for entry in one.logs]
    weights = torch.load(tmp_path / "weights.pt", weights_only=True)
    assert all(torch.equal(value, weights[name]) for name, value in one.weights.items())
    assert (tmp_path / "checkpoint-10" / "model.safetensors").is_file()
