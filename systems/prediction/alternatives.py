"""What a plan could ask instead, with the step that it would have: options of the system, recomputation, and the batch.

Each is simulated before it is named, and named only if it helps: a step that fits where the plan's does not, or more tokens a
second. Options are tried where they can help: not where the device computes all the time already.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass, replace
from typing import Any

from pydantic import BaseModel

from systems.prediction.forecast import Forecast, Observations, Question, simulated
from systems.prediction.remedies import Remedy
from systems.system import System

MOST = 3
GAIN = 1.02  # of tokens a second: less is within what a forecast is off by
COMPUTE = "compute"
OF_WORK = frozenset({"recompute", "batch_size"})
OF_RANKS, OF_RECOMPUTATION = frozenset({"reduction", "offload"}), frozenset({"activations"})  # options that do nothing else


@dataclass(frozen=True)
class Alternative:
    """changes: of what is asked, as in Remedy. options: of the system. what: what it costs, in words. Seconds of a step."""

    changes: Mapping[str, int | str]
    options: Mapping[str, Any]
    what: str
    step_time_s: float
    tokens_per_s: float


def alternatives(
    system: System, options: BaseModel, found: Forecast, observations: Observations, helpful: Iterable[Remedy] = ()
) -> list[Alternative]:
    """At most MOST, the most tokens a second first. helpful: remedies of a forecast that does not fit, which are tried too."""
    least = GAIN * found.tokens_per_s if found.fits else 0.0
    known: list[Alternative] = []
    for changes, chosen, what in _candidates(options, found, helpful):
        question = replace(found.question, **changes)
        seen = simulated(system, options.model_copy(update=chosen), question, observations)
        if seen is not None and (rate := question.tokens / seen.step_time_s) > least:
            known.append(Alternative(changes, chosen, what, seen.step_time_s, rate))
    return sorted(known, key=lambda one: -one.tokens_per_s)[:MOST]


def _candidates(
    options: BaseModel, found: Forecast, helpful: Iterable[Remedy]
) -> Iterator[tuple[dict[str, Any], dict[str, Any], str]]:
    question = found.question
    if not found.fits:
        yield from ((dict(r.changes), {}, r.what) for r in helpful if OF_WORK.issuperset(r.changes))
    else:
        if question.recompute != "none":
            yield {"recompute": "none"}, {}, "keep all activations"
        if not _computes_all_the_time(found):
            yield {"batch_size": 2 * question.batch_size}, {}, "twice the tokens a step"
    if not (found.fits and _computes_all_the_time(found)):
        yield from _of_options(options, question)


def _of_options(options: BaseModel, question: Question) -> Iterator[tuple[dict[str, Any], dict[str, Any], str]]:
    idle = OF_RANKS if question.ranks == 1 else frozenset[str]()
    idle |= OF_RECOMPUTATION if question.recompute == "none" else frozenset()
    rules = getattr(options, "rules", {}).get(str(getattr(options, "variant", None)), {})
    idle |= rules.keys()  # it sets these itself, and is meant
    for name, (value, what) in getattr(options, "may_help", {}).items():
        if getattr(options, name) != value and name not in idle:
            yield {}, {name: value}, what


def _computes_all_the_time(found: Forecast) -> bool:
    return found.simulation.step_time_s < GAIN * found.simulation.bounds_s.get(COMPUTE, 0.0)
