"""What the size of a page is worth (section 4.1, "Optimal Page Size"): the rate of its copy, what it wastes, and the step.

The paper has a sentence: the least page that fully uses PCIe is the best, 4 MB. Here the rate of a copy of one page is worked
out from the measured profile; waste is of pages at their nominal size; steps are simulated by variant=paper, where a page is
what moves. Neighbouring pages that move together are one copy, so a small page costs a copy's overhead where it moves alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from harness.figures import FigureSpec
from harness.paper_table import ComputedCell, FigureCell, FigureColumn, PaperTable, PrintedCell, SimulatedCell, table
from paper_figures.kept import ForecastCase, ForecastFound, ask_all, simulated
from systems.planning import hardware
from systems.planning.hardware import HardwareProfile
from systems.sizes import format_size

SHOWS = {"angel-pages": "size of a page against the rate of its copy, waste and the step (4.1)"}
KIB, MIB, GIB = 1 << 10, 1 << 20, 1 << 30
PAGES = (64 * KIB, 256 * KIB, MIB, 4 * MIB, 16 * MIB, 64 * MIB, GIB)
PROFILE, MODEL, MEMORY = "h200-141g-x1", "opt-1.3b", 3 * GIB
STATISTICS = ("wasted_bytes", "utilization", "fetched_bytes_per_step")


def case(page: int) -> ForecastCase:
    return ForecastCase(
        system="angel-ptm",
        model=MODEL,
        profile=PROFILE,
        ranks=1,
        batch_size=8,
        option=("variant=paper", f"page={page}"),
        dtype="bf16",
        device_memory=MEMORY,
    )


def ask(cases: Sequence[ForecastCase]) -> Iterator[tuple[ForecastCase, ForecastFound]]:
    return ask_all(cases, STATISTICS)


def tables(name: str, asked: FigureSpec) -> Iterator[PaperTable]:
    profile = hardware.load(PROFILE)
    kept = simulated(name, [case(page) for page in PAGES], fresh=asked.fresh, ask=ask)
    rows: list[list[FigureCell]] = []
    for page in PAGES:
        found = kept.of(case(page))
        told = {} if found is None else found.statistics
        row: list[FigureCell] = [format_size(page), PrintedCell("the best", "section 4.1") if page == 4 * MIB else None]
        row += [ComputedCell(f"{rate(profile, page) / 1e9:.1f}"), ComputedCell(f"{100 * share(profile, page):.0f} %")]
        row += [_simulated(told.get("wasted_bytes"), 1e9, 3), _simulated(told.get("utilization"), 0.01, 1)]
        step_s = None if found is None else found.step_s
        row += [_simulated(told.get("fetched_bytes_per_step"), 1e9, 3), _simulated(step_s, 1.0, 4)]
        rows.append(row)
    yield table(
        f"Angel-PTM: the size of a page ({MODEL} in {format_size(MEMORY)} of {PROFILE}, batch 8 of 1024 tokens)",
        [
            FigureColumn("page"),
            FigureColumn("by the paper", "paper"),
            FigureColumn("a page's copy GB/s", "computed"),
            FigureColumn("of the full rate", "computed"),
            FigureColumn("wasted GB", "simulated"),
            FigureColumn("utilization %", "simulated"),
            FigureColumn("moved to the device GB a step", "simulated"),
            FigureColumn("step s", "simulated"),
        ],
        rows,
        kept.remark(name),
        "Rate: a page alone, by the profile's copies_by_size. Neighbouring pages that move together are one copy, so that "
        "steps do not show it.",
        "Waste: of pages at their nominal size, as the paper's allocator has them; the pool here takes what is in a page.",
        f"{format_size(GIB)} is larger than any layer: whole layers come and go. Of 4 KiB there would be 640,000 pages: not "
        "asked.",
    )


def rate(profile: HardwareProfile, size: int) -> float:
    """Bytes a second of a copy of this size to the device, alone."""
    return size / (size / profile.h2d_bytes_per_s.value + profile.copy_overhead_s(size))


def share(profile: HardwareProfile, size: int) -> float:
    return rate(profile, size) / profile.h2d_bytes_per_s.value


def _simulated(value: float | None, unit: float, digits: int) -> FigureCell:
    return None if value is None else SimulatedCell(round(value / unit, digits), PROFILE)
