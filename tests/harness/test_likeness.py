"""Case C64: two runs that differ in one thing are refused or marked, and the thing is named."""

from __future__ import annotations

from typing import Any

import pytest

from harness.comparison import compare
from harness.likeness import FACTS, NOT_KNOWN, alike, differences
from harness.record import Record
from harness.spec import RunSpec
from tests.harness.conftest import make_record

RUN: dict[str, Any] = {
    "spec": RunSpec(system="dummy", model="opt-tiny", device="cpu", steps=13, warmup=3, device_memory=1 << 20).model_dump(),
    "resolved": {
        "device": "cpu",
        "device_label": "cpu-emulated",
        "steps": 13,
        "warmup_steps": 3,
        "timed_steps": 10,
        "batch_size": 2,
        "seq_len": 16,
        "global_batch_samples": 2,
        "tokens_per_step": 32,
        "parameters": 1000,
        "host_budget_bytes": 1 << 30,
        "shape": {"name": "opt-tiny", "num_layers": 6, "hidden_size": 128, "label": "OPT", "notes": "", "seq_len": 16},
        "dtypes": {"weights": "bf16", "gradients": "bf16", "states": "fp32"},
        "attention": "sdpa (flash, plain)",
        "clock": "between-drains-2",
        "data": {"source": "text", "sha256": "a" * 64},
    },
    "environment": {
        "code": {"revision": "c" * 40, "dirty": False, "source_sha256": "d" * 64},
        "versions": {"torch": "2.13.0", "transformers": "5.24.0", "cuda": None},
        "hardware": {"device_name": "cpu-emulated", "cpu_model": "CPU one", "device_driver": "1"},
        "limits": {"cores": 2},
        "threads": {"intra_op": 2},
        "variables": {"OMP_NUM_THREADS": "2"},
    },
    "memory": {"device_budget_bytes": 1 << 20, "host_budget_bytes": 1 << 30},
    "metrics": {"tokens_per_s": 100.0, "median_step_time_s": 0.3, "mean_step_time_s": 0.32, "loss": [5.0, 4.0]},
}


def run(**changes: Any) -> Record:
    """The run above with some of its fields changed, each named by its path."""
    fields: dict[str, Any] = {key: _copy(value) for key, value in RUN.items()}
    for path, value in changes.items():
        *above, last = path.split("__")
        part = fields
        for key in above:
            part = part.setdefault(key, {})
        part[last] = value
    return make_record(**fields)


def _copy(value: Any) -> Any:
    return {key: _copy(item) for key, item in value.items()} if isinstance(value, dict) else value


REFUSED: list[tuple[str, Any, str]] = [
    ("resolved__shape__num_layers", 12, "model"),
    ("resolved__shape__name", "gpt-tiny", "model"),
    ("resolved__parameters", 1001, "parameters"),
    ("resolved__dtypes__weights", "fp32", "dtype"),
    ("resolved__dtypes__gradients", "fp32", "dtype"),
    ("resolved__dtypes__states", "bf16", "dtype"),
    ("strategy__dtypes", {"states": "bf16"}, "dtype"),
    ("resolved__global_batch_samples", 4, "global batch in samples"),
    ("resolved__batch_size", 1, "batch size per rank and micro-batch"),
    ("spec__accumulate", 2, "accumulation"),
    ("resolved__seq_len", 32, "sequence length"),
    ("resolved__data__sha256", "b" * 64, "data"),
    ("resolved__data__source", "synthetic", "data"),
    ("spec__clip", 1.0, "clipping"),
    ("spec__optimizer", "sgd", "optimizer"),
    ("spec__hyper", ("betas=0.9,0.95",), "optimizer"),
    ("resolved__warmup_steps", 2, "warm-up steps"),
    ("resolved__timed_steps", 3, "timed steps"),
    ("resolved__clock", "without-drains", "timed region"),
    ("spec__eval_every", 5, "steps between validations"),
    ("spec__save_every", 5, "steps between checkpoints"),
    ("resolved__device_label", "NVIDIA H100 80GB HBM3", "device"),
    ("spec__device_memory", 2 << 20, "device memory asked for"),
    ("memory__device_budget_bytes", 2 << 20, "device memory budget in force"),
    ("memory__host_budget_bytes", 2 << 30, "host memory budget"),
    ("spec__disk", "/disk", "disk memory asked for"),
    ("spec__disk_rate", 1 << 20, "disk rate, bytes a second"),
    ("environment__hardware__cpu_model", "CPU two", "CPU"),
    ("environment__limits__cores", 64, "usable cores"),
    ("spec__ranks", 2, "ranks"),
]
MARKED: list[tuple[str, Any, str]] = [
    ("spec__recompute", "full", "recomputation"),
    ("spec__recompute", (0, 3), "recomputation"),
    ("strategy__recompute", "full", "recomputation"),
    ("resolved__attention", "eager", "attention kernel"),
    ("resolved__steps_before", 8, "steps taken before a resumption"),
    ("spec__lr", 1e-3, "learning rate"),
    ("spec__weight_decay", 0.0, "weight decay"),
    ("spec__schedule", "cosine", "learning-rate schedule"),
    ("spec__weights", "folder", "first values"),
    ("spec__seed", 1, "seed"),
    ("environment__versions__torch", "2.11.0", "versions"),
    ("environment__versions__transformers", "5.17.0", "versions"),
    ("environment__versions__cuda", "13.0", "versions"),
    ("environment__hardware__device_driver", "2", "device driver"),
    ("environment__code__source_sha256", "e" * 64, "code"),
    ("environment__threads__intra_op", 1, "threads"),
    ("environment__variables__OMP_NUM_THREADS", "1", "environment variables"),
]


