"""The results as Markdown, for docs/results.md: what the records of each table's cells say, default options first.

Cells without a run are one note below their table, and a table without any is one item of a list below all others.
Options stand under short names and a record's doubts as letters, both with a legend, which has what is used and no more.
"""

from __future__ import annotations

import html
import textwrap
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from types import MappingProxyType

from harness import comparison
from harness.cells import Group, ResultsTable, TableCell, replicates
from harness.comparison import ComparisonRow, asides
from harness.doubts import CLOSED_LIST
from harness.record import Reason, Record
from harness.stats import MedianFigure, Ratio
from systems import registry
from systems.messages import printable
from systems.sizes import format_size

BUDGET_FACTS = frozenset({"device memory asked for", "device memory budget in force"})  # where the table itself differs in it
NONE = "-"
WIDTH = 120  # of a line that is no row
COLUMNS = (
    "system",
    "device budget",
    "n",
    "mean step s",
    "range",
    "tokens/s",
    "relative TFLOPS",
    "device peak",
    "host peak",
    "speed",
)
ABLATED = "with stop, of the default as it was; today of variant=paper"  # which sets nonfinite itself
# --option: (short name, meaning). An option that is not here stands as it is.
SHORT_NAMES: Mapping[str, tuple[str, str]] = MappingProxyType(
    {
        "nonfinite=stop": ("stop", "updates during backward, where a non-finite gradient ends the run; no clipping"),
        "hardware=h200-141g-x1": ("h200 rates", "H3T's solvers reckon with that profile's rates"),
        "solver=manual": ("manual", "the best of those settings of H3T's switches that all layers share"),
        "solver=on": ("all on", "each of H3T's switches on in every layer, segment synchronisation too"),
        "variant=paper": ("paper", "the rules and constants of the system's own paper"),
        "variant=global-offload": ("all states on the host", "H3T's default as it was, no layer's states on the device"),
        "variant=base": ("base", "PatrickStar as it is by default, beside its ablations"),
        "variant=static-partition": ("static partition", f"chunks get a fixed share of the device; {ABLATED}"),
        "variant=osc": ("osc", f"the optimizer's chunks stay on the host; {ABLATED}"),
        "variant=spongebob": ("spongebob", f"tensors move instead of chunks; {ABLATED}"),
    }
)
DEFAULTS_ONLY, SOME_DEFAULTS, NO_DEFAULTS = range(3)


@dataclass(frozen=True)
class ShownGroup:
    """A group with what its records say; a row without runs belongs to a cell that was never run."""

    group: Group
    rows: tuple[tuple[TableCell, ComparisonRow], ...]

    @property
    def run(self) -> list[tuple[TableCell, ComparisonRow]]:
        return [(cell, row) for cell, row in self.rows if row.runs]

    @property
    def not_run(self) -> list[TableCell]:
        return [cell for cell, row in self.rows if not row.runs]


def shown_group(group: Group, records: Sequence[Record], hardware: str) -> ShownGroup:
    """Its cells in the table's order, those with default options first."""
    cells = sorted(group.cells, key=lambda cell: bool(cell.spec.option))
    return ShownGroup(group, tuple((cell, _row(group, cell, records, hardware)) for cell in cells))


def _row(group: Group, cell: TableCell, records: Sequence[Record], hardware: str) -> ComparisonRow:
    if cell is group.reference:
        return comparison.compare({cell.label: replicates(records, cell, hardware)}).rows[0]
    return row_against(group.reference, cell, records, hardware)


def row_against(reference: TableCell, cell: TableCell, records: Sequence[Record], hardware: str) -> ComparisonRow:
    """The cell's row of a comparison with another, budgets aside where the two are asked to differ in them."""
    ours, theirs = (replicates(records, one, hardware) for one in (cell, reference))
    intended = BUDGET_FACTS if cell.spec.device_memory != reference.spec.device_memory else frozenset()
    return comparison.compare({f"reference {cell.label}": theirs, cell.label: ours}, intended=intended).rows[1]


