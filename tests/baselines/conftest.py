"""What the baselines' tests look at: one process that trains each of them."""

from __future__ import annotations

from collections.abc import Callable

import pytest

from tests.baselines.training import Job, Result, train_all

EXACT = ("deepspeed-zero3-offload", "deepspeed-zero2-offload", "deepspeed-zero3", "deepspeed-zero2", "deepspeed-twinflow")
TORCH = ("torch-ddp", "fsdp2-offload")
SYSTEMS = (*EXACT, *TORCH)
BF16 = (
    Job("deepspeed-zero3-offload", dtype="bf16", accumulate=1, clip=0.0, recompute="none"),
    Job("deepspeed-zero2-offload", dtype="bf16", accumulate=2, clip=1.0, recompute="none"),
    Job("fsdp2-offload", dtype="bf16", accumulate=1, clip=0.0, recompute="none"),
    Job("torch-ddp", dtype="bf16", accumulate=2, clip=1.0, recompute="none"),
    Job("torch-ddp", dtype="bf16", accumulate=1, clip=0.0, recompute="none", options=("weights=autocast",)),
)
FROZEN = tuple(Job(system, model="frozen-middle") for system in ("deepspeed-zero3", "deepspeed-zero2", *TORCH))
FP32 = tuple(Job(system) for system in SYSTEMS)


def reference(job: Job) -> Job:
    """The same under resident."""
    return Job("resident", job.model, job.dtype, job.accumulate, job.clip, job.recompute)


@pytest.fixture(scope="session")
def trained(tmp_path_factory: pytest.TempPathFactory) -> Callable[[Job], Result]:
    """The result of one of the jobs above or its reference; torch's come first, since DeepSpeed changes torch."""
    asked = [*FP32, *BF16, *FROZEN]
    jobs = [*dict.fromkeys(map(reference, asked)), *sorted(asked, key=lambda job: job.system not in TORCH)]
    results = train_all(jobs, tmp_path_factory.mktemp("baselines"))

    def result(job: Job) -> Result:
        found = results[job]
        assert found.error is None, found.error
        return found

    return result
