"""The page's first screen: three questions of somebody who has to choose, answered by what the sections below it hold."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass

from harness.claims import Judged
from harness.ledger import counted
from harness.report.leaders import ALONE, Leader
from harness.results_page import ratio_text
from harness.stats import ENOUGH_PROCESSES

WIDEST = 3  # settings of most systems that are told of before they are decided


@dataclass(frozen=True)
class Answer:
    """points: each a sentence with the runs that it is of, below the text."""

    question: str
    text: str
    points: tuple[tuple[str, tuple[str, ...]], ...] = ()


def answers(leaders: Sequence[Leader], claims: Sequence[Judged], models: Sequence[str]) -> list[Answer]:
    """models: that ran on a GPU."""
    return [_best(leaders), _papers(claims), _mine(models)]


def _best(leaders: Sequence[Leader]) -> Answer:
    question = "Which is best?"
    contested = [one for one in leaders if one.verdict != ALONE and one.systems > 1]
    if not contested:
        return Answer(question, "No record here sets one system against another: nothing can be said.")
    decided = [one for one in contested if one.verdict in ("faster", "no difference")]
    open_ = [one for one in contested if one not in decided]
    text = (
        f"In {len(decided)} of {len(contested)} settings in which systems ran side by side there are enough processes "
        f"({ENOUGH_PROCESSES} of each) to say who is faster."
    )
    if open_:
        ahead = Counter(one.system for one in open_)
        told = ", ".join(
            f"{system} in {count}" for system, count in sorted(ahead.items(), key=lambda pair: (-pair[1], pair[0]))
        )
        text += f" In the other {len(open_)} it is known only who is ahead so far: {told}."
    widest = sorted(open_, key=lambda one: -one.systems)[:WIDEST]
    return Answer(question, text, tuple((_said(one), one.runs) for one in [*decided, *widest]))


def _said(one: Leader) -> str:
    ratio = "" if one.over_next is None else f", {ratio_text(one.over_next)}"
    beside = f"{one.next} ({one.next_budget})"
    ours = f"{one.label} ({one.budget} of device memory)"
    if one.verdict == "faster":
        told = f"{ours} is faster than {beside}{ratio}"
    elif one.verdict == "no difference":
        told = f"no difference between {ours} and {beside}{ratio}"
    else:
        far = "" if one.over_reference is None else f", and {ratio_text(one.over_reference)} the speed of {one.reference}"
        told = f"{ours} is ahead of {beside}{ratio}{far}; too few runs: {one.n} and {one.next_n} processes"
    return f"{one.machine}, {one.group}: {told}."


def _papers(claims: Sequence[Judged]) -> Answer:
    question = "Is what the papers say true?"
    if not claims:
        return Answer(question, "No claim is kept here.")
    measured = [
        one for one in claims if one.verdict in ("reproduced", "direction only", "not reproduced") and not one.simulated
    ]
    told = "None is decided by measurement yet." if not measured else f"Measured and decided: {len(measured)}."
    text = f"{' '.join(counted(claims))} {told}"
    decided = [one for one in claims if one.verdict not in ("open", "not testable here")]
    points = [
        (f"Claim {one.number}, {one.claim}: {one.verdict}{' by simulation' if one.simulated else ''}.", _runs(one))
        for one in decided
    ]
    return Answer(question, text, tuple(points))


def _runs(claim: Judged) -> tuple[str, ...]:
    return tuple(dict.fromkeys(run for part in claim.parts if not part.beside for run in part.runs))


def _mine(models: Sequence[str]) -> Answer:
    ran = f"Models in these records: {', '.join(models)}." if models else "No model of these records ran on a GPU."
    told = "For another one, or another machine, harness plan --system all forecasts each strategy without a GPU."
    return Answer("And for my model?", f"{ran} {told}")
