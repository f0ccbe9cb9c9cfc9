"""PatrickStar's chunk size search beside table 3 of its paper."""

from __future__ import annotations

import pytest

from paper_figures.patrickstar_chunks import MI, PAPER, PaperChunks, found, main, off_the_grid
from systems.strategies.patrickstar.chunks import LARGEST, SMALLEST, STEP


@pytest.mark.parametrize("cell", PAPER, ids=lambda cell: cell.model)
def test_chunks_are_as_full_as_in_table_3(cell: PaperChunks) -> None:
    ours = found(cell)
    assert SMALLEST <= ours.size * MI <= LARGEST
    assert ours.size * MI % STEP == 0
    beside = f"{ours.size} Mi, {ours.utilization:.2f} % (paper: {cell.size} Mi, {cell.utilization} %)"
    assert abs(ours.utilization - cell.utilization) <= 4, beside
    assert ours.utilization >= ours.at_paper_size or cell in off_the_grid(), "the search found no better size than the paper's"


def test_one_size_of_the_paper_is_not_on_its_grid() -> None:
    assert [(cell.model, cell.size) for cell in off_the_grid()] == [("ps-18b", 312)]


def test_the_table_has_both(capsys: pytest.CaptureFixture[str]) -> None:
    assert main() == 0
    shown = capsys.readouterr().out
    assert all(f"{cell.utilization} %" in shown for cell in PAPER)
    assert "312 of ps-18b" in shown
