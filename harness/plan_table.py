"""A plan as tables for the eye: what every tier must hold, whether it fits, how fast, and what it is limited by."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from types import MappingProxyType
from typing import Any

from rich.console import Console
from rich.markup import escape
from rich.table import Table

from harness.command import flags
from harness.spec import in_flags
from systems.messages import printable
from systems.prediction.alternatives import Alternative
from systems.prediction.bounds import LIMITS
from systems.prediction.forecast import Forecast
from systems.prediction.memory_rules import RULE, RuledNeed
from systems.prediction.needs import TierNeed
from systems.prediction.policies import left_out
from systems.prediction.remedies import Remedy
from systems.prediction.running_ahead import AheadForecast
from systems.sizes import format_size

MOVED: Mapping[str, str] = MappingProxyType(
    {
        "h2d": "from the host",
        "d2h": "to the host",
        "gather": "gathered through the link",
        "reduce": "reduced through it",
        "exchange": "of tokens to experts of other ranks and back",
        "disk-read": "read from the disk",
        "disk-write": "written to it",
    }
)
NEAR = 1.05  # a step this close to its bound is limited by it


def show(found: Forecast, helpful: Sequence[Remedy], better: Sequence[Alternative], console: Console, *, title: str) -> None:
    table = Table("tier", "what", "bytes", title=escape(printable(title)))
    for tier, need in found.tiers.items():
        for what, size in need.parts.items():
            table.add_row(tier, what, format_size(size))
        table.add_row(tier, "need", format_size(need.need_bytes))
        table.add_row(tier, "there is", format_size(need.have_bytes), end_section=True)
    console.print(table)
    for tier, need in found.tiers.items():
        console.print(f"{tier}: {_verdict(need)}", markup=False)
    if found.why_not is None:
        enough = f"{format_size(found.least_device_bytes)} would be enough{_with_host(found)}"
        console.print(f"fits: a device of {enough}", markup=False)
    else:
        console.print(f"does not fit: {in_flags(found.why_not)}", markup=False)
    _show_speed(found, console)
    if found.statistics:
        decided = ", ".join(f"{what} {value}" for what, value in _decided(found.statistics))
        console.print(f"decided by {found.system}: {decided}", markup=False)
    for line in _ranks(found):
        console.print(line, markup=False)
    if found.ahead is not None:
        for line in _ahead(found.ahead, clips=found.question.clip > 0):
            console.print(line, markup=False)
    if found.question.profile.assumed:
        console.print(f"assumed by the profile: {', '.join(found.question.profile.assumed)}", markup=False)
    for what in left_out(found.system, found.question.ranks):
        console.print(f"left out: {what}", markup=False)
    _show_improved(found, better, helpful, console)


def _decided(statistics: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """A name and a value each, for the eye; lists of bytes, and what is not known, are left to the JSON line."""
    for name, value in statistics.items():
        words = name.split("_")
        if isinstance(value, Mapping):
            yield from ((f"{' '.join(words)}: {what}", text) for what, text in _decided(value) if "." in text)
        elif "bytes" in words and isinstance(value, int):
            yield " ".join(word for word in words if word != "bytes"), format_size(value)
        elif isinstance(value, float):
            yield " ".join(words), f"{value:.4g}" if value % 1 else f"{value:.1f}"
        elif isinstance(value, str | int):
            yield " ".join(words), str(value)


def _show_improved(found: Forecast, better: Sequence[Alternative], helpful: Sequence[Remedy], console: Console) -> None:
    """Each with the step that it would have, as far as that is known."""
    for one in better:
        step = f"{one.step_time_s:.4g} s a step, {one.tokens_per_s:.4g} tokens/s"
        helps = "faster" if one.step_time_s < found.simulation.step_time_s else "more tokens a second"
        helps = helps if found.fits else "would fit"
        console.print(f"{helps}: {one.what} ({flags(one.changes, one.options)}): {step}", markup=False)
    with_a_step = [one.changes for one in better]
    for remedy in helpful:
        if remedy.changes not in with_a_step:
            console.print(f"would fit: {remedy.what} ({flags(remedy.changes)})", markup=False)


def _verdict(need: TierNeed) -> str:
    if need.fits:
        return f"{format_size(need.need_bytes)} of {format_size(need.have_bytes)}, {format_size(need.spare_bytes)} to spare"
    return f"{format_size(need.need_bytes)} of {format_size(need.have_bytes)}, {format_size(-need.spare_bytes)} too much"


def _with_host(found: Forecast) -> str:
    """Where a larger device has what the host lacks."""
    needed, there = found.least_device_host_bytes, found.tiers["host"].have_bytes
    return f" with {format_size(needed)} of host memory a node" if needed > there else ""


def _show_speed(found: Forecast, console: Console) -> None:
    simulation = found.simulation
    step, highest = simulation.step_time_s, simulation.bounds_s[simulation.bound]
    condition = "" if found.fits else " with memory enough"
    console.print(f"predicted{condition}: {step:.4g} s a step, {found.tokens_per_s:.4g} tokens/s", markup=False)
    bounds = ", ".join(f"{name} {seconds:.4g} s" for name, seconds in simulation.bounds_s.items())
    console.print(f"bounds: {bounds}", markup=False)
    limit = f"{simulation.bound}, {LIMITS[simulation.bound]}"
    if step <= NEAR * highest:
        console.print(f"limited by {limit}", markup=False)
    else:
        console.print(f"highest bound: {limit}; the step takes {step / highest:.2f} times that, waiting in turn", markup=False)


def _ranks(found: Forecast) -> Iterator[str]:
    """What each of several does."""
    question, moved = found.question, found.simulation.bytes
    if question.ranks == 1:
        return
    yield f"each rank: {found.tokens_per_s / question.ranks:.4g} tokens/s, and in a step " + (
        ", ".join(f"{format_size(moved[lane])} {what}" for lane, what in MOVED.items() if lane in moved) or "nothing moves"
    )


def _ahead(ahead: AheadForecast, *, clips: bool) -> Iterator[str]:
    room = f"{format_size(ahead.spare_bytes)} of host memory to spare"
    if ahead.share:
        taken = f"with second versions of {format_size(ahead.taken_bytes)} in the {room}"
        without = f"{ahead.waiting_step_time_s:.4g} s without{', as where a step is clipped' if clips else ''}"
        share = f"{ahead.share:.0%} of the updates on the host run ahead of the norm"
        yield f"{share}, {taken}: {ahead.step_time_s:.4g} s a step, {without}"
    else:
        why = "there is too little" if ahead.more is not None else "none would gain by it"
        yield f"no update on the host runs ahead of the norm, {room}: {why}"
    if ahead.more is not None:
        more = f"{format_size(ahead.more.nbytes)} more host memory a node: {ahead.more.step_time_s:.4g} s a step"
        yield f"{ahead.more.share:.0%} would with {more}"


def show_ranking(
    found: Sequence[Forecast],
    refused: Mapping[str, str],
    improved: Forecast | None,
    helpful: Sequence[Remedy],
    better: Sequence[Alternative],
    console: Console,
    *,
    title: str,
) -> None:
    """improved: the one that remedies and alternatives are of."""
    shown = escape(printable(title))
    table = Table("system", "fits", "step s", "tokens/s", "limited by", "device", "least device", "host", title=shown)
    for one in found:
        table.add_row(
            one.system,
            "yes" if one.fits else "no",
            f"{one.simulation.step_time_s:.4g}",
            f"{one.tokens_per_s:.4g}",
            one.simulation.bound,
            format_size(one.tiers["device"].need_bytes),
            format_size(one.least_device_bytes) + _with_host(one),
            format_size(one.tiers["host"].need_bytes),
        )
    console.print(table)
    for one in found:
        if one.why_not is not None:
            console.print(f"{one.system} does not fit: {in_flags(one.why_not)}", markup=False)
    if improved is not None and (better or helpful):
        console.print(
            f"{improved.system} could do more:"
            if improved.fits
            else f"none fits as it is asked; {improved.system} with a change:",
            markup=False,
        )
        _show_improved(improved, better, helpful, console)
    for name, why in refused.items():
        console.print(f"{name} cannot: {in_flags(why)}", markup=False)


def show_rules(found: Sequence[RuledNeed], console: Console) -> None:
    """Packages whose steps are not simulated."""
    table = Table("system", "fits", "device, about", "host, about", "")
    for one in found:
        needs = (format_size(need.need_bytes) for need in (one.device, one.host))
        table.add_row(one.system, "yes" if one.fits else "no", *needs, RULE)
    if found:
        console.print(table)
