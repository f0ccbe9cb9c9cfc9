"""The sections of `harness report`, each of records made for it: who is ahead, papers' rules, largest models, losses."""

from __future__ import annotations

import re
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from harness import cells, results_page
from harness.record import Record
from harness.report.answers import answers
from harness.report.largest import largest_models
from harness.report.leaders import ALONE, leader
from harness.report.losses import courses, own_spreads
from harness.report.page import rendered
from harness.report.paper_rules import paper_rules
from tests.harness.test_report import gather
from tests.harness.test_tables import DEVICE, GIB, TABLE, record


@pytest.fixture
def table(tmp_path: Path) -> cells.ResultsTable:
    path = tmp_path / "table.toml"
    path.write_text(TABLE)
    return cells.read_table(path)


def shown(table: cells.ResultsTable, records: Sequence[Record]) -> list[tuple[cells.ResultsTable, results_page.ShownGroup]]:
    return [(table, results_page.shown_group(group, records, table.hardware)) for group in table.groups]


def ran(system: str, number: int, rate: float, **changes: Any) -> Record:
    return record(system, number, 32 / rate, **changes)


def test_one_process_is_no_verdict_and_three_are(table: cells.ResultsTable) -> None:
    one = [ran("resident", 1, 100), ran("dummy", 2, 120)]
    (found,) = (leader(table, group, one) for _, group in shown(table, one))
    assert found is not None and (found.label, found.next, found.verdict, found.n) == ("dummy", "resident", "too few runs", 1)
    assert found.over_next is not None and found.over_next.value == pytest.approx(1.2)
    three = [
        ran(system, 10 * n + k, rate + k)
        for k in range(3)
        for n, (system, rate) in enumerate((("resident", 100), ("dummy", 120)))
    ]
    (found,) = (leader(table, group, three) for _, group in shown(table, three))
    assert found is not None and (found.label, found.verdict, found.n, found.next_n) == ("dummy", "faster", 3, 3)
    assert set(found.runs) == {record.run_id for record in three}
    (answer, *_) = gather(table, three).answers
    assert "1 has the 3 processes" in answer.text and "dummy (the whole device) is faster than resident" in answer.points[0][0]


def test_what_is_not_decided_says_why(table: cells.ResultsTable) -> None:
    records = [ran("resident", 1, 100), ran("dummy", 2, 120)]
    (found,) = (leader(table, group, records) for _, group in shown(table, records))
    assert found is not None
    for verdict, told in (("too few runs", "Too few runs: 1 process each."), ("cannot be compared", "Cannot be compared: ")):
        (answer, *_) = answers([replace(found, verdict=verdict)], [], [], [], [])
        assert "1 setting " in answer.text and "dummy in 1" in answer.text
        assert answer.points[0][0].startswith(f"{table.title}; A group: dummy 1.2x the speed of resident. {told}")
    (best, papers, same, mine) = answers([], [], [], [], [])
    assert "nothing can be said" in best.text and "No claim" in papers.text and "No record has losses" in same.text
    assert "No model of these records" in mine.text


def test_other_work_is_left_out_and_said(table: cells.ResultsTable) -> None:
    resolved = {"device_label": DEVICE, "batch_size": 2, "seq_len": 16, "clock": "another"}
    records = [ran("resident", 1, 100), ran("dummy", 2, 900, record={"resolved": resolved})]
    (found,) = (leader(table, group, records) for _, group in shown(table, records))
    assert found is not None and (found.label, found.verdict, found.unlike) == ("resident", ALONE, ("dummy",))


def test_without_the_reference_the_fastest_is_what_others_are_set_against(table: cells.ResultsTable) -> None:
    records = [ran("elixir", 1, 100, device_memory=GIB), ran("dummy", 2, 120)]
    (found,) = (leader(table, group, records) for _, group in shown(table, records))
    assert found is not None and (found.label, found.next, found.pivot) == ("dummy", "elixir", "dummy")
    assert not found.is_reference and "the reference has no run" in rendered(gather(table, records))
    assert not [leader(table, group, []) for _, group in shown(table, []) if leader(table, group, [])]


def on(machine: str, **changes: Any) -> dict[str, Any]:
    return {"record": {"environment": {"hardware": {"boot_id": machine, "device_uuid": "1"}}}, **changes}


def test_processes_of_one_row_are_set_against_each_other_too(table: cells.ResultsTable) -> None:
    records = [
        record("resident", n, 1.0, record={"metrics": {"tokens_per_s": 1.0, "loss": [4.0, last]}})
        for n, last in ((1, 2.0), (2, 3.0))
    ]
    (found,) = own_spreads(shown(table, records), records)
    assert (found.label, found.runs) == ("resident", ("2026-1", "2026-2")) and found.deviation == pytest.approx(1 / 3)
    (point,) = gather(table, records).answers[2].points
    assert "processes of one row, resident, are up to 33.3 % from each other" in point[0] and point[1] == found.runs
    assert not own_spreads(shown(table, records[:1]), records[:1])


def test_long_curves_are_thinned_and_end_where_they_end(table: cells.ResultsTable) -> None:
    losses = [float(step) for step in range(20_000)]
    many = [
        record(name, n, 1.0, record={"metrics": {"tokens_per_s": 1.0, "loss": losses}})
        for n, name in enumerate(("resident", "dummy"))
    ]
    (course,) = courses(shown(table, many), many)
    points = course.curves[0].points.split()
    assert len(points) < 600 and points[-1].startswith("1000.0,") and course.curves[0].steps == 20_000


