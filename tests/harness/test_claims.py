"""The claims' verdicts, by records that are made up, and the claims themselves."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from harness import claims, claims_forecast, store
from harness.claims import ClaimData, ForecastStep, LedgerData, PartData, PartOutcome, judge, read_claims, verdict_of
from harness.ledger import read_forecasts
from harness.record import Record
from harness.spec import BadInputError
from models import registry as models_registry
from systems import registry
from systems.planning import hardware
from tests.harness.conftest import make_record

ROOT = Path(__file__).resolve().parents[2]
WORK = {"seq_len": 16, "batch_size": 2, "model": "opt-tiny"}
SIZES = ("opt-125m", "opt-350m", "opt-1.3b", "opt-2.7b")
PROFILE = "a profile of {ranks}"


def part(kind: str, **changes: Any) -> PartData:
    given: dict[str, Any] = {"what": "a part", "kind": kind, "ours": {"system": "elixir"}}
    if kind in ("ratio", "same"):
        given |= {"reference": {"system": "resident"}, "low": 1.2, "high": 1.5}
    if kind == "capacity":
        given |= {"sizes": SIZES, "largest": "opt-2.7b"}
    if kind == "scaling":
        given |= {"ranks": (1, 4), "low": 1.0}
    return PartData.model_validate(given | changes)


def claim(*parts: PartData, **changes: Any) -> ClaimData:
    given = {"number": 1, "paper": "h3t", "confirms": "a", "refutes": "b", "claim": "c", "place": "d", "printed": "e"}
    return ClaimData.model_validate(given | {"work": WORK, "parts": parts} | changes)


def record(number: int, system: str = "elixir", rate: float = 1.0, **changes: Any) -> Record:
    spec = {"system": system, "model": "opt-tiny", **changes.pop("spec", {})}
    given = {
        "run_id": f"2026-{number:03d}",
        "spec": spec,
        "resolved": {"device_label": "a device", "batch_size": 2, "seq_len": 16, "clock": "a"},
        "metrics": {"tokens_per_s": rate, "relative_tflops": rate, "loss": [rate]},
        "energy": {"joules_per_sample": rate},
    }
    return make_record(**{**given, **changes})


def pair(ours: Sequence[float], theirs: Sequence[float]) -> list[Record]:
    found = [record(number, rate=rate) for number, rate in enumerate(ours)]
    return found + [record(100 + number, "resident", rate) for number, rate in enumerate(theirs)]


def found(one: PartData, records: Sequence[Record], forecasts: Mapping[str, ForecastStep] | None = None) -> PartOutcome:
    data = LedgerData(hardware="a device", claims=(claim(one, untestable="why"),))
    (finding,) = judge(data, data.claims[0], records, forecasts or {}).parts
    return finding


# ---- of an interval


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [
        (1.3, 1.4, "reproduced"),
        (1.1, 1.25, "reproduced"),
        (1.6, 1.7, "reproduced"),
        (1.05, 1.15, "direction only"),
        (0.9, 1.3, "undecided"),
        (0.9, 1.1, "not reproduced"),
        (0.5, 0.6, "not reproduced"),
    ],
)
def test_a_ratio_meets_its_range_or_lies_above_it(low: float, high: float, told: str) -> None:
    assert verdict_of(part("ratio"), low, high) == told


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [(0.95, 0.96, "reproduced"), (0.8, 0.85, "reproduced"), (1.1, 1.2, "reproduced"), (0.7, 0.8, "not reproduced")],
)
def test_a_ratio_below_one_has_no_direction(low: float, high: float, told: str) -> None:
    assert verdict_of(part("ratio", low=0.84, high=0.84), low, high) == told


@pytest.mark.parametrize(
    ("low", "high", "told"), [(0.9, 1.1, "undecided"), (0.8, 0.9, "not reproduced"), (1.01, 1.1, "reproduced")]
)
def test_no_more_than_better_needs_all_above_one(low: float, high: float, told: str) -> None:
    assert verdict_of(part("ratio", low=1.0, high=2.0), low, high) == told


@pytest.mark.parametrize(
    ("printed", "low", "high", "told"),
    [
        (0.976, 0.971, 0.99, "reproduced"),
        (0.976, 0.96, 0.99, "undecided"),
        (0.976, 0.9, 0.969, "not reproduced"),
        (0.976, 1.1, 1.2, "reproduced"),
        (0.9, 0.91, 0.92, "reproduced"),
    ],
)
def test_the_same_is_within_the_papers_gap_or_three_percent(printed: float, low: float, high: float, told: str) -> None:
    assert verdict_of(part("same", low=printed, high=1.0), low, high) == told


# ---- of records


def test_three_processes_a_side_give_a_verdict_with_the_runs_behind_it() -> None:
    finding = found(part("ratio"), pair([1.3, 1.301, 1.299], [1.0, 1.001, 0.999]))
    assert (finding.verdict, finding.wants, len(finding.runs)) == ("reproduced", [], 6)
    assert finding.low is not None and finding.high is not None and finding.value == pytest.approx(1.3)
    assert 1.2 < finding.low < 1.3 < finding.high < 1.4


@pytest.mark.parametrize(
    ("rates", "so_far"), [([1.3, 1.31], "better"), ([0.7], "worse"), ([0.9, 1.2], "neither better nor worse")]
)
def test_two_processes_give_a_direction_so_far(rates: list[float], so_far: str) -> None:
    finding = found(part("ratio"), pair(rates, [1.0, 1.0, 1.0]))
    assert (finding.verdict, finding.remark) == ("too few runs", f"so far: {so_far}")
    assert finding.wants == [f"elixir opt-tiny 2 x 16 tokens, bf16: {3 - len(rates)} more runs"]


def test_without_runs_it_is_open_and_says_which() -> None:
    finding = found(part("ratio"), pair([1.3, 1.3, 1.3], []))
    assert (finding.verdict, finding.value) == ("open", None)
    assert finding.wants == ["resident opt-tiny 2 x 16 tokens, bf16: 3 more runs"]


def test_runs_that_failed_are_named_and_are_no_evidence() -> None:
    failed = [record(7, "resident", status="oom", metrics={})]
    finding = found(part("ratio"), [*pair([1.3, 1.3, 1.3], []), *failed])
    assert (finding.verdict, finding.remark) == ("open", "resident opt-tiny 2 x 16 tokens, bf16: oom")


@pytest.mark.parametrize(
    "changes",
    [
        {"resolved": {"device_label": "another", "batch_size": 2, "seq_len": 16}},
        {"spec": {"dtype": "fp16"}},
        {"spec": {"clip": 1.0}},
    ],
)
def test_another_setting_is_not_passed_off_as_the_claims(changes: dict[str, Any]) -> None:
    others = [record(number, rate=1.3, **changes) for number in range(3)]
    assert found(part("ratio"), [*others, *pair([], [1.0, 1.0, 1.0])]).runs == ["2026-100", "2026-101", "2026-102"]


def test_runs_that_are_not_alike_give_no_number() -> None:
    resolved = {"device_label": "a device", "batch_size": 2, "seq_len": 16, "clock": "a"}
    ours = [record(number, rate=1.3, resolved=resolved | {"timed_steps": 3}) for number in range(3)]
    theirs = [record(9 + number, "resident", resolved=resolved | {"timed_steps": 4}) for number in range(3)]
    finding = found(part("ratio"), [*ours, *theirs])
    assert (finding.verdict, finding.value) == ("open", None)
    assert finding.remark == "the runs are not alike: timed steps: 3, the reference has 4"


def test_of_joules_less_is_better() -> None:
    records = pair([0.5, 0.5, 0.5], [1.0, 1.0, 1.0])
    assert found(part("ratio", figure="joules_per_sample"), records).verdict == "reproduced"
    assert found(part("ratio"), records).verdict == "not reproduced"
    without = [one.model_copy(update={"energy": make_record().energy}) for one in records]
    finding = found(part("ratio", figure="joules_per_sample"), without)
    assert (finding.verdict, finding.remark) == ("open", "a run without joules_per_sample")


def test_sides_may_differ_in_what_the_claim_is_about_and_in_nothing_else() -> None:
    smaller = {"device_memory": "1GiB"}
    ours = [record(number, rate=1.3, spec=smaller) for number in range(3)]
    one = part("ratio", ours={"system": "elixir", **smaller})
    assert found(one, [*ours, *pair([], [1.0, 1.0, 1.0])]).verdict == "reproduced"


@pytest.mark.parametrize(("rate", "told"), [(4.1, "reproduced"), (2.0, "direction only"), (0.9, "not reproduced")])
def test_scaling_is_an_exponent(rate: float, told: str) -> None:
    one = [record(number) for number in range(3)]
    four = [record(10 + number, rate=rate, spec={"ranks": 4}) for number in range(3)]
    finding = found(part("scaling"), [*one, *four])
    assert finding.verdict == told
    assert finding.value is not None and 4**finding.value == pytest.approx(rate)


def test_scaling_may_have_another_model_on_each_number_of_devices() -> None:
    one = part("scaling", sizes=("opt-125m", "opt-1.3b"), profile=PROFILE)
    data = LedgerData(hardware="a device", claims=(claim(one),))
    cells = [cell for _, cell in claims.cells_of(data, data.claims[0], one)]
    assert [(cell.spec.model, cell.spec.ranks) for cell in cells] == [("opt-125m", 1), ("opt-1.3b", 4)]
    steps = [ForecastStep(rate, 1.0, None) for rate in (1.0, 4.1)]
    names = [claims.cell_name(cell, PROFILE) for cell in cells]
    assert found(one, [], dict(zip(names, steps, strict=True))).verdict == "reproduced"


def test_only_runs_on_a_machine_that_both_were_on_are_compared() -> None:
    def on(boot_id: str, records: list[Record]) -> list[Record]:
        there = {"hardware": {"boot_id": boot_id, "device_uuid": "a"}}
        return [record.model_copy(update={"environment": make_record(environment=there).environment}) for record in records]

    elsewhere = [record(200 + number, "resident", 0.1) for number in range(3)]
    records = [*on("a", pair([1.3, 1.3, 1.3], [1.0, 1.0, 1.0])), *on("b", elsewhere)]
    assert found(part("ratio"), records).value == pytest.approx(1.3)
    apart = found(part("ratio"), [*on("a", pair([1.3, 1.3, 1.3], [])), *on("b", elsewhere)])
    assert apart.verdict == "open" and apart.remark is not None and "one that the reference did not run on" in apart.remark


# ---- of sizes and counts


def ladder(system: str, **endings: str) -> list[Record]:
    """Endings of the sizes, by their place."""
    return [
        record(
            int(place[1:]) + (50 if system == "resident" else 0), system, status=status, spec={"model": SIZES[int(place[1:])]}
        )
        for place, status in endings.items()
    ]


def test_the_largest_is_at_most_a_step_below_the_papers() -> None:
    assert found(part("capacity"), ladder("elixir", _2="ok", _3="oom")).verdict == "reproduced"
    assert found(part("capacity"), ladder("elixir", _3="ok")).verdict == "reproduced"
    refused = record(9, status="refused", reason={"message": "no room", "tier": "host"}, spec={"model": SIZES[2]})
    assert found(part("capacity"), [*ladder("elixir", _1="ok"), refused]).verdict == "not reproduced"
    assert found(part("capacity"), ladder("elixir", _1="ok", _2="refused")).verdict == "open", "for another reason than memory"
    assert found(part("capacity"), ladder("elixir", _0="oom")).verdict == "not reproduced"


def test_larger_than_the_reference_is_a_direction() -> None:
    both = part("capacity", reference={"system": "resident"})
    ours = ladder("elixir", _1="ok", _2="oom")
    assert found(both, [*ours, *ladder("resident", _0="ok", _1="oom")]).verdict == "direction only"
    assert found(both, [*ours, *ladder("resident", _1="ok", _2="oom")]).verdict == "not reproduced"
    assert found(both, ladder("elixir", _3="ok") + ladder("resident", _2="ok", _3="oom")).verdict == "reproduced"
    assert found(both, ladder("elixir", _2="ok", _3="oom") + ladder("resident", _3="ok")).verdict == "not reproduced"
    assert found(both, ladder("elixir", _3="ok") + ladder("resident", _3="ok")).verdict == "undecided"
    finding = found(both, ours)
    assert (finding.verdict, finding.wants) == ("open", ["resident opt-125m 2 x 16 tokens, bf16: whether it trains"])


@pytest.mark.parametrize("ending", ["ok", "failed"])
def test_the_next_size_has_to_be_tried(ending: str) -> None:
    """A run that broke tells nothing of its size."""
    finding = found(part("capacity"), ladder("elixir", _1="ok", _2=ending, **({"_3": "failed"} if ending == "ok" else {})))
    assert finding.verdict == "open"
    assert finding.wants == [f"elixir {SIZES[3 if ending == 'ok' else 2]} 2 x 16 tokens, bf16: whether it trains"]


@pytest.mark.parametrize(
    ("low", "high", "told"),
    [(14, 14, "reproduced"), (None, 15, "reproduced"), (15, 15, "not reproduced"), (None, 13, "not reproduced")],
)
def test_a_count_is_equal_or_within_its_bounds(low: float | None, high: float, told: str) -> None:
    one = part("count", figure="strategy.bytes", low=low, high=high)
    finding = found(one, [record(1, strategy={"bytes": 14.0})])
    assert (finding.verdict, finding.value, finding.runs) == (told, 14.0, ["2026-001"])


def test_counts_that_differ_or_are_not_there_are_open() -> None:
    one = part("count", figure="strategy.bytes", low=14, high=14)
    differing = found(one, [record(number, strategy={"bytes": 13.0 + number}) for number in range(2)])
    assert (differing.verdict, differing.remark) == ("open", "strategy.bytes differs between runs")
    assert found(one, [record(1, strategy={"bytes": "14"})]).wants == ["elixir opt-tiny 2 x 16 tokens, bf16: a run"]


# ---- of forecasts


def steps(ours: float | None, theirs: float | None) -> dict[str, ForecastStep]:
    names = [f"{system} opt-tiny 2 x 16 tokens, bf16, on a profile of 1" for system in ("elixir", "resident")]
    return {
        name: ForecastStep(rate, rate, None if rate else "no room") for name, rate in zip(names, (ours, theirs), strict=True)
    }


@pytest.mark.parametrize(
    ("rate", "told"), [(1.17, "reproduced"), (1.16, "direction only"), (1.02, "not reproduced"), (1.5, "reproduced")]
)
def test_a_forecast_has_three_percent_of_error_and_is_called_simulated(rate: float, told: str) -> None:
    finding = found(part("ratio", profile=PROFILE), [], steps(rate, 1.0))
    assert (finding.verdict, finding.simulated, finding.runs) == (told, True, [])
    assert [finding.low, finding.high] == pytest.approx([0.97 * rate, 1.03 * rate])


def test_runs_are_no_forecasts_and_what_does_not_fit_has_no_rate() -> None:
    records = pair([1.3, 1.3, 1.3], [1.0, 1.0, 1.0])
    assert found(part("ratio", profile=PROFILE), records).wants == [f"{name}: a forecast" for name in steps(1.0, 1.0)]
    finding = found(part("ratio", profile=PROFILE), [], steps(1.0, None))
    assert (finding.verdict, finding.remark) == ("open", "it does not fit: resident opt-tiny 2 x 16 tokens, bf16: no room")


# ---- of claims


def test_the_least_of_the_deciding_parts_is_the_claims() -> None:
    good, bad = part("ratio"), part("ratio", ours={"system": "h3t"})
    records = [*pair([1.3] * 3, [1.0] * 3), *(record(200 + number, "h3t", 0.5) for number in range(3))]

    def told(*parts: PartData, **changes: Any) -> str:
        data = LedgerData(hardware="a device", claims=(claim(*parts, **changes),))
        return judge(data, data.claims[0], records, {}).verdict

    assert told(good) == "reproduced"
    assert told(good, bad) == "not reproduced"
    assert told(good, bad.model_copy(update={"beside": "another"})) == "reproduced"
    assert told(good.model_copy(update={"beside": "another"}), untestable="no data") == "not testable here"
    assert told(good, waits="a part that is not built") == "open"


@pytest.mark.parametrize(
    ("kind", "changes", "why"),
    [
        ("ratio", {"reference": None}, "ratio needs reference"),
        ("ratio", {"figure": "speed"}, "figure is speed: use one of tokens_per_s"),
        ("ratio", {"figure": "joules_per_sample", "profile": "a"}, "a forecast has no joules_per_sample"),
        ("capacity", {"largest": "opt-66b"}, "largest is none of sizes"),
        ("scaling", {"ranks": (1,)}, "scaling needs two ranks"),
        ("scaling", {"sizes": ("opt-125m",)}, "as many sizes as ranks"),
        ("count", {"figure": "a"}, "count needs high"),
    ],
)
def test_a_part_that_cannot_decide_is_refused(kind: str, changes: dict[str, Any], why: str) -> None:
    with pytest.raises(ValueError, match=why):
        part(kind, **changes)


def test_a_claim_that_nothing_decides_says_why() -> None:
    with pytest.raises(ValueError, match="claim 1: no part decides it"):
        claim(part("ratio", beside="another"))


@pytest.mark.parametrize(
    ("text", "why"), [("hardware = 3", "hardware"), ("=", "claims.toml"), ('hardware = "a"\nclaims = [{}]', "claims.0.number")]
)
def test_a_file_that_is_none_is_one_line(text: str, why: str, tmp_path: Path) -> None:
    (tmp_path / "claims.toml").write_text(text)
    with pytest.raises(ValueError, match=why) as told:
        read_claims(tmp_path / "claims.toml")
    assert "\n" not in str(told.value)


# ---- the claims that are kept


def test_all_claims_are_there_and_name_what_there_is() -> None:
    data = read_claims()
    assert [one.number for one in data.claims] == list(range(1, 33))
    systems = registry.find()
    for one in data.claims:
        for each in one.parts:
            for _, cell in claims.cells_of(data, one, each):
                assert cell.spec.system in systems
                models_registry.resolve(str(cell.spec.model))
                if each.profile is not None:
                    hardware.load(each.profile.format(ranks=cell.spec.ranks))


def test_own_rules_decide_but_for_what_is_beside() -> None:
    """A claim is of the system that its paper describes: variant=paper, or one of the paper's own ablations."""
    data = read_claims()
    papers = [
        (one.number, cell.spec.option)
        for one in data.claims
        for each in one.parts
        for side, cell in claims.cells_of(data, one, each)
        if not each.beside and side == "ours" and cell.spec.system == one.paper
    ]
    assert papers and all("variant=paper" in option for _, option in papers)


