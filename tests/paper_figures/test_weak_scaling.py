"""The table of simulated weak scaling: equal work a rank, what scaling is, and that cells that do not fit stay empty."""

from __future__ import annotations

from dataclasses import replace

import pytest

from paper_figures import weak_scaling
from paper_figures.weak_scaling import Cell, ScalingSpec, cells, enough_tokens, main, scaling, summary
from systems.planning import hardware

SMALL = ScalingSpec(hardware="h100-80g-x2", model=("opt-125m",))
CELL = Cell("m", 1, 1 << 30, 1000, 2.0, 1.0, "norm", 1 << 30, 0.0, None)


def test_cells_are_of_equal_work_a_rank() -> None:
    found = list(cells(SMALL, hardware.load(SMALL.hardware), "opt-125m", batches=(1,)))
    assert [(cell.ranks, cell.tokens) for cell in found] == [(1, 1024), (2, 1024)]
    one, two = found
    assert one.step_s is not None and two.step_s is not None and (one.link_s, two.link_s > 0) == (0.0, True)
    assert scaling(one, found) == 1.0 and scaling(two, found) == pytest.approx(one.step_s / two.step_s)


def test_what_scaling_is_and_from_when_the_host_is_no_bound() -> None:
    found = [CELL, replace(CELL, ranks=2, step_s=2.5), replace(CELL, tokens=4000, step_s=4.1, compute_s=4.0)]
    found += [replace(CELL, ranks=2, tokens=4000, step_s=None, why_not="too small")]
    assert scaling(found[1], found) == pytest.approx(0.8) and scaling(found[3], found) is None
    assert (enough_tokens("m", 1, found), enough_tokens("m", 2, found)) == (4000, None)
    assert list(summary(found)) == [
        "m on one GPU: the host is no bound from 4,000 tokens a GPU on",
        "m on 2 GPUs: the host is the bound up to 4,000 tokens",
    ]


def test_it_prints_and_writes(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, tmp_path: object) -> None:
    shown = [CELL, replace(CELL, ranks=2, step_s=None, why_not="too small")]
    monkeypatch.setattr(weak_scaling, "cells", lambda *_: iter(shown))
    out = f"{tmp_path}/cells.csv"
    assert main(["--model", "m", "--hardware", "h100-80g-x2", "--out", out]) == 0
    printed = capsys.readouterr().out
    assert "does not fit" in printed and "m, 1,000 tokens, 2 GPUs: too small" in printed
    with open(out) as written:
        assert len(written.readlines()) == 3
    assert main(["--hardware", "no-such-machine"]) == 2
    assert "no-such-machine" in capsys.readouterr().out
