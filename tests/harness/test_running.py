"""What becomes of a run inside its process: requests that are wrong, and every scripted failure as a record."""

from __future__ import annotations

import importlib.metadata
import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from harness import environment
from harness.measure import CLOCK
from harness.record import Record, to_json
from harness.spec import BadInputError, in_flags
from systems.baselines import resident
from systems.baselines.dummy import DummyEngine
from systems.machine.limits import process_memory, read_limits
from systems.substrate import engine as managed_engine
from tests.harness.conftest import make_spec

Run = Callable[..., Record]


@pytest.mark.parametrize(
    ("options", "fields", "said"),
    [
        ((), {"model": "opt-tny"}, "opt-tiny"),
        ((), {"set": ("num_layer=3",)}, "num_layers"),
        ((), {"set": ("num_layers=x",)}, "num_layers"),
        ((), {"seq_len": 4096}, "4096"),
        ((), {"data": "/no/such/file"}, "no such file"),
        ((), {"recompute": (99,)}, "--recompute names block 99"),
        ((), {"eval_every": 5}, "--eval-every 5 is never reached in 4 steps"),
        ((), {"system": "resident", "phases": True}, "--phases: resident does not tell its phases"),
        (("oom_tir=host",), {}, "did you mean oom_tier"),
        (("oom_tier=hos",), {}, "did you mean host?"),
        (("oom_at=0",), {}, "--option oom_at=0"),
    ],
)
def test_wrong_requests(run_here: Run, options: tuple[str, ...], fields: dict[str, Any], said: str) -> None:
    with pytest.raises(BadInputError) as caught:
        run_here(make_spec(*options, **fields))
    assert said in str(caught.value)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize(
    ("options", "status", "phase", "tier"),
    [
        (("refuse=budget",), "refused", "initialize", "host"),
        (("refuse=unsupported",), "refused", "initialize", None),
        (("oom_at=1",), "oom", "warm-up", "device"),
        (("oom_at=3", "oom_tier=host"), "oom", "step", "host"),
        (("diverge_at=2",), "diverged", "step", None),
        (("nan_at=2",), "diverged", "step", None),
        (("crash_at=2",), "failed", "step", None),
        (("crash_at=0",), "failed", "initialize", None),
        (("oom_at=2", "oom_tier=disk"), "oom", "step", "disk"),
        (("disk_full_at=2",), "oom", "step", "disk"),
        (("refuse=unavailable",), "unavailable", "initialize", None),
        (("refuse=missing-package",), "unavailable", "initialize", None),
    ],
)
def test_failures_become_records(run_here: Run, options: tuple[str, ...], status: str, phase: str, tier: str) -> None:
    record = run_here(make_spec(*options))
    assert record.status == status
    assert record.reason is not None
    assert (record.reason.phase, record.reason.tier) == (phase, tier)
    assert record.metrics.tokens_per_s is None or status == "diverged"
    assert record.resolved.options is not None
    assert record.environment.versions["torch"] == importlib.metadata.version("torch")  # torch's own may name a build besides
    if status == "oom":
        assert record.reason.have is not None
    assert (record.reason.install is not None) == (status == "unavailable")


def test_a_good_run(run_here: Run) -> None:
    record = run_here(
        make_spec("step_time_s=0.01", "bytes_per_step=5", "skip_at=2", "startup_time_s=0.02", seed=7, eval_every=2)
    )
    assert (record.status, record.reason) == ("ok", None)
    assert len(record.metrics.loss) == len(record.samples.micro_batch_loss) == len(record.samples.step_time_s) == 4
    assert len(record.metrics.step_time_s) == record.resolved.timed_steps == 3
    assert record.metrics.useful_steps == 2
    assert record.metrics.mean_step_time_s is not None
    assert record.metrics.mean_step_time_s >= 0.01
    assert record.metrics.tokens_per_s is not None
    assert record.metrics.tokens_per_s * 3 * record.metrics.mean_step_time_s == pytest.approx(2 * 2 * 16)
    assert (record.traffic.h2d_bytes, record.counters["skipped_steps"]) == (5, 1)
    assert record.phases_s["initialize"] >= record.phases_s["startup.scripted"] == 0.02
    assert set(record.phases_s) >= {"import", "resolve", "build", "initialize", "warm_up", "timed", "eval", "close"}
    assert record.memory.host_budget_bytes == record.resolved.host_budget_bytes == 1 << 40
    assert record.environment.seeds == {"weights": 7, "data": 7, "dropout": 7}
    assert record.resolved.data is not None
    assert len(record.resolved.data.sha256 or "") == 64
    assert any("skipped" in note for note in record.notes)


