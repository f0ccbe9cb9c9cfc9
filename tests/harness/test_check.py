"""`harness check`: a number changed by hand is found, whichever it is, and so is a claim that was written after its runs."""

from __future__ import annotations

import json
import shutil
import subprocess
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from harness import ancestry, cells, check, cli, digests, rederive, store
from harness.claims import ClaimData, LedgerData, PartData, read_claims
from harness.history import GitHistory, NoHistory, find
from harness.ledger import read_forecasts
from harness.record import Record
from harness.report.page import ReportSpec, write_report

ROOT = Path(__file__).resolve().parents[2]
RESULTS = ROOT / "results"
KEPT = "20261130T144652.831361Z-resident-opt-1-3b-f4ab9c"
EXPERTS = "20261201T003145.495613Z-resident-mixtral-9b-bf8467"
Change = Callable[[dict[str, Any]], None]


def scaled(*place: Any) -> Change:
    """A number at a place, a per mille larger; a whole one by one."""

    def change(tree: dict[str, Any]) -> None:
        at: Any = tree
        for name in place[:-1]:
            at = at[name]
        value = at[place[-1]]
        at[place[-1]] = value + 1 if isinstance(value, int) else value * 1.001

    return change


DERIVED = {
    "tokens_per_s": scaled("metrics", "tokens_per_s"),
    "samples_per_s": scaled("metrics", "samples_per_s"),
    "mean_step_time_s": scaled("metrics", "mean_step_time_s"),
    "median_step_time_s": scaled("metrics", "median_step_time_s"),
    "timed_region_s": scaled("metrics", "timed_region_s"),
    "useful_steps": scaled("metrics", "useful_steps"),
    "tflops_6n": scaled("metrics", "tflops_6n"),
    "model_tflops": scaled("metrics", "model_tflops"),
    "hardware_tflops": scaled("metrics", "hardware_tflops"),
    "mfu": scaled("metrics", "mfu"),
    "a step's time": scaled("metrics", "step_time_s", 0),
    "a sample of it": scaled("samples", "step_time_s", -1),
    "a loss": scaled("metrics", "loss", 1),
    "a norm": scaled("samples", "norm", 0),
    "parameters": scaled("resolved", "parameters"),
    "the global batch": scaled("resolved", "global_batch_samples"),
}
RAW = {
    "bytes": scaled("traffic", "h2d_bytes"),
    "a peak": scaled("memory", "host_rss_peak_bytes"),
    "a phase": scaled("phases_s", "build"),
}


@pytest.fixture(scope="module")
def kept() -> dict[str, Any]:
    tree: dict[str, Any] = json.loads((RESULTS / f"{KEPT}.json").read_text())
    return tree


@pytest.fixture
def folder(tmp_path: Path) -> Path:
    """Two records and their digests."""
    made = tmp_path / "results"
    made.mkdir()
    for path in sorted(RESULTS.glob("*.json"))[:1]:
        shutil.copy(path, made)
    shutil.copy(RESULTS / f"{KEPT}.json", made)
    assert digests.add_digests(made) == 2
    return made


def changed(tree: dict[str, Any], change: Change) -> dict[str, Any]:
    again: dict[str, Any] = json.loads(json.dumps(tree))
    change(again)
    return again


def test_a_record_as_its_run_left_it_holds(kept: dict[str, Any]) -> None:
    assert list(rederive.wrong(Record.model_validate(kept))) == []


def test_so_does_one_with_experts_and_rotary_embeddings_by_other_versions() -> None:
    """Parameters are those that a token uses; FLOPs may differ by positions times frequencies, and by no more than that."""
    tree: dict[str, Any] = json.loads((RESULTS / f"{EXPERTS}.json").read_text())
    assert list(rederive.wrong(Record.model_validate(tree))) == []
    for name in ("model_tflops", "hardware_tflops", "mfu"):
        more = json.loads(json.dumps(tree))
        more["metrics"][name] *= 1 + 1e-7
        assert f"metrics.{name} is" in next(rederive.wrong(Record.model_validate(more)))
    other = json.loads(json.dumps(tree))
    other["environment"]["versions"] |= {"transformers": "0"}
    assert list(rederive.wrong(Record.model_validate(other))) == []