def page(tables: Sequence[ResultsTable], records: Sequence[Record]) -> list[str]:
    """All lines: the legend, then each table under its own heading."""
    groups = [[shown_group(group, records, table.hardware) for group in table.groups] for table in tables]
    run = [pair for table in groups for one in table for pair in one.run]
    marks = doubt_marks(doubt for _, row in run for doubt in row.doubts)
    lines = list(_legend([cell for cell, _ in run], marks))
    for table, shown in zip(tables, groups, strict=True):
        lines += ["", *table_lines(table, shown, marks)] if lines else table_lines(table, shown, marks)
    return lines


def shown(table: ResultsTable, records: Sequence[Record]) -> list[str]:
    """One table's lines."""
    groups = [shown_group(group, records, table.hardware) for group in table.groups]
    return table_lines(table, groups, doubt_marks(doubt for one in groups for _, row in one.run for doubt in row.doubts))


def doubt_marks(doubts: Iterable[str]) -> dict[str, str]:
    """A letter each, in the order of the closed list; what an older list had comes last."""
    found = set(doubts)
    known = [code for code in CLOSED_LIST if code in found]
    return dict(zip([*known, *sorted(found.difference(known))], map(chr, range(ord("a"), ord("z") + 1)), strict=False))


def used_names(cells: Iterable[TableCell]) -> dict[str, tuple[str, str]]:
    """Of SHORT_NAMES those that the cells have."""
    used = {option for cell in cells for option in cell.spec.option}
    return {option: told for option, told in SHORT_NAMES.items() if option in used}


def doubt_text(code: str) -> str:
    """What a letter stands for."""
    cause = f"; possible cause: {CLOSED_LIST[code][0]}" if code in CLOSED_LIST else ""
    return f"{code.replace('_', ' ')}{cause}"


def _legend(cells: Sequence[TableCell], marks: Mapping[str, str]) -> Iterator[str]:
    listed = [
        _wrapped(f"* ({name}): `--option {option}`, {meaning}.", "  ") for option, (name, meaning) in used_names(cells).items()
    ]
    if listed:
        yield from ("In brackets behind a system's name are its options, where they are not the defaults:", "", *listed)
    if listed and marks:
        yield ""
    if marks:
        yield from ("Letters behind a name are doubts that the records themselves raise:", "")
        for code, letter in marks.items():
            yield _wrapped(_plain(f"* {letter}: {doubt_text(code)}."), "  ")


def table_lines(table: ResultsTable, shown: Sequence[ShownGroup], marks: Mapping[str, str]) -> list[str]:
    """Groups in which strategies ran with default options come first, those that never ran at all last, a line each."""
    lines = [f"### {table.title}", "", f"On {table.hardware}."]
    for one in in_order(shown):
        lines += ["", f"**{one.group.title}**", "", _line(COLUMNS), _line(["---"] * len(COLUMNS))]
        lines += [_line(_columns(cell, row, marks, is_reference=cell is one.group.reference)) for cell, row in one.run]
        lines += [line for note in notes(one) for line in ("", _wrapped(_plain(note)))]
    never = [_wrapped(f"* {one.group.title}: {listed(one)}", "  ") for one in shown if not one.run]
    return [*lines, "", "Tables of which no cell was run yet:", "", *never] if never else lines


def in_order(shown: Iterable[ShownGroup]) -> list[ShownGroup]:
    """Those that ran, default options first."""
    strategies = {name for name, entry in registry.find().items() if entry.exposes == "STRATEGY"}
    return sorted((one for one in shown if one.run), key=lambda one: _defaults(one, strategies))


def _defaults(shown: ShownGroup, strategies: Collection[str]) -> int:
    """Whether the group's strategies ran with default options: where no strategy did, there is nothing else."""
    ran = [cell for cell, _ in shown.run if cell.spec.system in strategies]
    with_options = [cell for cell in ran if cell.spec.option]
    if not with_options:
        return DEFAULTS_ONLY
    return NO_DEFAULTS if len(with_options) == len(ran) else SOME_DEFAULTS


def short_label(cell: TableCell) -> str:
    """elixir (2 ranks, stop, dtype fp32): the system, its ranks where there are several, its options by their short names, and
    in what else it differs from other rows of its group but for the budget, which has a column.
    """
    told = [f"{cell.spec.ranks} ranks"] if cell.spec.ranks > 1 else []
    told += [SHORT_NAMES[option][0] if option in SHORT_NAMES else option for option in cell.spec.option]
    told += [text for field, text in cell.apart.items() if field not in ("ranks", "device_memory")]
    return f"{cell.spec.system} ({', '.join(told)})" if told else cell.spec.system


