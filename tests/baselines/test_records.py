"""The whole way: the harness runs a baseline and its record says what trained. Slow: a process each."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from tests.baselines.conftest import EXACT, SYSTEMS, TORCH
from tests.baselines.training import ROOT, Job, train_all

pytestmark = [pytest.mark.slow, pytest.mark.timeout(1500)]
FAMILIES = ("gpt-tiny", "bert-tiny", "t5-tiny", "albert-tiny")


def harness(*arguments: str, results: Path) -> dict[str, Any]:
    """The JSON object that a command ends with."""
    done = subprocess.run(
        [sys.executable, "-m", "harness", *arguments, "--device", "cpu", "--results", str(results)],
        cwd=ROOT,
        env=os.environ | {"OMP_NUM_THREADS": "1"},
        capture_output=True,
        text=True,
    )
    assert done.stdout.strip(), done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_run_is_recorded(system: str, tmp_path: Path) -> None:
    record = harness("run", "--system", system, "--model", "opt-tiny", "--steps", "3", results=tmp_path)
    assert (record["status"], record["reason"]) == ("ok", None)
    assert record["strategy"]["real_package"] is True and record["strategy"]["config"]
    assert len(record["metrics"]["loss"]) == 3 and record["metrics"]["tokens_per_s"] > 0
    assert record["memory"]["device_peak_bytes"] is None
    if system != "torch-ddp":
        assert record["traffic"]["h2d_bytes"] is None
    assert record["resolved"]["package"].startswith("deepspeed " if system in EXACT else "torch ")


@pytest.mark.parametrize(
    ("system", "told"),
    [
        ("deepspeed-superoffload", "runs on CUDA only"),
        ("deepspeed-infinity", "--option nvme_path=FOLDER"),
        ("roundpipe", "runs on CUDA only"),
    ],
)
def test_a_refusal_is_recorded(system: str, told: str, tmp_path: Path) -> None:
    record = harness("run", "--system", system, "--model", "opt-tiny", "--steps", "2", results=tmp_path)
    assert record["status"] == "refused" and told in record["reason"]["message"]


def test_a_users_file_is_in_the_record(tmp_path: Path) -> None:
    own = tmp_path / "own.json"
    own.write_text(json.dumps({"zero_optimization": {"sub_group_size": 12345}}))
    options = ("--option", f"config={own}", "--steps", "2")
    record = harness("run", "--system", "deepspeed-zero3", "--model", "opt-tiny", *options, results=tmp_path / "results")
    assert record["strategy"]["config"]["zero_optimization"]["sub_group_size"] == 12345
    assert record["strategy"]["config_file"] == record["resolved"]["options"]["config"] == str(own)


def test_every_family_under_every_kind(tmp_path: Path) -> None:
    """ALBERT's shared layers, T5's two stacks and BERT's objective, against the reference recipe."""
    kinds = (*TORCH, "deepspeed-zero3-offload", "deepspeed-zero2-offload", "deepspeed-zero3")
    jobs = [Job(system, model=model) for system in ("resident", *kinds) for model in FAMILIES]
    results = train_all(jobs, tmp_path)
    for job, result in results.items():
        assert result.error is None, result.error
        reference = results[Job("resident", model=job.model)]
        assert result.losses == pytest.approx(reference.losses, abs=2e-5), job
        assert result.norms == pytest.approx(reference.norms, rel=2e-5), job


@pytest.mark.parametrize("place", ["cpu", "nvme"])
def test_infinity_trains_from_disk(place: str, tmp_path: Path) -> None:
    """Four sub-groups or more, so that one is read, one updated and one written at the same time."""
    disk, own = tmp_path / "disk", tmp_path / "own.json"
    disk.mkdir()
    own.write_text(json.dumps({"zero_optimization": {"sub_group_size": 300_000}}))
    alone = Job("resident", model="gpt-tiny")
    job = replace(alone, system="deepspeed-infinity", options=(f"nvme_path={disk}", f"parameters={place}", f"config={own}"))
    results = train_all([alone, job], tmp_path)
    ours, reference = results[job], results[alone]
    if ours.error is not None and "need libaio" in ours.error:
        pytest.skip("DeepSpeed's disk operations need libaio and its headers, which are not here")
    assert ours.error is None, ours.error
    assert ours.losses == pytest.approx(reference.losses, abs=1e-5)
    assert list(disk.iterdir()) == []