@pytest.mark.parametrize(("profile_steps", "told"), [(1, False), (2, True)])
def test_timed_steps_in_which_a_strategy_still_measures_are_doubted(run_here: Run, profile_steps: int, told: bool) -> None:
    options = (f"profile_steps={profile_steps}", "solver=on")
    record = run_here(make_spec(system="h3t", option=options, device_memory=6 << 20, steps=3, warmup=1))
    assert (record.status, record.reason) == ("ok", None)
    assert ("steps_without_plan" in [doubt.code for doubt in record.doubts]) == told


def test_phases_are_of_one_more_step_that_nothing_else_counts(run_here: Run) -> None:
    options = ("activations=host", "variant=osc")
    given: dict[str, Any] = {"system": "patrickstar", "option": options, "dtype": "fp32", "device_memory": 6 << 20}
    given |= {"recompute": "full", "set": ("num_layers=3",)}
    plain, phased = (run_here(make_spec(**given, steps=4, phases=phases)) for phases in (False, True))
    assert (phased.status, phased.reason) == ("ok", None)
    assert phased.metrics.loss == plain.metrics.loss
    assert phased.counters == plain.counters
    assert phased.timed_counters["activation_offload_bytes"] == 3 * phased.counters["activation_offload_bytes"] / 4 > 0
    assert phased.memory.host_activation_bytes == phased.counters["activation_offload_bytes"] / 8
    found = {name.removeprefix("phase."): s for name, s in phased.phases_s.items() if name.startswith("phase.")}
    assert not any(name.startswith("phase") for name in plain.phases_s)
    moved = ("h2d_updated", "h2d_activations", "d2h_activations", "d2h_gradients")
    assert all(found[name] > 0 for name in ("forward", "backward", "adam_host", *moved))
    assert found["step"] <= phased.phases_s["phases"]
    assert any("nothing overlaps" in note and "conversion" in note for note in phased.notes)


def test_an_emulated_device_never_passes_for_a_measured_one(run_here: Run) -> None:
    """Case C52."""
    record = run_here(make_spec())
    assert record.resolved.device_label == record.environment.hardware.device_name == "cpu-emulated"
    assert record.metrics.mfu is None
    assert record.resolved.peak_flops_per_s is None


@pytest.mark.skipif(torch.cuda.is_available(), reason="there is a CUDA device")
def test_cuda_that_is_not_there_makes_a_run_unavailable(run_here: Run) -> None:
    record = run_here(make_spec(device="cuda"))
    assert record.status == "unavailable"
    assert "--device cpu" in (record.reason.message if record.reason else "")


