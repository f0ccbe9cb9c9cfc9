"""Forecasts of many runs from one process: what they cost, how far ahead they look, and what one that breaks off leaves."""

from __future__ import annotations

import gc
import os
import subprocess
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path

import pytest

from harness import likely
from harness.apart import apart, each_apart
from harness.collecting import uncollected
from harness.spec import RunSpec

ROOT = Path(__file__).resolve().parents[2]
FITS = RunSpec(
    system="elixir", model="opt-tiny", device="cpu", device_memory=64 << 20, host_memory=1 << 30, batch_size=2, seq_len=16
)
TOO_LARGE = FITS.model_copy(update={"device_memory": 1 << 20})
PACKAGE = FITS.model_copy(update={"system": "dummy"})


def of_each(numbers: Sequence[int]) -> Iterator[int]:
    """Its process dies at a zero."""
    for number in numbers:
        if number == 0:
            os._exit(3)
        yield 10 * number


@pytest.mark.parametrize(("asked", "found"), [([1, 2, 3], [10, 20, 30]), ([1, 2, 0, 3], [10, 20]), ([0, 1], []), ([], [])])
def test_what_was_told_before_a_process_broke_off_is_known(asked: list[int], found: list[int]) -> None:
    assert each_apart(of_each, asked, lambda: False) == found


def test_nobody_waits_for_what_nobody_wants() -> None:
    assert each_apart(of_each, [1], lambda: True) == []
    assert apart(int, "3", lambda: False) == 3 and apart(int, "a word", lambda: False) is None, "one that raises has no answer"


@pytest.mark.parametrize(("seconds_each", "planned"), [(0.0, 5), (9.0, 4), (21.0, 2), (100.0, 2)])
def test_no_forecast_ahead_is_begun_when_its_time_is_over(
    seconds_each: float, planned: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The first is made whatever it takes, and its time, that of the imports, does not count."""
    now = [0.0]

    def refusal(spec: RunSpec, observed: object) -> None:
        now[0] += seconds_each

    monkeypatch.setattr(likely, "_refusal", refusal)
    monkeypatch.setattr(likely.time, "monotonic", lambda: now[0])
    assert len(list(likely.refusals([FITS] * 5))) == planned


def test_packages_are_planned_by_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    """No process is started for one; among others it is left out, and each verdict is its own spec's."""
    started: list[Sequence[RunSpec]] = []

    def answers(work: object, asked: Sequence[RunSpec], stopped: object) -> list[str]:
        started.append(asked)
        return [spec.system for spec in asked[:2]]

    monkeypatch.setattr(likely, "each_apart", answers)
    unknown = FITS.model_copy(update={"system": "no-such"})
    ranks = FITS.model_copy(update={"ranks": 2})
    for alone in (PACKAGE, unknown, ranks):
        assert likely.foreseen([alone, FITS], lambda: False) == {alone: None}
    assert not started
    resident, h3t = (FITS.model_copy(update={"system": name}) for name in ("resident", "h3t"))
    found = likely.foreseen([resident, PACKAGE, FITS, ranks, h3t], lambda: False)
    assert started == [[resident, FITS, h3t]] and found == {resident: "resident", FITS: "elixir"}, "h3t is asked about later"


@pytest.mark.long
def test_one_process_has_the_verdicts_that_each_would_have() -> None:
    """A broken one is none: its run says so."""
    broken = FITS.model_copy(update={"option": ("no_such=1",)})
    asked = [FITS, TOO_LARGE, broken, FITS.model_copy(update={"system": "patrickstar"})]
    found = likely.foreseen(asked, lambda: False)
    assert list(found) == asked and [found[spec] is None for spec in asked] == [True, False, True, True]
    assert "device_memory" in str(found[TOO_LARGE])
    alone = [likely.foreseen([spec], lambda: False)[spec] for spec in asked]
    assert list(found.values()) == alone == list(likely.refusals(asked))
    assert likely.foreseen(asked, lambda: True) == {FITS: None}


def test_a_sweep_s_own_process_imports_no_torch() -> None:
    """Which takes seconds, and memory beside every run."""
    code = (
        "import sys; from harness import likely, sweep; from harness.spec import RunSpec; "
        "likely.each_apart = lambda *_: []; "
        "specs = [RunSpec(system=name, model='opt-tiny') for name in ('elixir', 'resident', 'deepspeed-zero3')]; "
        "[likely.foreseen([spec], lambda: False) for spec in specs]; "
        "sweep.table_of(sweep.SweepSpec(table='10-h200-speed')); print('torch' in sys.modules)"
    )
    told = subprocess.run([sys.executable, "-c", code], cwd=ROOT, capture_output=True, text=True, check=True)
    assert told.stdout.strip() == "False"


def imported(error: bool) -> None:
    with uncollected():
        assert not gc.isenabled()
        with uncollected():
            pass
        assert not gc.isenabled()
        if error:
            raise ValueError("in between")


def test_the_collector_is_as_it_was_after_imports() -> None:
    assert gc.isenabled()
    imported(error=False)
    assert gc.isenabled()
    with pytest.raises(ValueError, match="in between"):
        imported(error=True)
    assert gc.isenabled()