def budget(cell: TableCell) -> str:
    return "all" if cell.spec.device_memory is None else format_size(cell.spec.device_memory)


def listed(shown: ShownGroup) -> str:
    """The cells that were never run, with their budgets where the group has several."""
    several = len({cell.spec.device_memory for cell, _ in shown.rows}) > 1
    return ", ".join(short_label(cell) + (f" with {budget(cell)}" if several else "") for cell in shown.not_run) + "."


def _columns(cell: TableCell, row: ComparisonRow, marks: Mapping[str, str], *, is_reference: bool) -> list[str]:
    found = letters(row, marks)
    head = short_label(cell) + (f" <sup>{found}</sup>" if found else "")
    return [head, budget(cell), *figures(row, is_reference=is_reference)]


def letters(row: ComparisonRow, marks: Mapping[str, str]) -> str:
    """Of the row's doubts."""
    return "".join(sorted(marks[doubt] for doubt in set(row.doubts) if doubt in marks))


def figures(row: ComparisonRow, *, is_reference: bool) -> list[str]:
    """What stands below COLUMNS behind the system and its budget."""
    if not row.n:
        failed = [str(len(row.runs)), failure(row.status, row.reason), *[NONE] * 3]
        return [*failed, _size(row.peaks.device_bytes), _size(row.peaks.host_rss_bytes), NONE]
    step = row.mean_step_time_s
    ratio = "1" if is_reference else NONE if row.speed_ratio is None else ratio_text(row.speed_ratio)
    return [
        str(row.n),
        _number(step),
        NONE if step is None or step.low is None else f"{step.low:.4g} to {step.high:.4g}",
        NONE if row.tokens_per_s is None else f"{row.tokens_per_s.median:,.0f}",
        _number(row.relative_tflops),
        _size(row.peaks.device_bytes),
        _size(row.peaks.host_rss_bytes),
        ratio,
    ]


def ratio_text(ratio: Ratio, digits: int = 3) -> str:
    low, high = ratio.low, ratio.high
    spread = "" if low is None or high is None else f" ({low:.{digits}g} to {high:.{digits}g})"
    return f"{ratio.value:.{digits}g}x{spread}"


def failure(status: str, reason: Reason | None) -> str:
    """oom (device: needs 2GiB, has 1.5GiB)."""
    if reason is None:
        return status
    sizes = [f"{verb} {format_size(size)}" for verb, size in (("needs", reason.need), ("has", reason.have)) if size is not None]
    told = ": ".join(filter(None, [reason.tier, ", ".join(sizes)]))
    return f"{status} ({told})" if told else status


def notes(shown: ShownGroup) -> Iterator[str]:
    """Replicates that failed, columns that are not of the same steps and runs, pairs that are not set against each other (one
    line for all that differ alike), cells not run.
    """
    unlike: dict[str, list[str]] = {}
    for cell, row in shown.run:
        if row.n and row.status != "ok":
            yield f"{short_label(cell)}: {len(row.runs) - row.n} more of its runs: {failure(row.status, row.reason)}."
        yield from (f"{short_label(cell)}: {aside}." for aside in asides(row))
        if row.refused:
            unlike.setdefault("; ".join(str(difference) for difference in row.refused), []).append(short_label(cell))
    for why, labels in unlike.items():
        yield f"Not set against {short_label(shown.group.reference)}: {'; '.join(labels)}: {why}."
    if shown.not_run:
        yield f"Not run yet: {listed(shown)}"


def _plain(text: str) -> str:
    """What records say, which a page shows and does not obey: neither as HTML nor as a mark of this document."""
    return html.escape(printable(text), quote=False)


def _wrapped(text: str, indent: str = "") -> str:
    return textwrap.fill(text, WIDTH, subsequent_indent=indent, break_long_words=False, break_on_hyphens=False)


def _line(cells: Sequence[str]) -> str:
    return "| " + " | ".join(cell.replace("|", "\\|") for cell in cells) + " |"


def _number(figure: MedianFigure | None) -> str:
    return NONE if figure is None else f"{figure.median:.4g}"


def _size(size: int | None) -> str:
    return NONE if size is None else f"{size / (1 << 30):.2f}GiB"