def test_like_runs_have_no_difference() -> None:
    assert differences(run(), run()) == []
    assert alike(run(), run(run_id="another", metrics__tokens_per_s=5.0))


@pytest.mark.parametrize(
    ("path", "value", "fact", "refused"),
    [(*case, True) for case in REFUSED] + [(*case, False) for case in MARKED],
)
def test_each_difference_is_named(path: str, value: Any, fact: str, refused: bool) -> None:
    needs = {"spec__save_every": {"spec__checkpoint": "kept"}, "spec__disk_rate": {"spec__disk": "/disk"}}.get(path, {})
    reference, other = run(**needs), run(**{path: value}, **needs)
    (found,) = differences(other, reference)
    assert (found.fact, found.refused) == (fact, refused)
    assert found.ours != found.reference
    made = compare({"reference": [reference], "other": [other]})
    told = made.refusals if refused else made.marks
    assert any("other" in line and fact in line for line in told), told
    assert (made.rows[1].speed_ratio is None) == refused


def test_a_package_s_folder_is_a_disk_too() -> None:
    """DeepSpeed's ZeRO-Infinity takes it as an option of its own."""
    package = run(spec__option=("nvme_path=/disk",))
    assert not [one for one in differences(package, run(spec__disk="/disk")) if "disk" in one.fact]
    assert [one.fact for one in differences(package, run()) if "disk" in one.fact] == ["disk memory asked for"]


def test_every_fact_of_the_table_is_tested() -> None:
    assert {fact.name for fact in FACTS} - {case[2] for case in REFUSED + MARKED} == set()
    assert all(fact.refuses == (fact.name in {case[2] for case in REFUSED}) for fact in FACTS)


def test_a_version_is_named_with_both_values() -> None:
    (found,) = differences(run(environment__versions__torch="2.11.0"), run())
    assert str(found) == "versions: torch=2.11.0, the reference has torch=2.13.0"


@pytest.mark.parametrize(
    ("path", "fact"),
    [
        ("memory__device_budget_bytes", "device memory budget in force"),
        ("resolved__attention", "attention kernel"),
        ("resolved__parameters", "parameters"),
        ("resolved__shape", "model"),
        ("environment__limits", "usable cores"),
    ],
)
def test_what_a_run_does_not_say_is_marked_and_not_taken_for_equal(path: str, fact: str) -> None:
    (found,) = differences(run(**{path: None}), run())
    assert (found.fact, found.ours, found.refused) == (fact, NOT_KNOWN, False)
    assert alike(run(**{path: None}), run())


def test_an_older_record_without_the_later_fields_can_still_be_compared() -> None:
    old = run(resolved__dtypes=None, resolved__attention=None, resolved__clock=None, environment__code__source_sha256=None)
    assert not [one for one in differences(old, run()) if one.refused]
    changed = run(resolved__dtypes=None, spec__dtype="fp32")
    assert "dtype" in [one.fact for one in differences(changed, run()) if one.refused]


def test_a_longer_warm_up_is_no_other_work() -> None:
    """A profiler's, as H3T has it."""
    assert alike(run(resolved__warmup_steps=14), run()) and not differences(run(resolved__warmup_steps=14), run())


def on(boot: str | None, rate: float, number: int = 0) -> Record:
    hardware = RUN["environment"]["hardware"] | {"boot_id": boot, "device_uuid": "a device" if boot else None}
    rates = RUN["metrics"] | {"tokens_per_s": rate}
    return run(run_id=f"2026-{boot}-{rate:g}-{number}", environment__hardware=hardware, metrics=rates)


def test_a_ratio_is_of_one_machine() -> None:
    """Here it is 2, of all runs it would be 1; with no machine in common there is none; what says nothing counts."""
    ours = [on("here", 200.0), on("there", 50.0)]
    ratio = compare({"reference": [on("here", 100.0)], "ours": ours}).rows[1].speed_ratio
    assert ratio is not None and ratio.value == 2.0
    row = compare({"reference": [on("here", 100.0)], "ours": [on("there", 50.0)]}).rows[1]
    assert row.speed_ratio is None and [one.fact for one in row.refused] == ["machine"]
    old = compare({"reference": [on(None, 100.0)], "ours": [on("there", 50.0)]}).rows[1].speed_ratio
    assert old is not None and old.value == 0.5
    assert alike(on("here", 1.0), on("there", 1.0)), "they are replicates all the same"
