"""What a run likely takes before anything like it was run: near what the kept records took, seconds for what is tiny."""

from __future__ import annotations

import statistics

from harness import store
from harness.run_times import EMULATED, START_S, UNKNOWN_S, guessed_s
from systems import registry
from tests.harness.conftest import make_spec
from tests.test_docs import ROOT

TINY = {"model": "opt-tiny", "batch_size": 2, "seq_len": 16}


def test_a_tiny_sweep_is_not_said_to_take_minutes() -> None:
    for system in ("dummy", "resident", "elixir"):
        assert guessed_s(make_spec(system=system, steps=6, **TINY), EMULATED) < 6


def test_it_grows_with_the_model_the_steps_the_tokens_and_ranks_that_share_cores() -> None:
    first = guessed_s(make_spec(system="elixir", steps=100, **TINY), EMULATED)
    for more in ({"steps": 200}, {"batch_size": 4}, {"seq_len": 32}, {"accumulate": 2}, {"ranks": 2}, {"model": "opt-125m"}):
        assert guessed_s(make_spec(system="elixir", **{"steps": 100, **TINY, **more}), EMULATED) > first, more


def test_what_is_not_known_is_a_guess_all_the_same() -> None:
    assert guessed_s(make_spec(system="elixir", model="package:build", batch_size=2, seq_len=16), "a device") == UNKNOWN_S
    assert guessed_s(make_spec(system="of another day", model="opt-tiny", batch_size=2, seq_len=16), "a device") > START_S


def test_sizes_that_no_float_has_are_a_guess_too() -> None:
    for huge in ({"steps": 10**400}, {"batch_size": 10**400}):
        assert guessed_s(make_spec(system="elixir", **{"steps": 100, **TINY, **huge}), EMULATED) == UNKNOWN_S


def test_it_is_near_what_kept_runs_took() -> None:
    """Of systems of this project on a GPU, in their middle and nine of ten within a factor of three."""
    records, _ = store.read_all(ROOT / "results")
    known, ours = registry.find(), list[float]()
    for record in records:
        spec, resolved = record.spec, record.resolved
        if record.status != "ok" or resolved.device != "cuda" or spec.system not in known or record.wall_s is None:
            continue
        if registry.face(spec.system).abilities.package is None and spec.resume is None and spec.disk is None:
            sizes = {"batch_size": resolved.batch_size, "seq_len": resolved.seq_len}
            ours.append(guessed_s(spec.model_copy(update=sizes), str(resolved.device_label)) / record.wall_s)
    near = sum(1 / 3 < ratio < 3 for ratio in ours) / len(ours)
    assert len(ours) > 150 and 0.8 < statistics.median(ours) < 1.25 and near > 0.9, (len(ours), statistics.median(ours), near)
