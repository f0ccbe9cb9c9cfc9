"""The page's first screen: questions of somebody who has to choose, answered by what the sections below it hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from harness.claims import Judged
from harness.ledger import counted, verdict
from harness.report.leaders import Leader
from harness.report.losses import Course, OwnSpread
from harness.results_page import ratio_text
from harness.stats import ENOUGH_PROCESSES

WIDEST = 3  # settings of most systems that are told of before they are decided
DIGITS = 4  # of a ratio
DECIDED = ("faster", "no difference")
Point = tuple[str, tuple[str, ...]]  # a sentence, and the runs behind it


@dataclass(frozen=True)
class Answer:
    """points: below the text."""

    question: str
    text: str
    points: tuple[Point, ...] = ()


def answers(
    leaders: Sequence[Leader],
    claims: Sequence[Judged],
    curves: Sequence[Course],
    spreads: Sequence[OwnSpread],
    models: Sequence[str],
) -> list[Answer]:
    """models: that ran on a GPU."""
    return [_best(leaders), _papers(claims), _same(curves, spreads), _mine(models)]


def _best(leaders: Sequence[Leader]) -> Answer:
    question = "Which is best?"
    contested = [one for one in leaders if len(one.standings) > 1]
    if not contested:
        return Answer(question, "No record here sets one system against another: nothing can be said.")
    decided = [one for one in contested if one.verdict in DECIDED]
    open_ = [one for one in contested if one not in decided]
    settings = "setting" if len(contested) == 1 else "settings"
    have = "has" if len(decided) == 1 else "have"
    text = (
        f"Of {len(contested)} {settings} in which systems ran side by side, {len(decided)} {have} the {ENOUGH_PROCESSES} "
        "processes a side that a verdict needs."
    )
    if open_:
        ahead = Counter(one.system for one in open_)
        told = ", ".join(
            f"{system} in {count}" for system, count in sorted(ahead.items(), key=lambda pair: (-pair[1], pair[0]))
        )
        text += f" In the other {len(open_)} the records say only who is ahead so far: {told}."
    widest = sorted(open_, key=lambda one: -len(one.standings))[:WIDEST]
    return Answer(question, text, (*map(_verdict, decided), *map(_standings, widest)))


def _verdict(one: Leader) -> Point:
    ours, theirs = (
        f"{label} ({of_device(memory)})" for label, memory in ((one.label, one.budget), (one.next, one.next_budget))
    )
    ratio = "" if one.over_next is None else f": {ratio_text(one.over_next, DIGITS)}"
    told = f"{ours} is faster than {theirs}" if one.verdict == "faster" else f"no difference between {ours} and {theirs}"
    return f"{one.table}; {one.group}: {told}{ratio}.", one.runs


def _standings(one: Leader) -> Point:
    """Who is ahead so far, in a setting without a verdict."""
    told = ", ".join(f"{each.label} {each.over_pivot:.3g}x" for each in one.standings if each.label != one.pivot)
    fewest, most = (of(each.n for each in one.standings) for of in (min, max))
    counts = f"{fewest} {'process' if fewest == 1 else 'processes'} each" if fewest == most else f"{fewest} to {most} processes"
    runs = tuple(run for each in one.standings for run in each.runs)
    return f"{one.table}; {one.group}: {told} the speed of {one.pivot}. {one.verdict.capitalize()}: {counts}.", runs


def of_device(budget: str) -> str:
    """Of what device memory a row had."""
    return "the whole device" if budget == "all" else budget


def _papers(claims: Sequence[Judged]) -> Answer:
    question = "Is what the papers say true?"
    if not claims:
        return Answer(question, "No claim is kept here.")
    decided = [one for one in claims if one.verdict not in ("open", "not testable here")]
    measured = [one for one in decided if not one.simulated]
    begun = [one for one in claims if one.verdict == "open" and any(part.runs for part in one.parts)]
    told = f"{len(measured)} decided by measurement" if measured else "None is decided by measurement yet"
    text = f"{' '.join(counted(claims))} {told}; of the open ones {len(begun)} have first runs."
    return Answer(question, text, tuple((f"Claim {one.number}, {one.claim}: {verdict(one)}.", _runs(one)) for one in decided))


def _same(courses: Sequence[Course], spreads: Sequence[OwnSpread]) -> Answer:
    question = "Is it the same training?"
    curves = [curve for course in courses for curve in course.curves if not curve.is_reference and curve.deviation is not None]
    points = tuple(_own(one) for one in spreads[:1])
    if not curves:
        return Answer(question, "No record has losses beside a reference's.", points)
    far = sum(curve.too_far for curve in curves)
    unknown = sum(curve.too_far and not curve.unlike for curve in curves)
    text = (
        f"Losses of {len(curves) - far} of {len(curves)} rows stay as near to their reference's as one training's may differ."
    )
    if far:
        text += (
            f" {far} do not, and of {unknown} of these nothing else is known that differs: section 8 has them, step by step."
        )
    return Answer(question, text, points)


def _own(one: OwnSpread) -> Point:
    """What rows may be apart that do differ in nothing."""
    told = f"processes of one row, {one.label}, are up to {100 * one.deviation:.3g} % from each other"
    return f"{one.table}; {one.title}: {told}.", one.runs


def _runs(claim: Judged) -> tuple[str, ...]:
    return tuple(dict.fromkeys(run for part in claim.parts if not part.beside for run in part.runs))


def _mine(models: Sequence[str]) -> Answer:
    ran = f"Models in these records: {', '.join(models)}." if models else "No model of these records ran on a GPU."
    told = "For another one, or another machine, harness plan --system all --model ... --hardware ... forecasts without a GPU."
    return Answer("And for my model?", f"{ran} {told}")
