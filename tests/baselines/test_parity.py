"""Every baseline that runs on a CPU runs here, the real package, beside the reference recipe: same start, same losses."""

from __future__ import annotations

import importlib.metadata
import math
from collections.abc import Callable

import pytest
import torch

from tests.baselines.conftest import BF16, EXACT, FP32, FROZEN, cases, reference
from tests.baselines.training import STEPS, Job, Result

pytestmark = [pytest.mark.long, pytest.mark.timeout(1500)]  # the first use of a package builds its extensions: minutes

Trained = Callable[[Job], Result]
EVERY = [*FP32, *BF16, *FROZEN]


def _name(job: Job) -> str:
    return "-".join([job.system, job.model, job.dtype, *job.options])


def _largest_difference(ours: dict[str, torch.Tensor], theirs: dict[str, torch.Tensor]) -> float:
    assert ours.keys() == theirs.keys()
    return max(float((ours[name] - theirs[name]).abs().max()) for name in ours)


@pytest.mark.parametrize("job", cases(EVERY), ids=_name)
def test_parameters_start_as_everywhere(job: Job, trained: Trained) -> None:
    ours, theirs = trained(job).start, trained(reference(job)).start
    assert ours.keys() == theirs.keys()
    assert [name for name in ours if not torch.equal(ours[name], theirs[name])] == []


@pytest.mark.parametrize("job", cases([*FP32, *FROZEN]), ids=_name)
def test_fp32_is_the_reference(job: Job, trained: Trained) -> None:
    """Losses, norms with two micro-batches, clipping and recomputation. Parameters to a share of lr: Adam divides by
    roots near zero."""
    ours, theirs = trained(job), trained(reference(job))
    assert ours.losses == pytest.approx(theirs.losses, abs=1e-5)
    assert ours.norms == pytest.approx(theirs.norms, rel=1e-5)
    assert ours.eval_loss == pytest.approx(theirs.eval_loss, abs=1e-5)
    assert ours.skipped == [False] * STEPS
    assert _largest_difference(ours.end, theirs.end) < 5e-5


@pytest.mark.parametrize("job", cases(EVERY), ids=_name)
def test_a_state_dict_is_the_model_s(job: Job, trained: Trained) -> None:
    result = trained(job)
    assert list(result.exported) == result.names == list(result.end)
    assert _largest_difference(result.exported, result.end) == 0.0


@pytest.mark.parametrize("job", cases(BF16), ids=_name)
def test_bf16_agrees(job: Job, trained: Trained) -> None:
    ours, theirs = trained(job), trained(reference(job))
    assert ours.losses == pytest.approx(theirs.losses, abs=2e-2)
    assert ours.eval_loss == pytest.approx(theirs.eval_loss, abs=2e-2)
    for norm, other in zip(ours.norms, theirs.norms, strict=True):
        assert norm is None or norm == pytest.approx(other, rel=2e-2)


@pytest.mark.parametrize("job", cases(EVERY), ids=_name)
def test_a_rate_of_zero_changes_nothing(job: Job, trained: Trained) -> None:
    """So it reached every optimizer there is. Without decay in it, which is multiplied with the rate too."""
    result = trained(job)
    assert _largest_difference(result.after_lr_0, result.end) == 0.0
    assert _largest_difference(result.end, result.start) > 1e-4


@pytest.mark.parametrize("job", cases(EVERY), ids=_name)
def test_values_written_back_are_computed_with(job: Job, trained: Trained) -> None:
    result, first = trained(job), trained(reference(job))
    assert result.written_loss == pytest.approx(first.written_loss, abs=1e-5 if job.dtype == "fp32" else 1e-2)


@pytest.mark.parametrize("job", cases(EVERY), ids=_name)
def test_the_record_names_the_real_package(job: Job, trained: Trained) -> None:
    statistics = trained(job).statistics
    package = "deepspeed" if job.system.startswith("deepspeed") else "torch"
    assert (statistics["package"], statistics["real_package"]) == (package, True)
    assert statistics["version"].partition("+")[0] == importlib.metadata.version(package).partition("+")[0]
    assert any("one memory" in note for note in statistics["notes"])


@pytest.mark.parametrize("job", cases(job for job in FP32 if job.system in EXACT), ids=_name)
def test_deepspeed_ran_what_its_name_says(job: Job, trained: Trained) -> None:
    statistics = trained(job).statistics
    zero, resolved = statistics["config"]["zero_optimization"], statistics["resolved"]
    assert statistics["config"]["gradient_clipping"] == resolved["gradient_clipping"] == 1.0
    assert resolved["accelerator"] == "cpu"
    stage3 = "zero2" not in job.system
    assert zero["stage"] == (3 if stage3 else 2)
    assert resolved["zero_optimizer"] == ("DeepSpeedZeroOptimizer_Stage3" if stage3 else "DeepSpeedZeroOptimizer")
    offloads = job.system.endswith(("offload", "twinflow"))
    assert resolved["optimizer"] == ("DeepSpeedCPUAdam" if offloads else "AdamW")
    assert ("offload_optimizer" in zero, "offload_param" in zero) == (offloads, job.system == "deepspeed-zero3-offload")


@pytest.mark.parametrize("job", cases(EVERY), ids=_name)
def test_unknown_is_left_out_and_not_zero(job: Job, trained: Trained) -> None:
    result = trained(job)
    assert result.memory["device_peak_bytes"] is None
    assert result.memory["host_peak_bytes"] >= 0
    if job.system != "torch-ddp":
        assert "h2d_bytes" not in result.counters
    assert result.counters["skipped_steps"] == 0
    assert all(math.isfinite(loss) for loss in result.losses)


def test_what_ddp_keeps_is_said(trained: Trained) -> None:
    kept = {_name(job): trained(job).statistics["dtypes"] for job in BF16 if job.system == "torch-ddp"}
    masters, autocast = kept.values()
    assert masters == {"weights": "bf16", "gradients": "bf16", "states": "fp32"}
    assert autocast == {"weights": "fp32 under bf16 autocast", "gradients": "fp32", "states": "fp32"}
