"""`harness report`: what the page says is what the records make of it, whoever wrote them; what a browser makes of it is in
test_report_browser.py.
"""

from __future__ import annotations

import base64
import hashlib
import json
import math
import re
import tempfile
from collections import Counter
from collections.abc import Sequence
from functools import cache
from html.parser import HTMLParser
from itertools import pairwise
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from harness import cells, cli, ledger, store, tables
from harness.claims import read_claims
from harness.record import Record
from harness.report import page, timeline
from harness.report.content import ReportContent, gathered
from harness.report.page import LONGEST, rendered
from systems.planning.clock.perfetto import TimedEvent
from tests.harness.conftest import make_record
from tests.harness.test_tables import DEVICE, GIB, TABLE, record

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
EVENTS = (TimedEvent("compute", "forward of a", 0.0, 0.1), TimedEvent("compute", "backward of a", 0.1, 0.2))
SIMULATED = SimpleNamespace(simulation=SimpleNamespace(events=EVENTS, step_time_s=0.3))
HOSTILE = (
    "</script><script>alert(1)</script><!-- \"' onload=x ]]> </title></style>\x00\x1b[2J\u202e\u2028 {{ 7 * 7 }} {% raw %}"
)


class Seen(HTMLParser):
    """Tags with their attributes, texts, and the cells of each table by its class."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.tags: list[tuple[str, dict[str, str | None]]] = []
        self.rows: list[tuple[str, list[str]]] = []
        self.scripts: list[str] = []
        self._table, self._within = "", ""
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attributes: list[tuple[str, str | None]]) -> None:
        self.tags.append((tag, dict(attributes)))
        self._within = tag
        if tag == "table":
            self._table = dict(attributes).get("class") or ""
        elif tag == "tr":
            self.rows.append((self._table, []))
        elif tag in ("td", "th"):
            self.rows[-1][1].append("")

    def handle_data(self, text: str) -> None:
        if self._within == "script":
            self.scripts.append(text)
        elif self.rows and self.rows[-1][1]:
            self.rows[-1][1][-1] += text

    def handle_endtag(self, tag: str) -> None:
        self._within = ""
        if tag == "table":
            self._table = ""
            self.rows.append(("", []))

    @property
    def shape(self) -> Counter[tuple[str, tuple[str, ...]]]:
        """How many of which tags there are, with which attributes: what no record may change by what it is called."""
        return Counter((tag, tuple(attributes)) for tag, attributes in self.tags)


def gather(table: cells.ResultsTable, records: Sequence[Record], folder: Path = Path("nowhere")) -> ReportContent:
    return gathered(folder, records, [], [table], [])


@pytest.fixture(scope="module")
def kept() -> ReportContent:
    """What the kept records come to, the simulation aside, which takes seconds."""
    records, unreadable = store.read_all(RESULTS)
    found = [cells.read_table(path) for path in sorted(tables.FOLDER.glob("*.toml"))]
    claims = ledger.judged(read_claims(), records, ledger.read_forecasts())
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr("harness.hindcast.hindcast", lambda *_: SIMULATED)
        return gathered(RESULTS, records, unreadable, found, claims)


@pytest.fixture(scope="module")
def seen(kept: ReportContent) -> Seen:
    return Seen(rendered(kept))


# ---- the page of the kept records


def plain(line: str) -> list[str]:
    """The cells of a line of Markdown."""
    return [re.sub(r"</?sup>", "", cell.replace("\\|", "|")).strip() for cell in line.strip("| ").split(" | ")]


def test_every_number_of_the_core_table_is_what_harness_tables_writes(seen: Seen) -> None:
    written = [plain(line) for line in (ROOT / "docs" / "results.md").read_text().splitlines() if line.startswith("|")]
    asked = [row for row in written if set(row) != {"---"}]
    made = [[" ".join(cell.split()) for cell in row[:-1]] for kind, row in seen.rows if kind == "core" and row]
    assert made == asked and len(made) > 50


def test_every_run_that_is_named_is_listed_and_every_link_leads_to_it(kept: ReportContent, seen: Seen) -> None:
    ids = [attributes["id"] for _, attributes in seen.tags if "id" in attributes]
    links = [attributes["href"] for tag, attributes in seen.tags if tag == "a"]
    assert len(ids) == len(set(ids)) and {f"#{name}" for name in ids} >= set(links) and len(links) > 500
    assert {run.run_id for run in kept.runs} == {path.stem for path in RESULTS.glob("*.json")}
    numbers = kept.number_of()
    core = [row.runs for group in kept.core for row in group.rows]
    for runs in [*core, *(one.runs for one in kept.leaders), *(one.runs for one in kept.largest)]:
        assert runs and set(runs) <= numbers.keys()
    titles = " ".join(attributes.get("title") or "" for _, attributes in seen.tags)
    assert all(run in titles for one in kept.leaders for run in one.runs)


def test_all_sections_are_there_in_order(kept: ReportContent, seen: Seen) -> None:
    assert [attributes["id"] for tag, attributes in seen.tags if tag == "h2" and "id" in attributes] == list(page.SECTIONS)
    assert all((kept.machines, kept.leaders, kept.core, kept.largest, kept.consumption, kept.courses, kept.claims))
    assert {one.system for one in kept.paper_rules} == {"angel-ptm", "elixir", "h3t", "patrickstar"}
    assert len(kept.claims) == 32 and [one.question for one in kept.answers][:2] == [
        "Which is best?",
        "Is what the papers say true?",
    ]


def test_nothing_is_asked_of_anybody(kept: ReportContent, seen: Seen) -> None:
    text = rendered(kept)
    names = {name for _, attributes in seen.tags for name in attributes}
    assert not names & {"src", "srcset", "style", "action", "data", "poster", "background", "xlink:href"}
    assert not [name for name in names if name.startswith("on")]
    assert {tag for tag, attributes in seen.tags if "href" in attributes} == {"a"}
    assert not re.search(r"https?:|url\(|@import|//[a-z]", text.partition('id="data"')[0])
    scripts = [attributes for tag, attributes in seen.tags if tag == "script"]
    assert scripts == [{"type": "application/json", "id": "data"}]
    assert not {"iframe", "object", "embed", "link", "form", "img", "base"} & {tag for tag, _ in seen.tags}


def test_the_policy_lets_nothing_but_the_style_in(kept: ReportContent, seen: Seen) -> None:
    text = rendered(kept)
    (policy,) = (a["content"] or "" for t, a in seen.tags if t == "meta" and a.get("http-equiv") == "Content-Security-Policy")
    style = re.search(r"<style>(.*?)</style>", text, flags=re.DOTALL)
    assert style is not None
    digest = base64.b64encode(hashlib.sha256(style[1].encode()).digest()).decode()
    assert policy == f"default-src 'none'; style-src 'sha256-{digest}'; base-uri 'none'; form-action 'none'"


def test_the_same_records_make_the_same_page_and_its_data_are_in_it(kept: ReportContent, seen: Seen) -> None:
    assert rendered(kept) == rendered(kept)
    (data,) = seen.scripts
    told = json.loads(data)
    assert told["runs"] == [vars(run) for run in kept.runs] and len(told["claims"]) == 32
    assert [row["row"]["runs"] for group in told["core"] for row in group["rows"]] == [
        list(row.runs) for group in kept.core for row in group.rows
    ]


def test_it_can_be_read_with_other_means_than_eyes(seen: Seen) -> None:
    headers = [attributes for tag, attributes in seen.tags if tag == "th"]
    assert all(attributes.get("scope") in ("col", "row") for attributes in headers)
    drawings = [attributes for tag, attributes in seen.tags if tag == "svg"]
    assert all(attributes.get("aria-hidden") == "true" or attributes.get("aria-label") for attributes in drawings)
    levels = [int(tag[1]) for tag, _ in seen.tags if re.fullmatch(r"h\d", tag)]
    assert levels[0] == 1 and all(after <= before + 1 for before, after in pairwise(levels))


def test_the_trace_that_is_shown_is_one_that_is_kept(kept: ReportContent) -> None:
    found = kept.timeline
    assert found is not None and (RESULTS / "traces" / found.file).is_file() and found.simulated_s == 0.3
    assert [(strip.lane, strip.source) for strip in found.strips][:3] == [
        ("compute", "measured"),
        ("compute", "simulated"),
        ("host to device", "measured"),
    ]
    assert found.measured_s is not None
    for strip in found.strips:
        assert 0 < strip.busy_s <= found.span_s and all(0 <= block.x <= timeline.WIDE for block in strip.blocks)
    measured = next(strip for strip in found.strips if strip.source == "measured")
    assert 0.5 * found.measured_s < measured.busy_s < found.measured_s
    assert len(found.other) == len(list((RESULTS / "traces").iterdir())) - 1


# ---- the command


def test_an_empty_folder_gives_a_page_that_says_so(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "page.html"
    folder = tmp_path / "records"
    folder.mkdir()
    assert cli.main(["report", "--results", str(folder), "--out", str(out)]) == 0
    told = json.loads(capsys.readouterr().out)
    assert (told["kind"], told["records"], told["out"]) == ("report", 0, str(out))
    text = out.read_text()
    assert (
        "There is no record: every section below is empty." in text
        and "nothing can be said" in told["answers"]["Which is best?"]
    )
    assert text.count('class="none"') > 8
    assert not re.search(r">\s*(?:None|nan|inf|0 s)\s*<", text)


def test_a_record_from_a_gpu_in_a_folder_that_has_no_table(tmp_path: Path) -> None:
    store.write(make_record(resolved={"device": "cuda", "device_label": "another", "parameters": 7}), tmp_path)
    assert cli.main(["report", "--results", str(tmp_path), "--out", str(tmp_path / "page.html")]) == 0
    assert "another" in (tmp_path / "page.html").read_text()


@pytest.mark.parametrize(
    ("arguments", "told"),
    [
        (["--results", "nowhere"], "--results nowhere is no folder"),
        (["--out", "no/folder/page.html"], "--out no/folder/page.html cannot be written"),
        (["--out", "."], "--out . cannot be written"),
        (["--result", "x"], "--result"),
    ],
)
def test_what_cannot_be_is_told_in_one_line(
    arguments: list[str], told: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.chdir(tmp_path)
    (tmp_path / "results").mkdir()
    assert cli.main(["report", *arguments]) == 2
    out, err = capsys.readouterr()
    assert told in err and out == "" and err.count("\n") == 1
    assert [path.name for path in tmp_path.iterdir()] == ["results"]


def test_a_page_that_is_there_stays_whole_where_a_new_one_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    out = tmp_path / "page.html"
    out.write_text("the last one")
    (tmp_path / "results").mkdir()

    def fails(*_: Any) -> str:
        raise KeyboardInterrupt

    monkeypatch.setattr(page, "rendered", fails)
    assert cli.main(["report", "--results", str(tmp_path / "results"), "--out", str(out)]) == cli.INTERRUPTED
    assert out.read_text() == "the last one" and len(list(tmp_path.iterdir())) == 2


# ---- what records of others may say


def hostile_records(text: str, folder: Path) -> list[Record]:
    """Of every kind that a section shows, as they come back from a folder, with the text wherever one may stand."""
    spec = {"system": "resident", "model": text or "x", "tag": text, "option": (f"a={text}",), "set": (f"b={text}",)}
    hardware = {"device_driver": text, "cpu_model": text, "boot_id": text, "device_uuid": text}
    about = {"environment": {"hardware": hardware, "versions": {"torch": text}}, "started_at": text}
    gpu = {"device": "cuda", "device_label": text, "parameters": 1 << 40}
    there = {"reason": {"message": text, "tier": "device", "phase": text}, "status": "oom"}
    doubt = {"code": text, "seen": text, "cause": text, "advice": text}
    names = [re.sub(r"[\x00/]", "_", text)[:40], "one", "two", "three"]
    made = [
        make_record(run_id=f"{names[0]}-0", spec=spec, resolved=gpu, **about),
        make_record(run_id="one", spec=spec, resolved={**gpu, "parameters": 1 << 41}, **about, **there),
        record("resident", 2, 0.2, record={"doubts": [doubt], "metrics": {"tokens_per_s": 9.0, "loss": [2.0, 1.0]}, **about}),
        record("elixir", 3, 0.3, device_memory=GIB, record={"metrics": {"tokens_per_s": 8.0, "loss": [2.0, 1.0]}, **about}),
        record("elixir", 4, 0.3, option=("b=2", "a=1"), record={**there, **about}),
    ]
    for one in made:
        store.write(one, folder)
    found, unreadable = store.read_all(folder)
    assert not unreadable
    return found


def hostile_page(text: str) -> str:
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "table").write_text(TABLE)
        (folder / "records").mkdir()
        records = hostile_records(text, folder / "records")
        broken = [store.Unreadable(folder / f"{text.replace('/', '_')}.json", text)]
        shown = cells.read_table(folder / "table")
        return rendered(gathered(Path(text.replace("\0", "")), records, broken, [shown], []))


@cache
def plain_shape() -> Counter[tuple[str, tuple[str, ...]]]:
    return Seen(hostile_page("x")).shape


TEXTS = st.text(st.characters(codec="utf-8"), min_size=1, max_size=60) | st.sampled_from(
    ["'", '"', "<", "&lt;", "</", "`", "{{"]
)


@settings(max_examples=10, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(TEXTS)
@example(HOSTILE)
@example("]]>--><svg onload=alert(1)>")
@example('" autofocus onfocus="alert(1)')
@example("x" * 100_000)
def test_what_records_are_called_changes_no_tag_of_the_page(text: str) -> None:
    """The page has the tags, and these the attributes, that it has where all is called x; and all of its data."""
    made = hostile_page(text)
    seen = Seen(made)
    assert seen.shape == plain_shape()
    (data,) = seen.scripts
    assert json.loads(data)["machines"]
    assert not re.search(r"[\x00-\x08\x0b-\x1f\x7f\u202a-\u202e\u2066-\u2069]", made)
    assert len(made) < 400_000 + 40 * len(text)


def test_what_is_long_is_cut_and_what_nobody_sees_is_written_out() -> None:
    made = hostile_page("x" * 5 * LONGEST)
    assert f"{'x' * LONGEST}… ({5 * LONGEST} characters)" in made
    assert "\\u202e" in hostile_page("\u202e") and "&lt;script&gt;" in hostile_page("<script>")


@settings(max_examples=15, deadline=None)
@given(
    st.lists(st.floats(allow_nan=False, allow_infinity=False) | st.none(), max_size=6),
    st.floats(min_value=0, allow_nan=False, allow_infinity=False),
    st.integers(min_value=0, max_value=2**64 - 1),
)
@example([1.7e308, -1.7e308], 1e308, 2**64 - 1)
@example([5e-324, 0.0], 5e-324, 0)
def test_odd_numbers_are_drawn_within_the_page(losses: list[float | None], rate: float, size: int) -> None:
    with tempfile.TemporaryDirectory() as name:
        (Path(name) / "table").write_text(TABLE)
        shown = cells.read_table(Path(name) / "table")
    odd = {
        "metrics": {"loss": losses, "tokens_per_s": rate, "median_step_time_s": rate, "mean_step_time_s": rate},
        "memory": {"device_peak_bytes": size, "host_peak_bytes": size, "disk_peak_bytes": size},
        "energy": {"joules_per_sample": rate},
        "resolved": {"device": "cuda", "device_label": DEVICE, "batch_size": 2, "seq_len": 16, "parameters": size},
    }
    made = rendered(
        gather(shown, [record("resident", 1, 1.0, record=odd), record("elixir", 2, 1.0, device_memory=GIB, record=odd)])
    )
    for tag, attributes in Seen(made).tags:
        for name in ("x", "width", "points"):
            numbers = [float(one) for one in re.split(r"[ ,]", attributes.get(name) or "") if one]
            assert all(math.isfinite(one) and -1 <= one <= 1001 for one in numbers), (tag, attributes)


@pytest.mark.long
def test_the_kept_trace_is_shown_beside_its_simulation(tmp_path: Path) -> None:
    """The whole command, as a user calls it: under two minutes, and the simulation within a fifth of what was measured."""
    out = tmp_path / "report.html"
    assert cli.main(["report", "--results", str(RESULTS), "--out", str(out)]) == 0
    found = json.loads(Seen(out.read_text()).scripts[0])["timeline"]
    assert found["simulated_s"] == pytest.approx(found["measured_s"], rel=0.2)
    assert {(strip["lane"], strip["source"]) for strip in found["strips"]} == {
        (lane, source) for lane in timeline.LANES.values() for source in ("measured", "simulated")
    }
