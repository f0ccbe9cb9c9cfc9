"""The claims of the four papers, and what runs kept here say of each, by rules that were written down before the runs.

The claims are in claims.toml. A claim has parts; a part names the runs that decide it and the numbers that the paper prints.

Note [Verdicts on claims]
    ratio: our figure over the reference's. Reproduced where the 95 % interval (harness/stats.py) meets the paper's range or
    lies above it, and, where that range begins at 1 or above, is above 1 as a whole; direction only where it is above 1 and
    below the range. An interval that has both 1 and a part of the range in it decides nothing: undecided.
    same: no more behind the reference than the paper is, or than SAME_AT_LEAST; better is no contradiction.
    capacity: the largest of a ladder of sizes that trains, the next one having been tried, is at most one step below the
    paper's, and larger than the reference's largest, if there is one. Direction only where it is larger than that alone;
    where both reach the ladder's end: undecided.
    scaling: the exponent of the rate over the number of devices, 1 where twice as many do twice the work. Direction only
    where it is above 0.
    count: a number that a run counts and that no clock has part in: equal, or within the bounds that the paper names.
    Of ratio, same and scaling less than ENOUGH_PROCESSES a side give no verdict: too few runs. What is simulated has
    SIMULATED of error on both sides, and is called simulated. The verdict on a claim is the least of its parts'. A part
    whose work is not the claim's says so in `beside`, and has no say in the verdict.
"""

from __future__ import annotations

import math
import tomllib
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal, Self, get_args

from pydantic import BaseModel, ConfigDict, Field, ValidationError, model_validator

from harness import comparison
from harness.cells import TEXT_LIMIT, TableCell, made_cell, replicates
from harness.likeness import of_one_machine
from harness.record import Part, Record
from harness.stats import ENOUGH_PROCESSES, compare_rates
from systems.machine.reading import read_text
from systems.messages import invalid_value, one_line
from systems.sizes import format_size

FILE = Path(__file__).with_name("claims.toml")
SAME_AT_LEAST = 0.03
SIMULATED = 0.03
Kind = Literal["ratio", "same", "capacity", "scaling", "count"]
Paper = Literal["angel-ptm", "patrickstar", "elixir", "h3t"]
Verdict = Literal["not reproduced", "undecided", "open", "too few runs", "direction only", "reproduced", "not testable here"]
_ORDER: tuple[Verdict, ...] = get_args(Verdict)
# Facts in which two sides may differ where their flags do.
_INTENDED: Mapping[str, frozenset[str]] = {
    "device_memory": frozenset({"device memory asked for", "device memory budget in force"}),
    "model": frozenset({"model", "parameters"}),
    "ranks": frozenset({"ranks", "global batch in samples"}),
    "batch_size": frozenset({"global batch in samples", "batch size per rank and micro-batch"}),
}
_MORE_IS_BETTER: Mapping[str, Callable[[Record], float | None]] = {
    "tokens_per_s": lambda r: r.metrics.tokens_per_s,
    "relative_tflops": lambda r: r.metrics.relative_tflops,
}
_LESS_IS_BETTER: Mapping[str, Callable[[Record], float | None]] = {
    "joules_per_sample": lambda r: r.energy.joules_per_sample,
    "device_peak_bytes": lambda r: r.memory.device_peak_bytes,
    "moved_bytes": lambda r: _sum(r.traffic.h2d_bytes, r.traffic.d2h_bytes),
    "last_loss": lambda r: r.metrics.loss[-1] if r.metrics.loss else None,
}


class _ClaimsData(BaseModel):
    model_config = ConfigDict(frozen=True, extra="forbid")


