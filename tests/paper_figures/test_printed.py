"""The papers' numbers in paper_figures: as their text has them, and what the text derives from them follows from them.

Rows are copied from the papers' own tables as text, a second time and in their own form, so that a slip in one is seen.
"""

from __future__ import annotations

from functools import cache

import pytest

from harness.figures import FigureSpec, find
from harness.paper_table import MeasuredCell, PaperTable, PrintedCell, SimulatedCell
from paper_figures import angel_memory, angel_results, h3t_runs, patrickstar_margin, patrickstar_scale, patrickstar_setup
from paper_figures.h3t_runs import TABLE1, TABLE3
from tests.test_docs import ROOT

QUICK = [name for name in find() if name not in ("patrickstar-table3", "h3t-table5", "h3t-table6")]
TEXTS = {
    "angel-table4": """
GPT3-1.7B	24	24	2304	9216
GPT3-13B	40	40	5140	20506
GPT3-28B	26	128	8192	32768
GPT3-30B	64	36	8192	32768
GPT3-55B	68	128	8192	32768
GPT3-120B	64	96	12288	49152
GPT3-175B	70	112	14336	57344
T5-1.4B	16	16	1024	16384
T5-27B	28	64	4096	16384
T5-58B	60	64	4096	16384
T5-MoE-1.2T	16	16	1024	16384	2304""",
    "angel-table5": """
28B	1	18	0.404
28B	36	40	7.61
28B	38	39	10.99
55B	1	33	0.464
27B	1	20	0.317
27B	32	39	7.31
27B	50	40	14.38
58B	1	38	0.432
58B	4	40	3.37""",
    "angel-table6": """
1T	64	37.26	1.124
10T	576	317.82	0.853
10T	576	942.31	0.861""",
    "patrickstar-table4": """
2
6
-20
1
-1
5""",
    "patrickstar-table5": """
160.2	208.4	178.9	198.04
158.3	208.4	173.2	198.04
90.2	112.72	92.3	111.8""",
    "h3t-table2": """
1.84x10^9	48	1024	16384	32
6.68x10^9	48	1024	65536	128
1.38x10^10	48	2048	65536	128
1.02x10^11	56	12288	49152	96""",
    "h3t-table4": """
75.12	94.64 / 96.17	71.07	72.50
67.34	94.64 / 95.91	71.48	72.73""",
}
TURNED = {
    "h3t-table1": """
6.0	17.6	19.4	19.8	5.5	19.5	10.0	28.4	7.4	26.6	35.6	61.6
5.8	17.5	19.6	20.5	5.5	19.7	9.7	28.7	7.6	26.8	36.2	62.0
7.1	17.7	22.1	23.0	5.7	19.8	9.9	28.6	7.8	26.9	36.3	61.8
11.3	-	-	-	15.7	-	43.2	-	-	-	-	-
9.3	-	-	-	6.8	-	17.7	-	10.6	-	-	-""",
    "h3t-table3": """
1.7	6.0	1.0	2.0	6.0	21.5	7.0	23.2	6.7	22.9	14.1	20.2
5.8	-	-	-	9.4	-	10.7	-	-	-	-	-
6.8	-	-	-	20.2	-	34.4	-	34.4	-	-	-""",
}
"""With settings as columns."""


@cache
def made(name: str) -> list[PaperTable]:
    return list(find()[name].loaded().tables(name, FigureSpec(name=name)))


def printed(name: str) -> list[list[str]]:
    """The paper's cells of each row, as they are shown."""
    return [[str(cell.value) for cell in row if isinstance(cell, PrintedCell)] for row in made(name)[0].rows]


def cells_of(text: str) -> list[list[str]]:
    return [line.split("\t") for line in text.strip().splitlines()]


@pytest.mark.parametrize("name", [*TEXTS])
def test_rows_are_the_paper_s(name: str) -> None:
    expected = [row[1:] if name == "angel-table4" else row for row in cells_of(TEXTS[name])]
    assert printed(name) == expected


@pytest.mark.parametrize("name", [*TURNED])
def test_columns_are_the_paper_s(name: str) -> None:
    assert printed(name) == [list(row) for row in zip(*cells_of(TURNED[name]), strict=True)]


def test_each_digit_is_shown() -> None:
    assert "| + Lock-Free | 10T | 576 | 942.31 | 0.861 |" in made("angel-table6")[0].markdown()


@pytest.mark.parametrize("name", QUICK)
def test_every_printed_number_has_its_place(name: str) -> None:
    for each in made(name):
        places = [cell.place for row in each.rows for cell in row if isinstance(cell, PrintedCell)]
        assert all("table" in place or "figure" in place or "section" in place for place in places)
        assert not any(isinstance(cell, PrintedCell) and cell.value == "" for row in each.rows for cell in row)


@pytest.mark.parametrize("name", QUICK)
def test_measured_numbers_name_runs_that_are_kept(name: str) -> None:
    for each in made(name):
        for cell in (cell for row in each.rows for cell in row if isinstance(cell, MeasuredCell)):
            assert cell.run_ids and cell.machine
            folder = ROOT / "results" / (name if name in ("losses", "staleness") else "")
            assert all((folder / f"{run_id}.json").is_file() for run_id in cell.run_ids)


