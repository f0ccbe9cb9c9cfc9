"""PatrickStar's table 3: the chunk size that the search finds for each of the paper's models, and how full its chunks are.

    python -m paper_figures.patrickstar_chunks

Computed from the models' parameters alone, with the paper's range: 128 to 512 Mi elements in steps of 32 Mi. The paper's own
numbers stand beside ours. Its models are those of its table 2 by our reading (models/gpt.py): biases, norms and the vocabulary
are GPT-2's, which it does not say, so neither sizes nor utilization need to agree to the digit.
"""

from __future__ import annotations

import sys
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from rich.console import Console
from rich.table import Table

from harness.output import counted
from models import registry as models_registry
from systems.planning.strategy import UNLIMITED, PlanningContext
from systems.recipe.model.units import find_units
from systems.strategies.patrickstar.chunks import STEP, PatrickStarChunker
from systems.strategies.patrickstar.options import PatrickStarOptions

MI = 1 << 20


@dataclass(frozen=True)
class PaperChunks:
    """A column of table 3. size: Mi elements. utilization: percent."""

    cluster: str
    model: str
    size: int
    utilization: float


PAPER = (
    PaperChunks("YARD", "ps-10b", 288, 94.47),
    PaperChunks("YARD", "ps-15b", 480, 92.62),
    PaperChunks("YARD", "ps-18b", 312, 91.5),
    PaperChunks("SuperPod", "ps-20b", 288, 90.5),
    PaperChunks("SuperPod", "ps-40b", 288, 90.6),
    PaperChunks("SuperPod", "ps-60b", 416, 92.2),
    PaperChunks("SuperPod", "ps-68b", 416, 97.4),
)


@dataclass(frozen=True)
class FoundChunks:
    """The same of ours. at_paper_size: percent, in chunks of the paper's size."""

    size: int
    utilization: float
    at_paper_size: float


def found(cell: PaperChunks) -> FoundChunks:
    index = find_units(models_registry.build(models_registry.resolve(cell.model)), torch.bfloat16).index
    context = PlanningContext(UNLIMITED, UNLIMITED, itemsize=2, ranks=1, accumulate=1, seed=0)
    chunker = PatrickStarChunker(index, PatrickStarOptions(variant="paper"), context)
    theirs = chunker.chunks(cell.size * MI).utilization
    return FoundChunks(chunker.chunk // MI, 100 * chunker.statistics["utilization"], 100 * theirs)


def off_the_grid() -> Iterator[PaperChunks]:
    """Sizes in the paper's table that are no multiple of its step."""
    return (cell for cell in PAPER if cell.size * MI % STEP)


def table3() -> Table:
    odd = ", ".join(f"{cell.size} of {cell.model}" for cell in off_the_grid())
    caption = f"No multiple of the paper's own step of {STEP // MI} Mi elements: {odd}."
    columns = ("cluster", "model", "size (Mi)", "paper", "utilization", "paper", "ours at the paper's size")
    table = Table(*columns, title="table 3: chunk size search", caption=caption)
    for cell in counted(PAPER, len(PAPER), lambda each: each.model):
        ours = found(cell)
        sizes, shares = (str(ours.size), str(cell.size)), (f"{ours.utilization:.2f} %", f"{cell.utilization} %")
        table.add_row(cell.cluster, cell.model, *sizes, *shares, f"{ours.at_paper_size:.2f} %")
    return table


def main() -> int:
    Console(width=140).print(table3())
    return 0


if __name__ == "__main__":
    sys.exit(main())