class PartData(_ClaimsData):
    """ours, reference: flags of a run each, over those of the claim. figure: of ratio and same one of those that are known, of
    count the dotted name of a record's field. low, high: what the paper prints, the same twice where it is one number; a count
    without low has no lower bound. sizes: models, smallest first; largest: the one that the paper trains. ranks: of scaling,
    whose sizes are the model on each, where there are two.
    profile: of hardware, where forecasts decide, with {ranks} in the place of the number of ranks. beside: how the work
    differs from the claim's, where it does.
    """

    what: str
    kind: Kind
    ours: dict[str, Any]
    reference: dict[str, Any] | None = None
    figure: str = "tokens_per_s"
    low: float | None = None
    high: float | None = None
    sizes: tuple[str, ...] = ()
    largest: str | None = None
    ranks: tuple[int, ...] = ()
    profile: str | None = None
    beside: str | None = None

    @model_validator(mode="after")
    def _complete(self) -> Self:
        known = {**_MORE_IS_BETTER, **_LESS_IS_BETTER}
        if self.kind in ("ratio", "same") and (self.reference is None or self.low is None or self.high is None):
            raise ValueError(f"{self.what}: {self.kind} needs reference, low and high")
        if self.kind in ("ratio", "same") and self.figure not in known:
            raise ValueError(f"{self.what}: figure is {self.figure}: use one of {', '.join(known)}")
        if self.kind == "capacity" and self.largest not in self.sizes:
            raise ValueError(f"{self.what}: largest is none of sizes")
        if self.kind == "scaling" and (len(self.ranks) != 2 or self.low is None):
            raise ValueError(f"{self.what}: scaling needs two ranks and low")
        if self.kind == "scaling" and self.sizes and len(self.sizes) != len(self.ranks):
            raise ValueError(f"{self.what}: scaling needs as many sizes as ranks, or none where the model is the same")
        if self.profile is not None and self.figure not in _MORE_IS_BETTER:
            raise ValueError(f"{self.what}: a forecast has no {self.figure}: use one of {', '.join(_MORE_IS_BETTER)}")
        if self.kind == "count" and (self.high is None or self.profile is not None):
            raise ValueError(f"{self.what}: count needs high, and no profile")
        return self


class ClaimData(_ClaimsData):
    """place: in the paper. printed: its words and numbers. seen: records that decide a part of it were there when this was
    written. untestable: why it cannot be decided here. waits: what has to be built first. Each of the two may be of a part of
    the claim, beside parts that decide the rest.
    """

    number: int = Field(ge=1)
    paper: Paper
    claim: str
    place: str
    printed: str
    seen: bool = False
    confirms: str
    refutes: str
    untestable: str | None = None
    waits: str | None = None
    work: dict[str, Any] = {}
    parts: tuple[PartData, ...] = ()

    @model_validator(mode="after")
    def _decidable(self) -> Self:
        if not (self.untestable or self.waits) and all(part.beside for part in self.parts):
            raise ValueError(f"claim {self.number}: no part decides it: say in untestable why not, or in waits what is lacking")
        return self


class LedgerData(_ClaimsData):
    """hardware: device label of the records that count. work: flags of all cells."""

    hardware: str
    work: dict[str, Any] = {}
    claims: tuple[ClaimData, ...]


class PartOutcome(Part):
    """What is known of a part. value: with the interval where there is one. wants: cells that lack runs."""

    what: str
    kind: Kind
    verdict: Verdict
    simulated: bool = False
    beside: str | None = None
    value: float | None = None
    low: float | None = None
    high: float | None = None
    runs: list[str] = Field([], description="of all cells of the part, failed ones included")
    wants: list[str] = Field([], description="what lacks runs, forecasts or sizes tried")
    remark: str | None = None


class Judged(Part):
    """A claim with its verdict, and the part or parts that it is of."""

    number: int
    paper: Paper
    claim: str
    place: str
    printed: str
    seen: bool
    confirms: str
    refutes: str
    untestable: str | None
    waits: str | None
    verdict: Verdict
    simulated: bool
    parts: list[PartOutcome]


@dataclass(frozen=True)
class ForecastStep:
    """None where it does not fit, and why_not says why. The two of a device are told apart as in a record's metrics."""

    tokens_per_s: float | None
    relative_tflops: float | None
    why_not: str | None = None


Forecasts = Mapping[str, ForecastStep]


