"""H3T's timing diagrams: figures 7 (switches), 8 (economical or not, with and without NVLink), 9 (segment synchronisation).

    python -m paper_figures.h3t_timing [--out FOLDER]

Prints them as text. With a folder it also writes figure7.svg, figure7.png and so on, h3t_timing.txt, and h3t_timing.json, which
opens in ui.perfetto.dev. Small cases whose operations have round lengths, run by the simulator; what runs when follows from
`h3t_workflow`. The paper draws no time axis, so lengths are ours: what can be compared is the order and what waits for what.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from pathlib import Path

from matplotlib import rc_context
from matplotlib.figure import Figure
from matplotlib.patches import Patch

from harness.figures import FigureSpec
from harness.paper_table import FigureCell, FigureColumn, PaperTable, SimulatedCell, table
from paper_figures.h3t_workflow import CALCULATION, HOST, HOST_LINK, LINK, Case, Diagram, Lengths, Shown, drawn
from systems.planning.clock.perfetto import TimedEvent, to_json
from systems.strategies.h3t.switches import ALL_ON, Switches

SHOWS = {
    "h3t-figure7": "timing diagrams of the switches",
    "h3t-figure8": "timing diagrams of economical and other modes",
    "h3t-figure9": "timing diagrams of segment synchronisation",
}
PICTURES = ("h3t-figure7", "h3t-figure8", "h3t-figure9")
LENGTHS = "of no machine (operations of round lengths)"
SYMBOLS = {
    "edge": "E",
    "forward": "F",
    "forward again": "R",
    "backward": "B",
    "gather": "g",
    "scatter": "s",
    "prefetch": "p",
    "offload": "o",
    "hidden out": "h",
    "hidden in": "H",
    "optimize": "U",
}
LEGEND = {
    "edge": ("embedding, head and loss", "#c7c7c7"),
    "forward": ("forward", "#4c78a8"),
    "forward again": ("forward again (rematerialisation)", "#9ecae9"),
    "backward": ("backward", "#1f4e79"),
    "gather": ("all gather", "#54a24b"),
    "scatter": ("reduce scatter", "#b6992d"),
    "prefetch": ("prefetch parameters", "#f58518"),
    "offload": ("offload gradients", "#e45756"),
    "hidden out": ("offload hidden state", "#b279a2"),
    "hidden in": ("prefetch hidden state", "#ff9da6"),
    "optimize": ("optimizer (CPU)", "#79706e"),
}
CELLS_PER_S = 2000  # of a text diagram
SLOW_OFFLOAD = Lengths(offload_s=12e-3)  # a post-process that does not end with its segment

AHEAD = replace(ALL_ON, economical_forward=False, economical_backward=False, synchronise=False)
ECONOMICAL = replace(ALL_ON, synchronise=False)
PARTITIONED = Switches(rematerialise=True, partition=True)


@dataclass(frozen=True)
class Panel:
    """part: the segments that are shown, forward, backward or step."""

    title: str
    case: Case
    part: str = "step"

    def shown(self, diagram: Diagram) -> list[Shown]:
        if self.part == "step":
            return list(diagram.operations)
        segments = diagram.forward_segments if self.part == "forward" else diagram.backward_segments
        return [o for o in diagram.operations if o.segment in segments]


def _pair(letter: str, part: str, link: bool) -> tuple[Panel, Panel]:
    where = f"{part} {'with' if link else 'without'} NVLink"
    modes = {"non-economical": AHEAD, "economical": ECONOMICAL}
    first, second = (Panel(f"8{letter} {mode} {where}", Case(s, 4, link), part) for mode, s in modes.items())
    return first, second


FIGURES: Mapping[str, Sequence[Panel]] = {
    "figure7": (
        Panel("7a default: parameters and optimizer offloaded, parameter parallelism", Case(Switches())),
        Panel("7b rematerialisation", Case(Switches(rematerialise=True))),
        Panel("7c offloading hidden states", Case(Switches(offload_hidden=True))),
        Panel("7d parameter partition", Case(Switches(partition=True))),
        Panel("7e lazy prefetching", Case(Switches(lazy_prefetch=True))),
    ),
    "figure8": (
        *_pair("a", "forward", True),
        *_pair("b", "backward", True),
        *_pair("c", "forward", False),
        *_pair("d", "backward", False),
    ),
    "figure9": (
        Panel("9 without segment synchronisation", Case(PARTITIONED, 4, lengths=SLOW_OFFLOAD)),
        Panel("9 with segment synchronisation", Case(replace(PARTITIONED, synchronise=True), 4, lengths=SLOW_OFFLOAD)),
    ),
}


def diagrams() -> dict[str, list[tuple[Panel, Diagram]]]:
    """Every panel's, by figure."""
    return {name: [(panel, drawn(panel.case)) for panel in panels] for name, panels in FIGURES.items()}


def text_of(panel: Panel, diagram: Diagram) -> str:
    """One line a stream; an operation is its symbol and layer, drawn out to its length."""
    lines = [f"{panel.title}: step {1e3 * diagram.step_time_s:.0f} ms, device peak {diagram.peak_bytes / 2**20:.1f} MiB"]
    shown = panel.shown(diagram)
    begin = min(o.start_s for o in shown)
    for stream in _streams(shown):
        line = ""
        for o in sorted((o for o in shown if o.stream == stream), key=lambda o: o.start_s):
            start, end = (round((t - begin) * CELLS_PER_S) for t in (o.start_s, o.end_s))
            name = SYMBOLS[o.name] + (str(o.layer) if o.layer else "")
            line = line.ljust(start) + name.ljust(end - start, "-")[: end - start]
        lines.append(f"  {stream:<12}{line}".rstrip())
    return "\n".join(lines)