@pytest.mark.parametrize("name", DERIVED)
def test_a_derived_number_changed_by_hand_does_not_follow(kept: dict[str, Any], name: str) -> None:
    found = list(rederive.wrong(Record.model_validate(changed(kept, DERIVED[name]))))
    assert found, name


def test_numbers_without_samples_are_told(kept: dict[str, Any]) -> None:
    def emptied(tree: dict[str, Any]) -> None:
        tree["samples"]["step_time_s"] = []

    assert "no samples" in next(rederive.wrong(Record.model_validate(changed(kept, emptied))))


@pytest.mark.parametrize("name", RAW)
def test_a_raw_number_changed_by_hand_is_not_what_its_digest_is_of(folder: Path, kept: dict[str, Any], name: str) -> None:
    path = folder / f"{KEPT}.json"
    path.write_text(json.dumps(changed(kept, RAW[name])))
    assert list(rederive.wrong(store.read(path))) == []  # type: ignore[arg-type]
    ((where, what),) = digests.wrong_digests(folder)
    assert where == path.name and "is not what its digest" in what


def test_a_digest_is_added_once_and_never_changed(folder: Path, kept: dict[str, Any]) -> None:
    before = (folder / digests.DIGESTS).read_text()
    (folder / f"{KEPT}.json").write_text("{}")
    assert digests.add_digests(folder) == 0 and (folder / digests.DIGESTS).read_text() == before
    (folder / "new.json").write_text("{}")
    assert [what for what in digests.wrong_digests(folder) if what[0] == "new.json"]
    assert digests.add_digests(folder) == 1
    (folder / "new.json").unlink()
    assert ("new.json", f"it is in {digests.DIGESTS}, and not there any more") in list(digests.wrong_digests(folder))


def test_the_digests_are_read_by_sha256sum(folder: Path) -> None:
    done = subprocess.run(["sha256sum", "--check", "--strict", digests.DIGESTS], cwd=folder, capture_output=True)
    assert done.returncode == 0, done.stderr


