"""The kept runs of updates behind the steps: all are there, they were behind, and what they lost is what the figure says."""

from __future__ import annotations

from functools import cache
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import pytest

from harness import cli
from harness.record import Record
from paper_figures import angel_idle, staleness
from tests.test_docs import ROOT

RESULTS = str(ROOT / "results")


@cache
def courses() -> list[staleness.Course]:
    return staleness.courses(RESULTS)


def test_every_run_is_there_and_was_as_far_behind_as_it_might() -> None:
    """An update that takes K + 1 gradients leaves K / 2 in the mean."""
    assert [course.steps for course in courses()] == [300, 1000]
    for course in courses():
        bounds, seeds = (0, 1, 2, 4), (0, 1, 2)
        assert (course.bounds, course.seeds) == (bounds, seeds)
        assert course.there.keys() == {(bound, seed) for bound in bounds for seed in seeds}
        for (bound, _), run in course.there.items():
            assert run.strategy is not None and run.strategy["staleness_max"] == bound
            mean = run.strategy["staleness_mean"]
            assert mean == 0 if bound == 0 else mean >= 0.45 * bound


def test_all_of_a_seed_begin_alike_and_learn() -> None:
    for course in courses():
        for seed in course.seeds:
            mine = [run for (_, each), run in course.there.items() if each == seed]
            assert len({run.metrics.loss[0] for run in mine}) == 1
            assert len({run.resolved.data and run.resolved.data.sha256 for run in mine}) == 1
            assert all((staleness.decrease(run) or 0) > 1 for run in mine)


def made(first: float | None, last: float | None) -> Record:
    metrics = SimpleNamespace(loss=[first, 2.0], eval_loss=[3.0, last])
    return cast(Record, SimpleNamespace(metrics=metrics))


def test_what_is_kept_of_the_decrease() -> None:
    there = {(0, 5): made(6.0, 2.0), (4, 5): made(6.0, 3.0), (1, 5): made(6.0, None), (4, 6): made(6.0, 3.0)}
    course = staleness.Course(steps=1, bounds=(0, 1, 2, 4), seeds=(5, 6), there=there)
    assert staleness.kept(course, 4, 5) == 75
    assert staleness.kept(course, 0, 5) == 100
    assert staleness.kept(course, 1, 5) is staleness.kept(course, 2, 5) is staleness.kept(course, 4, 6) is None


@pytest.mark.parametrize("results", [RESULTS, "none"])
def test_they_are_drawn(results: str, tmp_path: Path) -> None:
    path = tmp_path / "staleness.png"
    if results == "none":
        results = str(tmp_path / results)
        (tmp_path / "none").mkdir()
    assert cli.main(["figure", "staleness", "--results", results, "--out", str(path)]) == 0
    assert path.stat().st_size > (30_000 if results == RESULTS else 1000)


def test_the_device_waits_for_what_it_does_not_compute() -> None:
    def run(step_s: float, **phases: float) -> Any:
        told = {f"phase.{name}": seconds for name, seconds in phases.items()}
        return SimpleNamespace(phases_s=told, metrics=SimpleNamespace(mean_step_time_s=step_s))

    phases = {"forward": 0.25, "backward": 0.5, "norm": 0.125, "adam_device": 0.125, "adam_host": 7.0}
    assert angel_idle.idle(run(4.0, **phases)) == 75
    assert angel_idle.idle(run(0.9, **phases)) == 0
    assert angel_idle.idle(run(4.0)) is None