def test_who_is_ahead_on_a_machine_of_both_is_ahead(table: cells.ResultsTable) -> None:
    """Elixir's ratio to the reference is of one machine and dummy's of another, on which elixir ran too, and was faster."""
    records = [ran("resident", 1, 100, **on("a")), ran("elixir", 2, 110, **on("a"), device_memory=GIB)]
    records += [ran("resident", 3, 50, **on("b")), ran("dummy", 4, 60, **on("b"))]
    records += [ran("elixir", 5, 62, **on("c"), device_memory=GIB), ran("dummy", 6, 56, **on("c"))]
    (found,) = (leader(table, group, records) for _, group in shown(table, records))
    assert found is not None and (found.label, found.next) == ("elixir", "dummy")
    assert found.over_next is not None and found.over_next.value == pytest.approx(62 / 56)


def test_the_papers_rules_are_set_against_the_default(tmp_path: Path) -> None:
    rows = '{ system = "resident" },\n    { system = "elixir" },\n    { system = "elixir", option = ["variant=paper"] }'
    path = tmp_path / "table.toml"
    path.write_text(re.sub(r"rows = \[.*\]", f"rows = [{rows}]", TABLE, flags=re.DOTALL))
    table = cells.read_table(path)
    both = [ran("elixir", 1, 100), ran("elixir", 2, 50, option=("variant=paper",))]
    found = {one.system: one for one in paper_rules(shown(table, both), both)}
    assert found["elixir"].ratio is not None and found["elixir"].ratio.value == 0.5
    assert found["elixir"].runs == ("2026-2", "2026-1") and found["elixir"].ratio.verdict == "too few runs"
    assert found["h3t"].runs == () and "no run by its paper's rules" in found["h3t"].note
    alone = {one.system: one for one in paper_rules(shown(table, both[1:]), both[1:])}
    assert alone["elixir"].ratio is None and alone["elixir"].note == "no run by default"


def sized(number: int, parameters: int, **changes: Any) -> Record:
    resolved = {"device": "cuda", "device_label": DEVICE, "parameters": parameters}
    return record("elixir", number, 1.0, record={"resolved": resolved, **changes})


def test_the_largest_that_trained_and_the_smallest_that_did_not() -> None:
    oom = {"status": "oom"}
    failed = {"status": "failed"}
    records = [
        sized(1, 10),
        sized(2, 30),
        sized(3, 50, **oom),
        sized(4, 40, **oom),
        sized(5, 35, **failed),
        sized(6, 20, **oom),
    ]
    (found,) = largest_models(records)
    assert (found.parameters, found.beyond, found.runs) == (30, 40, ("2026-2", "2026-4"))
    assert largest_models(records[2:]) == []
    emulated = record(
        "elixir", 7, 1.0, record={"resolved": {"device": "cpu", "device_label": "cpu-emulated", "parameters": 99}}
    )
    assert largest_models([*records, emulated]) == [found]


def test_losses_that_lie_apart_are_said(table: cells.ResultsTable) -> None:
    def with_losses(system: str, number: int, losses: list[float], **changes: Any) -> Record:
        return record(system, number, 1.0, record={"metrics": {"tokens_per_s": 1.0, "loss": losses}, **changes})

    records = [with_losses("resident", 1, [4.0, 2.0]), with_losses("dummy", 2, [4.0, 3.0])]
    (course,) = courses(shown(table, records), records)
    first, second = course.curves
    assert (first.is_reference, first.too_far, second.deviation, second.too_far) == (True, False, 0.5, True)
    assert (course.low, course.high, course.steps) == (2.0, 4.0, 2)
    assert (first.apart_from, second.apart_from) == (None, 2)
    made = gather(table, records)
    assert "50 % off, <strong>more than one training may</strong>, from step 2 on (nothing that is known differs)" in rendered(
        made
    )
    assert "Losses of 0 of 1 rows" in made.answers[2].text
    assert not courses(shown(table, records[:1]), records[:1])


def test_losses_of_another_seed_are_not_compared(table: cells.ResultsTable) -> None:
    def of_seed(system: str, number: int, seed: int, losses: list[float]) -> Record:
        found = record(system, number, 1.0, record={"metrics": {"tokens_per_s": 1.0, "loss": losses}})
        return found.model_copy(update={"spec": found.spec.model_copy(update={"seed": seed})})

    records = [of_seed("resident", 1, 0, [4.0, 2.0]), of_seed("dummy", 2, 1, [4.0, 3.0])]
    (course,) = courses(shown(table, records), records)
    other = course.curves[1]
    assert (other.other_seed, other.deviation, other.too_far, other.apart_from) == (True, None, False, None)
    made = gather(table, records)
    assert "another seed, and so other losses" in rendered(made)
    assert made.answers[2].text == "No record has losses beside a reference's."


def test_rows_of_several_ranks_are_called_so() -> None:
    given = {"model": "opt-tiny", "batch_size": 2, "seq_len": 16, "system": "elixir"}
    two = cells.made_cell(given | {"ranks": 2, "option": ("variant=paper",)}, 1)
    assert [results_page.short_label(one) for one in (cells.made_cell(dict(given), 1), two)] == [
        "elixir",
        "elixir (2 ranks, paper)",
    ]