def test_a_line_that_is_no_digest_is_bad_input(folder: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (folder / digests.DIGESTS).write_text("abc  x.json\n")
    assert cli.main(["check", "--results", str(folder)]) == 2
    assert "a digest and a path" in capsys.readouterr().err


def test_what_is_kept_has_its_digests() -> None:
    """If this fails for new records: harness check --add"""
    assert list(digests.wrong_digests(RESULTS)) == []
    assert check._sealed(ROOT).findings == () and check._sealed(ROOT).checked > 8


def test_a_forecast_changed_by_hand_is_found(tmp_path: Path) -> None:
    path = tmp_path / check.SIMULATED / "elixir-figure6.json"
    path.parent.mkdir(parents=True)
    tree = json.loads((ROOT / check.SIMULATED / path.name).read_text())
    path.write_text(json.dumps(tree))
    assert check._sealed(tmp_path).findings == ()
    tree["cells"][0]["found"]["step_s"] *= 1.001
    path.write_text(json.dumps(tree))
    (found,) = check._sealed(tmp_path).findings
    assert found.where == f"{check.SIMULATED}/{path.name}" and "make it anew" in found.what
    path.write_text(json.dumps({"cells": []}))
    assert "has no content_sha256" in check._sealed(tmp_path).findings[0].what


def test_a_page_with_another_number_is_found(tmp_path: Path) -> None:
    for name in ("results.md", "claims.md"):
        shutil.copy(ROOT / "docs" / name, tmp_path)
    records, _ = store.read_all(RESULTS)
    there = check.KeptRecords(RESULTS, tuple(records), (), ())
    assert check._pages(there, tmp_path).findings == ()
    text = (tmp_path / "results.md").read_text()
    assert "358" in text
    (tmp_path / "results.md").write_text(text.replace("358", "359"))
    (found,) = check._pages(there, tmp_path).findings
    assert "harness tables writes it" in found.what


# ---- history


class Repository:
    """Of a test's own, with the claims and records that it commits."""

    def __init__(self, root: Path) -> None:
        self.root = root
        root.mkdir()
        self.git("init", "-q")

    def git(self, *arguments: str) -> str:
        names = ["-c", "user.name=a", "-c", "user.email=a@b", "-c", "commit.gpgsign=false"]
        done = subprocess.run(["git", "-C", str(self.root), *names, *arguments], capture_output=True, text=True)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def commit(self, **files: str) -> str:
        for name, text in files.items():
            path = self.root / {"claims": ancestry.CLAIMS, "forecasts": ancestry.FORECASTS}.get(name, name)
            path.parent.mkdir(parents=True, exist_ok=True)
            path.write_text(text)
        self.git("add", "-A")
        self.git("commit", "-q", "--allow-empty", "-m", "x")
        return self.git("rev-parse", "HEAD")

    @property
    def history(self) -> GitHistory:
        found = find(self.root)
        assert isinstance(found, GitHistory)
        return found


@pytest.fixture
def repository(tmp_path: Path) -> Repository:
    return Repository(tmp_path / "checkout")


def toml(claim: ClaimData) -> str:
    """As in claims.toml, as far as ancestry reads it."""
    (part,) = claim.parts
    numbers = "".join(f"{name} = {value}, " for name, value in (("low", part.low), ("high", part.high)) if value is not None)
    ours = "ours = { system = 'elixir' }"
    rows = f"[{{ what = '{part.what}', kind = '{part.kind}', figure = '{part.figure}', {numbers}{ours} }}]"
    return f"[[claims]]\nnumber = {claim.number}\nconfirms = '{claim.confirms}'\nrefutes = '{claim.refutes}'\nparts = {rows}\n"


def claim_of(record: Record, **fields: Any) -> ClaimData:
    """That a count of this record's own work decides."""
    spec, resolved = record.spec, record.resolved
    work = {name: getattr(spec, name) for name in cells.WORK} | {"option": spec.option, "set": spec.set, "hyper": spec.hyper}
    work |= {"batch_size": resolved.batch_size, "seq_len": resolved.seq_len}
    part = {"what": "a count", "kind": "count", "figure": "counters.x", "low": 1.0, "high": 2.0, "ours": work}
    given = {"number": 1, "paper": "elixir", "claim": "c", "place": "p", "printed": "n", "confirms": "yes", "refutes": "no"}
    return ClaimData.model_validate({**given, "parts": [part]} | fields)


def record_at(revision: str | None, kept: dict[str, Any]) -> Record:
    return Record.model_validate(changed(kept, lambda tree: tree["environment"]["code"].update(revision=revision)))


def judged_by(record: Record, claim: ClaimData, history: GitHistory) -> ancestry.ClaimAncestry:
    data = LedgerData(hardware=record.resolved.device_label or "", claims=(claim,))
    (found,) = ancestry.ancestries(data, [record], {}, history)
    assert found.sources == (record.run_id,)
    return found


def test_a_claim_written_before_its_run_is_proved(repository: Repository, kept: dict[str, Any]) -> None:
    claim = claim_of(record_at(None, kept))
    written = repository.commit(claims=toml(claim))
    later = repository.commit(other="x")
    for revision in (written, later):
        found = judged_by(record_at(revision, kept), claim, repository.history)
        assert (found.state, found.finding) == ("committed before", None)


@pytest.mark.parametrize("changes", [{"confirms": "more"}, {"refutes": "less"}])
def test_a_claim_written_or_changed_after_its_run_is_found(
    repository: Repository, kept: dict[str, Any], changes: dict[str, str]
) -> None:
    claim = claim_of(record_at(None, kept))
    before = repository.commit(other="x")
    written = repository.commit(claims=toml(claim))
    assert "mark it seen" in (judged_by(record_at(before, kept), claim, repository.history).finding or "")
    now = claim.model_copy(update=changes)
    repository.commit(claims=toml(now))
    assert "mark it seen" in (judged_by(record_at(written, kept), now, repository.history).finding or "")
    seen = now.model_copy(update={"seen": True})
    assert judged_by(record_at(written, kept), seen, repository.history).finding is None


def test_a_bound_that_was_moved_is_found(repository: Repository, kept: dict[str, Any]) -> None:
    claim = claim_of(record_at(None, kept))
    written = repository.commit(claims=toml(claim))
    moved = claim.model_copy(update={"parts": (PartData.model_validate(claim.parts[0].model_dump() | {"high": 3.0}),)})
    repository.commit(claims=toml(moved))
    assert judged_by(record_at(written, kept), claim, repository.history).finding is None
    assert judged_by(record_at(written, kept), moved, repository.history).finding is not None


def test_a_commit_of_no_ancestor_proves_nothing(repository: Repository, kept: dict[str, Any]) -> None:
    claim = claim_of(record_at(None, kept))
    repository.commit(claims=toml(claim))
    repository.git("checkout", "-q", "-b", "aside")
    aside = repository.commit(other="x")
    repository.git("checkout", "-q", "-")
    for revision in (aside, "0" * 40):
        assert judged_by(record_at(revision, kept), claim, repository.history).finding is not None


def test_a_record_without_a_commit_counts_from_when_it_was_kept(repository: Repository, kept: dict[str, Any]) -> None:
    record = record_at(None, kept)
    claim = claim_of(record)
    repository.commit(**{f"results/{record.run_id}.json": "{}", "claims": toml(claim)})
    assert judged_by(record, claim, repository.history).finding is not None  # both at once: nothing says which was first


def test_without_a_whole_history_it_is_said(repository: Repository, tmp_path: Path) -> None:
    repository.commit(other="x")
    repository.commit(other="y")
    (tmp_path / "bare").mkdir()
    none = find(tmp_path / "bare")
    assert isinstance(none, NoHistory) and "no git history here" in none.why
    inner = repository.root / "inner"
    inner.mkdir()
    assert isinstance(find(inner), NoHistory)
    shallow = tmp_path / "shallow"
    subprocess.run(["git", "clone", "-q", "--depth", "1", f"file://{repository.root}", str(shallow)], check=True)
    cut = find(shallow)
    assert isinstance(cut, NoHistory) and "fetch --unshallow" in cut.why
    there = check.KeptRecords(RESULTS, (), (), ())
    assert check._claims(there, cut).not_checked == check._unchanged(RESULTS, shallow, cut).not_checked == cut.why


def test_a_record_that_a_commit_changed_or_took_away_is_found(repository: Repository) -> None:
    gpu, trial = '{"resolved": {"device": "cuda"}}', '{"resolved": {"device": "cpu"}}'
    repository.commit(**{f"results/{name}.json": gpu for name in ("a", "b", "c")}, **{"results/d.json": trial})
    results = repository.root / "results"
    assert check._unchanged(results, repository.root, repository.history).findings == ()
    repository.commit(**{"results/a.json": gpu.replace("}}", ', "steps": 1}}')})
    for name in ("b", "d"):
        (results / f"{name}.json").unlink()
    repository.commit()
    found = check._unchanged(results, repository.root, repository.history).findings
    assert [(one.where, one.what.partition(": ")[2]) for one in found] == [
        ("results/a.json", "a record is never edited"),
        ("results/b.json", "what was measured stays"),
    ]


def test_a_record_changed_or_taken_away_is_found_before_that_is_committed(repository: Repository) -> None:
    repository.commit(**{f"results/{name}.json": f'{{"n": "{name}"}}' for name in ("a", "b", "c", "moved")})
    results = repository.root / "results"
    (results / "below").mkdir()
    (results / "moved.json").rename(results / "below" / "moved.json")
    (results / "a.json").write_text('{"n": "another"}')
    (results / "b.json").unlink()
    digests.add_digests(results)  # whoever changes a record can make its digest too
    found = check._unchanged(results, repository.root, repository.history).findings
    assert [one.where for one in found] == ["results/a.json", "results/b.json"]
    assert all("it is committed, and somebody" in one.what for one in found)


def test_a_record_that_a_merge_changed_or_left_out_is_found(repository: Repository) -> None:
    repository.commit(**{"results/a.json": "1"})
    repository.git("checkout", "-q", "-b", "aside")
    repository.commit(**{"results/b.json": "2", "results/c.json": "3"})
    repository.git("checkout", "-q", "-")
    repository.commit(other="x")
    repository.git("merge", "-q", "--no-commit", "aside")
    results = repository.root / "results"
    (results / "b.json").write_text("4")
    (results / "c.json").unlink()
    merge = repository.commit()
    found = check._unchanged(results, repository.root, repository.history).findings
    assert [(one.where, one.what.split()[1]) for one in found] == [(f"results/{n}.json", merge[:12]) for n in ("b", "c")]


@pytest.mark.skipif(isinstance(find(ROOT), NoHistory), reason="a checkout without its git history")
def test_claims_here_were_committed_before_what_they_are_judged_by() -> None:
    """If this fails: a claim was put otherwise after it was judged. It is `seen = true` then."""
    history = find(ROOT)
    assert isinstance(history, GitHistory)
    records, _ = store.read_all(RESULTS)
    found = list(ancestry.ancestries(read_claims(), records, read_forecasts().found, history))
    assert [f"claim {one.number}: {one.finding}" for one in found if one.finding] == []
    assert any(one.state == "committed before" for one in found)


def test_a_folder_without_pages_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    for docs, said in ((tmp_path / "none", "is no folder: name the one with"), (tmp_path, "No such file or directory")):
        assert cli.main(["check", "--results", str(tmp_path), "--docs", str(docs)]) == 2
        err = capsys.readouterr().err
        assert said in err and "Errno" not in err and err.count("\n") == 1


def test_a_folder_that_is_none_is_bad_input(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--results", str(tmp_path / "x")]) == 2
    assert "is no folder" in capsys.readouterr().err


@pytest.mark.long
def test_all_that_is_kept_holds(capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(["check", "--results", str(RESULTS), "--docs", str(ROOT / "docs"), "--json"]) == 0
    told = json.loads(capsys.readouterr().out)
    assert told["holds"] and [part["name"] for part in told["parts"]][:3] == ["records", "derived", "digests"]


@pytest.mark.long
def test_a_number_changed_in_a_copy_is_told(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    copy = tmp_path / "results"
    copy.mkdir()
    names = [path for path in sorted(RESULTS.glob("*.json")) if "resident-opt-1-3b" in path.name][:4]
    for path in [*names, RESULTS / digests.DIGESTS]:
        shutil.copy(path, copy)
    tree = json.loads((copy / names[-1].name).read_text())
    DERIVED["tokens_per_s"](tree)
    (copy / names[-1].name).write_text(json.dumps(tree))
    assert cli.main(["check", "--results", str(copy), "--docs", str(ROOT / "docs"), "--json"]) == 1
    parts = {part["name"]: part["findings"] for part in json.loads(capsys.readouterr().out)["parts"]}
    assert any(one["where"] == names[-1].stem and "tokens_per_s" in one["what"] for one in parts["derived"])
    assert any(one["where"].endswith(names[-1].name) and "is not what" in one["what"] for one in parts["digests"])
    assert parts["pages"]


def test_the_report_and_the_check_say_of_which_records_they_are(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Pages are of a folder itself, the check of the folders below it too: both say both counts."""
    (tmp_path / "pairs").mkdir()
    one, other = sorted(RESULTS.glob("*.json"))[:2]
    shutil.copy(one, tmp_path)
    shutil.copy(other, tmp_path / "pairs")
    assert write_report(ReportSpec(results=str(tmp_path), out=str(tmp_path / "page.html"))) == 0
    told, page = capsys.readouterr(), (tmp_path / "page.html").read_text()
    assert json.loads(told.out)["records"] == 1 and json.loads(told.out)["below"] == {"pairs": 1}
    assert "1 more are in folders below it (pairs 1)" in page and "(pairs 1)" in " ".join(told.err.split())
    (part,) = [part for part in check.checked(check.CheckSpec(results=str(tmp_path)), check.ROOT) if part.name == "records"]
    assert part.checked == 2 and "1 in " in part.of and "1 in folders below it" in part.of