def legend() -> str:
    return ", ".join(f"{symbol} {LEGEND[name][0]}" for name, symbol in SYMBOLS.items()) + "; half a millisecond a character"


def _streams(shown: Sequence[Shown]) -> list[str]:
    used = {o.stream for o in shown}
    return [stream for stream in (CALCULATION, LINK, HOST_LINK, HOST) if stream in used]


def chart(panels: Sequence[tuple[Panel, Diagram]]) -> Figure:
    """One below the other, on one scale."""
    figure = Figure(figsize=(12, 1.7 * len(panels) + 1), layout="constrained")
    axes = figure.subplots(len(panels), 1, squeeze=False)[:, 0]
    longest = max(_length(panel.shown(diagram)) for panel, diagram in panels)
    for axis, (panel, diagram) in zip(axes, panels, strict=True):
        shown = panel.shown(diagram)
        begin, rows = min(o.start_s for o in shown), _streams(shown)
        for o in shown:
            left, width = 1e3 * (o.start_s - begin), 1e3 * (o.end_s - o.start_s)
            axis.barh(rows.index(o.stream), width, left=left, color=LEGEND[o.name][1], edgecolor="white")
            if o.layer:
                axis.text(
                    left + width / 2, rows.index(o.stream), str(o.layer), ha="center", va="center", fontsize=7, color="white"
                )
        axis.set_yticks(range(len(rows)), rows)
        axis.invert_yaxis()
        axis.set_xlim(0, 1e3 * longest)
        axis.set_title(panel.title, loc="left", fontsize=9)
        axis.tick_params(labelsize=8)
        axis.spines[["top", "right"]].set_visible(False)
    axes[-1].set_xlabel("ms", fontsize=8)
    used = {o.name for panel, diagram in panels for o in panel.shown(diagram)}
    patches = [Patch(color=colour, label=label) for name, (label, colour) in LEGEND.items() if name in used]
    figure.legend(handles=patches, loc="outside lower center", ncols=4, fontsize=8, frameon=False)
    return figure


def _length(shown: Sequence[Shown]) -> float:
    return max(o.end_s for o in shown) - min(o.start_s for o in shown)


def events(shown: Sequence[Shown]) -> Iterator[TimedEvent]:
    for o in sorted(shown, key=lambda o: ((CALCULATION, LINK, HOST_LINK, HOST).index(o.stream), o.start_s)):
        yield TimedEvent(o.stream, f"{o.name} {o.layer}" if o.layer else o.name, o.start_s, o.end_s - o.start_s)


def write(folder: Path, found: Mapping[str, Sequence[tuple[Panel, Diagram]]], text: str) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    with rc_context({"svg.hashsalt": "h3t"}):
        for name, panels in found.items():
            figure = chart(panels)
            figure.savefig(folder / f"{name}.svg", metadata={"Date": None})
            figure.savefig(folder / f"{name}.png", dpi=120)
    shown = {panel.title: list(events(panel.shown(diagram))) for panels in found.values() for panel, diagram in panels}
    (folder / "h3t_timing.json").write_text(to_json(shown), encoding="utf-8")
    (folder / "h3t_timing.txt").write_text(text, encoding="utf-8")


def tables(name: str, asked: FigureSpec) -> Iterator[PaperTable]:
    """Steps and peaks of the panels of one figure, and its diagrams as text."""
    panels = [(panel, drawn(panel.case)) for panel in FIGURES[name.removeprefix("h3t-")]]
    rows: list[list[FigureCell]] = [
        [panel.title, None, *(SimulatedCell(each, LENGTHS) for each in (1e3 * diagram.step_time_s, diagram.peak_bytes / 2**20))]
        for panel, diagram in panels
    ]
    columns = [FigureColumn("diagram"), FigureColumn("length", "paper")]
    columns += [FigureColumn("step ms", "simulated"), FigureColumn("device peak MiB", "simulated")]
    told = "Order and waiting can be compared with the paper's diagrams, lengths cannot: it draws no time axis."
    lines = [line for panel, diagram in panels for line in [*text_of(panel, diagram).splitlines(), ""]]
    title = f"H3T figure {name.removeprefix('h3t-figure')}: {SHOWS[name]}"
    yield replace(table(title, columns, rows, told), drawing=("\n".join([*lines, legend()])))


def picture(name: str, asked: FigureSpec) -> Figure:
    return chart([(panel, drawn(panel.case)) for panel in FIGURES[name.removeprefix("h3t-")]])


def main(arguments: list[str]) -> int:
    if arguments and (arguments[0] != "--out" or len(arguments) != 2):
        sys.stderr.write(f"unknown arguments {' '.join(arguments)}: use --out FOLDER, or nothing for text alone\n")
        return 2
    found = diagrams()
    blocks = [text_of(panel, diagram) for panels in found.values() for panel, diagram in panels]
    text = "\n\n".join([*blocks, legend()]) + "\n"
    sys.stdout.write(text)
    if arguments:
        try:
            write(Path(arguments[1]), found, text)
        except OSError as error:
            sys.stderr.write(f"--out {arguments[1]} cannot be written ({error.strerror}): give a folder that can\n")
            return 2
    return 0


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