def read_claims(path: Path = FILE) -> LedgerData:
    """Raises ValueError, one line that names the file."""
    try:
        data = LedgerData.model_validate(tomllib.loads(read_text(path, TEXT_LIMIT)))
        for claim in data.claims:
            for part in claim.parts:
                list(cells_of(data, claim, part))
    except ValidationError as error:
        where = ".".join(map(str, error.errors(include_url=False)[0]["loc"]))
        raise ValueError(f"{path.name}: {invalid_value(error, lambda *_: where)}") from None
    except (OSError, ValueError, RecursionError) as error:
        raise ValueError(f"{path.name}: {one_line(str(error))}") from None
    return data


def cells_of(data: LedgerData, claim: ClaimData, part: PartData) -> Iterator[tuple[str, TableCell]]:
    """All cells of a part, by whose they are: ours or reference; those of a ladder smallest first, of scaling fewest first."""
    for side, given in (("ours", part.ours), ("reference", part.reference)):
        if given is None:
            continue
        work = data.work | claim.work | given
        steps: list[dict[str, Any]] = [{}]
        if part.kind == "capacity":
            steps = [{"model": model} for model in part.sizes]
        elif part.kind == "scaling":
            steps = [{"ranks": ranks} for ranks in part.ranks]
            steps = [step | {"model": model} for step, model in zip(steps, part.sizes, strict=True)] if part.sizes else steps
        for step in steps:
            yield side, made_cell({**work, **step}, ENOUGH_PROCESSES)


def cell_name(cell: TableCell, profile: str | None = None) -> str:
    """elixir (variant=paper) ps-4b 16 x 1024 tokens, 20GiB: also what its forecast is kept under."""
    spec = cell.spec
    changes = ",".join([*spec.option, *spec.set])
    system = f"{spec.system} ({changes})" if changes else spec.system
    marks: list[str] = [f"{system} {spec.model} {spec.batch_size} x {spec.seq_len} tokens", spec.dtype]
    marks += [] if spec.recompute == "none" else [f"recompute {spec.recompute}"]
    marks += [] if spec.ranks == 1 else [f"{spec.ranks} ranks"]
    marks += [] if spec.device_memory is None else [format_size(spec.device_memory)]
    marks += [] if spec.disk is None else ["a disk"]
    marks += [] if spec.accumulate == 1 else [f"accumulate {spec.accumulate}"]
    return ", ".join([*marks, *([] if profile is None else [f"on {profile.format(ranks=spec.ranks)}"])])


def judge(data: LedgerData, claim: ClaimData, records: Sequence[Record], forecasts: Forecasts) -> Judged:
    found = [_outcome(data, claim, part, records, forecasts) for part in claim.parts]
    deciding = [one for one in found if not one.beside]
    verdicts = [one.verdict for one in deciding] + (["open"] if claim.waits else [])
    verdict = min(verdicts, key=_ORDER.index, default="not testable here")
    simulated = any(one.simulated for one in deciding if one.verdict == verdict)
    told = claim.model_dump(exclude={"work", "parts"})
    return Judged(**told, verdict=verdict, simulated=simulated, parts=found)


def _outcome(
    data: LedgerData, claim: ClaimData, part: PartData, records: Sequence[Record], forecasts: Forecasts
) -> PartOutcome:
    cells = list(cells_of(data, claim, part))
    empty = PartOutcome(what=part.what, kind=part.kind, verdict="open", beside=part.beside, simulated=part.profile is not None)
    if part.profile is not None:
        return _simulated(empty, part, cells, forecasts)
    runs = [(side, cell, replicates(records, cell, data.hardware)) for side, cell in cells]
    empty = empty.model_copy(update={"runs": [record.run_id for _, _, each in runs for record in each]})
    if part.kind == "capacity":
        return _capacity(empty, part, [(side, cell, trains(each)) for side, cell, each in runs])
    if part.kind == "count":
        return _count(empty, part, runs[0][1], runs[0][2])
    return _compared(empty, part, runs)