def test_claims_of_which_runs_were_there_before_say_so() -> None:
    """Records of 30 November 2026 and before."""
    data = read_claims()
    records = [one for one in store.read_all(ROOT / "results")[0] if one.run_id < "20261130T192"]
    known = {one.number for one in (judge(data, each, records, {}) for each in data.claims) if any(p.value for p in one.parts)}
    assert known and known <= {one.number for one in data.claims if one.seen}


# ---- forecasts that are made


def test_what_is_lacking_is_forecast_once_and_kept(tmp_path: Path) -> None:
    one = part("ratio", profile="h100-80g-x{ranks}")
    data = LedgerData(hardware="a device", work={"dtype": "fp32"}, claims=(claim(one),))
    path, known = tmp_path / "kept.json", dict[str, ForecastStep]()
    claims_forecast.make(data, data.claims, known, path)
    assert set(known) == {f"{s} opt-tiny 2 x 16 tokens, fp32, on h100-80g-x1" for s in ("elixir", "resident")}
    assert read_forecasts(path).found == known
    assert all(step.tokens_per_s and step.relative_tflops for step in known.values())
    assert not list(claims_forecast.lacking(data, data.claims, known))
    assert judge(data, data.claims[0], [], known).simulated


def test_what_no_machine_could_do_is_no_want_of_memory(tmp_path: Path) -> None:
    """Else it would count against a claim of size."""
    size = {"sizes": ["opt-tiny"], "largest": "opt-tiny", "profile": "h100-80g-x1"}
    one = part("capacity", ours={"system": "elixir", "option": ["nonfinite=stop"]}, **size)
    data = LedgerData(hardware="a device", work={"dtype": "fp16"}, claims=(claim(one),))
    with pytest.raises(BadInputError, match="claims.toml: elixir .* fp16's loss scaling"):
        claims_forecast.make(data, data.claims, {}, tmp_path / "kept.json")


def test_a_kept_forecast_is_of_a_cell() -> None:
    data = read_claims()
    asked = {
        claims.cell_name(cell, each.profile)
        for one in data.claims
        for each in one.parts
        for _, cell in claims.cells_of(data, one, each)
    }
    assert set(read_forecasts().found) <= asked