@pytest.mark.parametrize("failure", [None, "crash_at=2"])
def test_no_model_is_gathered_at_the_end_of_a_run(run_here: Run, failure: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    """A run that failed is left with its error, which stands whatever closing meets."""
    seen: list[Any] = []

    def leave(engine: DummyEngine, kind: Any = None, *rest: Any) -> None:
        seen.append(kind)
        raise RuntimeError("of closing")

    def close(engine: DummyEngine, *, keep: bool = True) -> None:
        seen.append(keep)

    monkeypatch.setattr(DummyEngine, "__exit__", leave)
    monkeypatch.setattr(DummyEngine, "close", close)
    record = run_here(make_spec(*filter(None, [failure])))
    assert (record.status, seen) == (("ok", [False]) if failure is None else ("failed", [RuntimeError]))
    assert failure is None or (record.reason and "step 2 crashes" in record.reason.message)


@pytest.mark.parametrize("system", ["resident", "elixir"])
def test_a_run_whose_values_cannot_be_gathered_is_good(run_here: Run, system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    for owner, name in ((resident, "on_the_host"), (managed_engine, "values_in_slots")):
        monkeypatch.setattr(owner, name, lambda *_: pytest.fail("values were gathered"))
    small = make_spec(system=system, set=("num_layers=1",), seq_len=16, steps=2, dtype="fp32")
    assert run_here(small).status == "ok"


def test_a_small_container_is_refused_before_anything_is_allocated(run_here: Run) -> None:
    """Case C36: 1 GiB there, 2 GiB needed; a budget given by the user is trusted instead."""
    record = run_here(make_spec("host_need=2GiB"), host_budget=1 << 30)
    assert record.status == "refused"
    assert record.reason is not None
    assert (record.reason.tier, record.reason.need, record.reason.have) == ("host", 2 << 30, 1 << 30)
    assert record.resolved.host_budget_bytes == 1 << 30
    assert run_here(make_spec("host_need=2GiB", host_memory="3GiB"), host_budget=1 << 30).status == "ok"


def test_both_limits_are_in_the_record(run_here: Run, tmp_path: Path) -> None:
    """Case C37."""
    (tmp_path / "memory.max").write_text(f"{1 << 30}\n")
    limits = run_here(make_spec(), cgroup_root=tmp_path).environment.limits
    assert limits is not None
    assert limits.cgroup_memory_bytes == limits.host_budget_bytes == 1 << 30
    assert limits.machine_memory_bytes is not None
    assert limits.machine_memory_bytes > 1 << 30


def test_a_real_system_is_refused_before_it_allocates(run_here: Run, tmp_path: Path) -> None:
    """Case C36: a container of 1 GiB; model states of 125M parameters take 14 bytes each."""
    (tmp_path / "memory.max").write_text(f"{1 << 30}\n")
    budget = read_limits(cgroup_root=tmp_path).host_budget_bytes
    before = process_memory("self")["VmRSS"]
    spec = make_spec(system="elixir", model="opt-125m", seq_len=16, batch_size=1, device_memory="64MiB")
    record = run_here(spec, host_budget=budget, cgroup_root=tmp_path)
    assert record.status == "refused"
    assert record.reason is not None
    assert record.reason.phase == "room"
    assert record.reason.tier in ("host", "device")
    assert record.reason.need is not None and record.reason.have is not None
    assert record.reason.need > record.reason.have
    assert process_memory("self")["VmRSS"] - before < 1 << 30


def test_utilisation_above_the_peak_fails_the_run_and_is_no_figure(run_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case C57: it cannot be true, so it is no result; what was measured stays in the record."""
    monkeypatch.setattr(environment, "peak_flops_per_s", lambda name, dtype: 1.0)
    record = run_here(make_spec(system="resident", steps=2, warmup=1, dtype="fp32", set=("num_layers=1",)))
    assert record.status == "failed"
    assert record.reason is not None
    assert "PEAK_FLOPS_PER_S" in record.reason.message
    assert record.metrics.mfu is None
    assert record.metrics.model_tflops
    assert record.samples.step_time_s
    assert "utilisation_above_peak" in [doubt.code for doubt in record.doubts]


def test_the_types_of_buffers_are_told(run_here: Run) -> None:
    """Case C22: buffers keep their own types, whatever --dtype says."""
    record = run_here(make_spec(system="resident", model="bert-tiny", steps=1, warmup=0, set=("num_layers=1",)))
    assert record.status == "ok"
    assert record.resolved.buffer_dtypes == ["int64"]
    assert record.resolved.dtypes == {"weights": "bf16", "gradients": "bf16", "states": "fp32"}


def test_statistics_that_no_record_can_hold_cost_no_run(run_here: Run) -> None:
    record = run_here(make_spec("odd_statistics=true"))
    assert (record.status, record.strategy) == ("ok", None)
    assert record.metrics.tokens_per_s
    assert any("statistics are missing: strategy.value is a object" in note for note in record.notes)


def test_queued_work_is_waited_for_by_the_real_clock_too(run_here: Run) -> None:
    """Case C61 on the emulated device: a thread that still works when a step returns."""
    record = run_here(make_spec("drain_time_s=0.1", steps=4, warmup=1))
    assert record.metrics.mean_step_time_s is not None
    assert record.metrics.mean_step_time_s >= 0.1


@pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")
def test_queued_device_work_is_waited_for(run_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    """Case C61: a step that queues half a second of work on the device and returns."""
    rate = torch.cuda.get_device_properties(0).clock_rate * 1000
    monkeypatch.setattr(DummyEngine, "step", _queue(DummyEngine.step, int(0.5 * rate)))
    monkeypatch.setattr(DummyEngine, "drain", lambda self: torch.cuda.synchronize())
    record = run_here(make_spec(device="cuda", steps=3, warmup=1))
    assert record.metrics.mean_step_time_s is not None
    assert record.metrics.mean_step_time_s >= 0.4


def _queue(step: Callable[[DummyEngine], None], cycles: int) -> Callable[[DummyEngine], None]:
    def queue(engine: DummyEngine) -> None:
        torch.cuda._sleep(cycles)
        step(engine)

    return queue


def test_threads_are_the_usable_cores_or_what_the_user_says(run_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delenv("OMP_NUM_THREADS", raising=False)
    record = run_here(make_spec())
    assert record.environment.limits is not None
    assert record.environment.threads.intra_op == record.environment.limits.cores
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    record = run_here(make_spec())
    assert record.environment.threads.intra_op == 1
    assert record.environment.variables["OMP_NUM_THREADS"] == "1"


def test_a_record_of_nan_losses_is_strict_json(run_here: Run) -> None:
    record = run_here(make_spec("nan_at=3"))
    tree = json.loads(to_json(record), parse_constant=lambda constant: pytest.fail(constant))
    assert tree["metrics"]["loss"][2] is None
    assert "metrics.loss[2] was nan" in record.notes
    assert all(math.isfinite(loss) for loss in tree["metrics"]["loss"][:2])


def test_a_real_model_by_the_reference_recipe(run_here: Run, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "1")  # on a busy machine several wait for each other
    spec = make_spec(system="resident", dtype="fp32", steps=3, accumulate=2, schedule="cosine", eval_every=3, clip=1.0)
    record = run_here(spec)
    assert (record.status, record.reason) == ("ok", None)
    assert record.resolved.parameters == 1_255_680
    assert record.metrics.model_tflops is not None
    assert record.metrics.model_tflops == record.metrics.hardware_tflops
    assert record.metrics.eval_step == [3]
    assert all(loss is not None and 3 < loss < 7 for loss in record.metrics.loss + record.metrics.eval_loss)
    assert all(norm is not None and norm <= 1.001 for norm in record.metrics.grad_norm_after_clip)
    assert record.samples.learning_rate[0] == 1e-4
    assert record.memory.device_peak_bytes is not None
    assert record.memory.host_budget_bytes == 1 << 40
    assert record.traffic.h2d_bytes == 0
    assert record.resolved.dtypes == {"weights": "fp32", "gradients": "fp32", "states": "fp32"}
    assert record.resolved.buffer_dtypes == []
    assert (record.resolved.attention or "").startswith("sdpa (")
    assert record.resolved.clock == CLOCK
    assert len(record.environment.code.source_sha256 or "") == 64


@pytest.mark.parametrize(("options", "printed"), [(("oom_at=2",), False), (("refuse=budget",), False), (("crash_at=2",), True)])
def test_what_the_message_says_whole_has_its_traceback_in_the_record_only(
    run_here: Run, options: tuple[str, ...], printed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    record = run_here(make_spec(*options))
    assert record.reason is not None and "\n" not in record.reason.message
    assert ("Traceback" in capsys.readouterr().err) == printed
    if not printed:
        assert record.reason.log[0].startswith("Traceback") and record.reason.message in in_flags(record.reason.log[-1])


def test_a_schedule_goes_with_updates_during_backward(run_here: Run) -> None:
    """They take the rate of that moment, so it is set before; the losses are those of a system that updates at the end."""
    asked = {"model": "opt-tiny", "schedule": "linear", "lr": 1e-2, "steps": 3, "warmup": 0, "dtype": "fp32", "seq_len": 32}
    early = run_here(make_spec(**asked, system="elixir", device_memory="12MiB", option=["nonfinite=stop"]))
    late = run_here(make_spec(**asked, system="resident"))
    assert (early.status, late.status) == ("ok", "ok"), (early.reason, late.reason)
    assert early.metrics.loss == late.metrics.loss