def trains(runs: Sequence[Record]) -> bool | None:
    """Whether the work fits: None where nobody tried, or it ended for want of something else than memory."""
    if any(record.status == "ok" for record in runs):
        return True
    short = any(r.status == "oom" or (r.status == "refused" and r.reason is not None and r.reason.tier) for r in runs)
    return False if short else None


def _compared(empty: PartOutcome, part: PartData, runs: Sequence[tuple[str, TableCell, list[Record]]]) -> PartOutcome:
    """ratio, same and scaling, of two cells."""
    good = [[record for record in each if record.status == "ok"] for _, _, each in runs]
    order = (1, 0) if part.kind == "scaling" else (0, 1)  # of scaling the fewest devices are what the others are set against
    (ours, theirs), (cell, other) = ([good[i] for i in order], [runs[i][1] for i in order])
    wants = [
        f"{cell_name(each)}: {ENOUGH_PROCESSES - len(there)} more runs"
        for (_, each, _), there in zip(runs, good, strict=True)
        if len(there) < ENOUGH_PROCESSES
    ]
    open_ = empty.model_copy(update={"wants": wants})
    ended = sorted({f"{cell_name(c)}: {r.status}" for (_, c, each), ok in zip(runs, good, strict=True) if not ok for r in each})
    if not ours or not theirs:
        return open_.model_copy(update={"remark": "; ".join(ended) or None})
    asked = [name for name in _INTENDED if getattr(cell.spec, name) != getattr(other.spec, name)]
    intended = {fact for name in asked for fact in _INTENDED[name]}
    row = comparison.compare({"reference": theirs, "ours": ours}, intended=intended).rows[1]
    if row.refused:
        unlike = "; ".join(str(difference) for difference in row.refused)
        return open_.model_copy(update={"remark": f"the runs are not alike: {unlike}"})
    read = {**_MORE_IS_BETTER, **_LESS_IS_BETTER}[part.figure]
    sides = [[read(record) for record in each] for each in of_one_machine(ours, theirs)]
    if part.figure in _LESS_IS_BETTER:
        sides.reverse()
    numbers = [[value for value in side if value is not None] for side in sides]
    ratio = compare_rates(*numbers)
    if ratio is None or [len(side) for side in sides] != [len(side) for side in numbers]:
        return open_.model_copy(update={"remark": f"a run without {part.figure}"})
    found = open_.model_copy(update=_as_scaling(part, ratio.value, ratio.low, ratio.high))
    if ratio.verdict == "too few runs":
        return found.model_copy(update={"verdict": "too few runs", "remark": _so_far(part, found)})
    return found.model_copy(update={"verdict": verdict_of(part, found.low, found.high)})


def _as_scaling(part: PartData, value: float, low: float | None, high: float | None) -> dict[str, float | None]:
    """The three as they are shown: of scaling exponents."""
    if part.kind != "scaling":
        return {"value": value, "low": low, "high": high}
    base = math.log(part.ranks[1] / part.ranks[0])
    shown = {"value": value, "low": low, "high": high}
    return {name: None if each is None else math.log(each) / base for name, each in shown.items()}


def _so_far(part: PartData, found: PartOutcome) -> str:
    """The direction of too few runs."""
    even = 0.0 if part.kind == "scaling" else 1.0
    low, high = (found.value if bound is None else bound for bound in (found.low, found.high))
    assert low is not None and high is not None
    return "so far: " + ("better" if low > even else "worse" if high < even else "neither better nor worse")


def verdict_of(part: PartData, low: float | None, high: float | None) -> Verdict:
    """Of an interval of ratio, same or scaling: Note [Verdicts on claims]."""
    assert low is not None and high is not None and part.low is not None
    if part.kind == "same":
        least = 1 - max(1 - part.low, SAME_AT_LEAST)
        return "reproduced" if low >= least else "not reproduced" if high < least else "undecided"
    even = 0.0 if part.kind == "scaling" else 1.0
    meets = high >= part.low
    if part.low < even:
        return "reproduced" if meets else "not reproduced"
    if low > even:
        return "reproduced" if meets else "direction only"
    return "undecided" if meets else "not reproduced"


