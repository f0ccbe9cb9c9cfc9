"""Whose number a cell is cannot be mistaken: not in the types, not in what is printed, not in what is written."""

from __future__ import annotations

import pytest

from harness.paper_table import (
    ComputedCell,
    FigureCell,
    FigureColumn,
    MeasuredCell,
    Origin,
    PrintedCell,
    SimulatedCell,
    table,
)

CELLS: dict[Origin, FigureCell] = {
    "": "row",
    "paper": PrintedCell(317.82, "table 6"),
    "computed": ComputedCell(2.5),
    "measured": MeasuredCell(1.0, ("run-a", "run-b"), "NVIDIA H200"),
    "simulated": SimulatedCell(2.0, "yard-v100-32g-x8"),
}
ALL = table("all", [FigureColumn("s", origin) for origin in CELLS], [tuple(CELLS.values())], "a remark")


@pytest.mark.parametrize("origin", [*CELLS])
@pytest.mark.parametrize("of", [*CELLS])
def test_a_column_takes_cells_of_its_own_origin_alone(origin: Origin, of: Origin) -> None:
    if origin == of:
        table("one", [FigureColumn("s", origin)], [(CELLS[of],), (None,)])
    else:
        with pytest.raises(AssertionError, match="is none of the column"):
            table("one", [FigureColumn("s", origin)], [(CELLS[of],)])


def test_a_row_has_a_cell_a_column() -> None:
    with pytest.raises(AssertionError, match="1 cells for 2 columns"):
        table("short", [FigureColumn("a"), FigureColumn("b")], [("x",)])


def test_markdown_says_where_each_number_is_from() -> None:
    text = ALL.markdown()
    assert "| s | paper: s | computed: s | measured: s | simulated: s |" in text
    assert "| row | 317.82 | 2.5 | 1 [1] | 2 |" in text
    assert "paper: table 6." in text
    assert "measured [1]: NVIDIA H200, run-a, run-b" in text
    assert "simulated, not measured: on the profile yard-v100-32g-x8." in text
    assert text.endswith("* a remark\n")


def test_what_nothing_fills_is_empty_and_said() -> None:
    columns = [FigureColumn("of"), FigureColumn("s", "measured"), FigureColumn("s", "simulated")]
    text = table("holes", columns, [("x", None, None)]).markdown()
    assert "| x |  |  |" in text
    assert "no record of this work" in text and "simulated: nothing is." in text


def test_cells_for_programs_have_the_same_names_and_their_origin() -> None:
    found = list(ALL.cells())
    assert [each["origin"] for each in found] == ["paper", "computed", "measured", "simulated"]
    assert len({tuple(each) for each in found}) == 1
    assert (found[0]["place"], found[2]["runs"], found[2]["machine"]) == ("table 6", "run-a run-b", "NVIDIA H200")
    assert found[3]["profile"] == "yard-v100-32g-x8" and found[3]["runs"] is None


def test_a_name_with_a_bar_breaks_no_row() -> None:
    assert "a\\|b" in table("bars", [FigureColumn("of")], [("a|b",)]).markdown()
