"""The kept losses: every system's run is there, and where a curve has to be the reference's it is, bit for bit."""

from __future__ import annotations

from pathlib import Path

import pytest

from harness import cli
from paper_figures import losses
from systems import registry
from tests.test_docs import ROOT

RESULTS = str(ROOT / "results")


def test_every_row_has_its_run_and_every_system_a_row() -> None:
    found = losses.runs(RESULTS)
    assert [label for label, run in found if run is None] == []
    there = {run.spec.system for _, run in found if run is not None}
    planned = {name for name, entry in registry.find().items() if entry.exposes == "STRATEGY"}
    assert planned | {"resident", "torch-ddp", "fsdp2-offload", "deepspeed-zero2-offload", "deepspeed-zero3-offload"} == there
    assert {label for label, _ in found} >= {f"{name}:variant=paper" for name in planned}


def test_strategies_have_the_reference_s_losses_bit_for_bit() -> None:
    (_, reference), *others = losses.runs(RESULTS)
    assert reference is not None and reference.metrics.loss[0] is not None and reference.metrics.loss[-1] is not None
    assert reference.metrics.loss[-1] < reference.metrics.loss[0] - 1
    for label, run in others:
        assert run is not None and run.resolved.data == reference.resolved.data
        apart = losses.farthest(run.metrics.loss, reference.metrics.loss)
        evaluated = losses.farthest(run.metrics.eval_loss, reference.metrics.eval_loss)
        assert apart is not None and evaluated is not None
        if registry.find()[run.spec.system].exposes == "STRATEGY":
            assert (apart, evaluated) == (0.0, 0.0), label
            assert run.traffic.h2d_bytes
        else:
            assert evaluated < 0.1, label  # of a package's own arithmetic


def test_curves_of_other_steps_are_not_set_against_each_other() -> None:
    assert losses.farthest([1.0, 2.0], [1.0]) is None and losses.farthest([1.0, None], [1.0, 1.0]) is None
    assert losses.farthest([1.0, 2.5], [1.0, 2.0]) == 0.5


@pytest.mark.parametrize("results", [RESULTS, "none"])
def test_they_are_drawn(results: str, tmp_path: Path) -> None:
    path = tmp_path / "losses.png"
    if results == "none":
        results = str(tmp_path / results)
        (tmp_path / "none").mkdir()
    assert cli.main(["figure", "losses", "--results", results, "--out", str(path)]) == 0
    assert path.stat().st_size > (60_000 if results == RESULTS else 1000)