def _capacity(empty: PartOutcome, part: PartData, tried: Sequence[tuple[str, TableCell, bool | None]]) -> PartOutcome:
    """tried: a rung each, and whether it trains."""
    wants: list[str] = []
    reached: dict[str, int] = {}
    for side in dict.fromkeys(side for side, _, _ in tried):
        rungs = [(cell, trains) for whose, cell, trains in tried if whose == side]
        most = max((i for i, (_, trains) in enumerate(rungs) if trains), default=-1)
        beyond = next((i for i in range(most + 1, len(rungs)) if rungs[i][1] is False), None)
        reached[side] = most
        if beyond != most + 1 and most + 1 < len(rungs):
            wants.append(f"{cell_name(rungs[most + 1][0])}: whether it trains")
    printed = part.sizes.index(part.largest or "")
    ours = reached["ours"]
    remark = ", ".join(f"{side}: {part.sizes[most] if most >= 0 else 'none'} trains" for side, most in reached.items())
    found = empty.model_copy(update={"wants": wants, "remark": remark if any(t is not None for _, _, t in tried) else None})
    if wants:
        return found
    near, verdict = ours >= printed - 1, "not reproduced"
    if "reference" not in reached:
        verdict = "reproduced" if near else "not reproduced"
    elif ours > reached["reference"]:
        verdict = "reproduced" if near else "direction only"
    elif ours == len(part.sizes) - 1:
        verdict = "undecided"  # the ladder ends before either does
    return found.model_copy(update={"verdict": verdict})


def _count(empty: PartOutcome, part: PartData, cell: TableCell, runs: Sequence[Record]) -> PartOutcome:
    """One run is enough: it is no matter of time. Runs that disagree are no count."""
    values = {value for record in runs if record.status == "ok" and (value := _field(record, part.figure)) is not None}
    if len(values) != 1:
        wants = [] if values else [f"{cell_name(cell)}: a run"]
        remark = f"{part.figure} differs between runs" if values else None
        return empty.model_copy(update={"wants": wants, "remark": remark})
    (value,) = values
    assert part.high is not None
    below = value <= part.high or math.isclose(value, part.high)
    above = part.low is None or value >= part.low or math.isclose(value, part.low)
    return empty.model_copy(update={"verdict": "reproduced" if below and above else "not reproduced", "value": value})


def _field(record: Record, dotted: str) -> float | None:
    found: Any = record.model_dump(mode="json")
    for name in dotted.split("."):
        found = found.get(name) if isinstance(found, Mapping) else None
    return float(found) if type(found) in (int, float) else None


def _simulated(empty: PartOutcome, part: PartData, cells: Sequence[tuple[str, TableCell]], forecasts: Forecasts) -> PartOutcome:
    known = [(side, cell, forecasts.get(cell_name(cell, part.profile))) for side, cell in cells]
    wants = [f"{cell_name(cell, part.profile)}: a forecast" for _, cell, step in known if step is None]
    if part.kind == "capacity":
        return _capacity(empty, part, [(side, cell, None if f is None else f.why_not is None) for side, cell, f in known])
    if wants:
        return empty.model_copy(update={"wants": wants})
    rates = [getattr(step, part.figure) for _, _, step in known]
    if rates[0] is None or rates[1] is None:
        why = next(f"{cell_name(cell)}: {step.why_not}" for _, cell, step in known if step and step.why_not)
        return empty.model_copy(update={"remark": f"it does not fit: {one_line(why)}"})
    value = rates[1] / rates[0] if part.kind == "scaling" else rates[0] / rates[1]
    shown = _as_scaling(part, value, value * (1 - SIMULATED), value * (1 + SIMULATED))
    found = empty.model_copy(update=shown)
    return found.model_copy(update={"verdict": verdict_of(part, found.low, found.high)})


def _sum(*values: float | None) -> float | None:
    return None if None in values else sum(value for value in values if value is not None)