@pytest.mark.parametrize("name", QUICK)
def test_without_records_nothing_is_measured(name: str, tmp_path: object) -> None:
    module = find()[name].loaded()
    for each in module.tables(name, FigureSpec(name=name, results=f"{tmp_path}/none")):
        assert not any(isinstance(cell, MeasuredCell) for row in each.rows for cell in row)


HOLES = {
    "angel-figure7": "bars of 1.7B to 120B, 8 and 32 GPUs; batches",
    "angel-figure9": "points",
    "patrickstar-figure11": "bars of both clusters, batches",
    "patrickstar-figure12": "points",
    "patrickstar-figure16": "points",
    "elixir-figure6": "bars, batches, sequence length",
    "elixir-figure8": "bars",
    "elixir-figure9": "sizes, bars",
}


@pytest.mark.parametrize("name", [*HOLES])
def test_what_is_only_in_an_image_is_a_hole(name: str) -> None:
    (row,) = (row for row in made(name)[0].rows if row[0] == HOLES[name])
    assert row[1:] == (None,) * (len(row) - 1)


def test_figures_without_a_printed_number_have_none() -> None:
    for name in ("h3t-figure6", "h3t-figure10"):
        assert not any(isinstance(cell, PrintedCell) for each in made(name) for row in each.rows for cell in row)


# ---- what the papers derive


def test_totals_of_angel_s_table_1_are_the_sums_of_its_rows() -> None:
    for part in ("params", "acts", "optims"):
        assert angel_memory.summed(part)[:2] == getattr(angel_memory.TOTAL, part)[:2]


def test_sizes_of_angel_s_table_2_follow_from_the_shape_but_for_one() -> None:
    ours = angel_memory.tensor_sizes(width=12288, inner=49152, tokens=angel_memory.TOKENS)
    shared = {size: count for size, (count, _) in ours.items() if size in angel_memory.TABLE2}
    assert {**shared, 0.375: None} == {**angel_memory.TABLE2, 0.375: None}
    assert sum(count for count, _ in ours.values()) == sum(angel_memory.TABLE2.values())
    assert 2 * 96 * 2048 / angel_memory.MIB == 0.375


def test_a_block_that_is_built_has_the_parameters_of_the_formula_and_few_more() -> None:
    formula = angel_memory.evaluated(angel_memory.TOTAL.params, width=12288, inner=49152) // 4
    assert 0 < angel_memory.block_parameters("gpt3-175b") - formula <= 16 * 12288


def test_gains_that_angel_prints() -> None:
    gain = angel_results.gain
    assert [gain(55, 28), gain(58, 27), gain(14.38, 7.31)] == ["96.4 %", "114.8 %", "96.7 %"]
    assert round(100 * (10.99 / 7.61 - 1)) == 44
    assert [f"{each / 317.82:.2f}" for each in (942.31, 962.31)] == ["2.96", "3.03"]
    assert round(angel_results.experts_parameters(256) / 1e12, 1) == 1.2


def test_ratios_that_h3t_prints() -> None:
    def over(name: str) -> list[float]:
        return [slow / fast for slow, fast in zip(TABLE1[name], TABLE1["DP"], strict=True) if slow and fast]

    def saved(name: str) -> list[float]:
        return [1 - ours / theirs for ours, theirs in zip(TABLE3["Min Memory"], TABLE3[name], strict=True) if ours and theirs]

    assert [round(bound(over("ZeRO-2")), 1) for bound in (min, max)] == [1.2, 1.8]
    assert [round(bound(over("ZeRO-3")), 1) for bound in (min, max)] == [1.9, 4.3]
    assert [round(100 * bound(saved("ZeRO-3")), 1) for bound in (min, max)] == [34.6, 70.7]
    assert [round(100 * bound(saved("ZeRO-2")), 1) for bound in (min, max)] == [70.3, 80.5]


def test_ratios_that_patrickstar_prints() -> None:
    assert all(row[2] > 0.75 * row[3] and row[4] > 0.75 * row[5] for row in patrickstar_margin.TABLE5)
    assert (round(100 * 419 / 444), round(100 * 857 / 1180), round(100 * 7611.5 / 64 / 312)) == (94, 73, 38)
    said = patrickstar_scale.PRINTED
    one, eight = said["YARD", "PatrickStar", 1], said["SuperPod", "PatrickStar", 8]
    assert (one, said["YARD", "DeepSpeed-DP", 1], eight, said["SuperPod", "DeepSpeed-DP", 8]) == ("12B", "4B", "68B", "30B")


def test_patrickstar_s_exchanged_layers_are_told() -> None:
    shown = {label: layers * 12 * width * width / 1e9 for label, layers, width in patrickstar_setup.TABLE2}
    wrong = {label for label, size in shown.items() if abs(size / float(label[:-1]) - 1) > 0.1}
    assert wrong == {"10B", "12B", "15B", "18B"}
    (each,) = made("patrickstar-table2")
    assert {row[0] for row in each.rows if "exchanged" in str(row[-1])} == wrong


# ---- what is simulated


def test_every_setting_of_h3t_s_tables_is_kept() -> None:
    for name in ("h3t-table1", "h3t-table3"):
        each = made(name)[0]
        assert all(any(isinstance(cell, SimulatedCell) for cell in row) for row in each.rows)
    assert [setting.gpus for setting in h3t_runs.SETTINGS] == [8] * 8 + [64] * 4
