"""`harness figure NAME`: a table or figure of a paper, beside what was measured and simulated here. Trains nothing.

The files of the package paper_figures are the list, which is read without importing them: each binds `SHOWS`, names to what
they are, as a literal, and has `tables(name, asked)`, and `picture(name, asked)` where there is one to draw. Imports go from
there to here, so a file is imported by its name when it is asked for, not before.
"""

from __future__ import annotations

import ast
import importlib
import importlib.util
import os
import re
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from pydantic import BaseModel, ConfigDict, Field

from harness.output import complain, say
from harness.paper_table import PaperTable
from harness.spec import KEPT, BadInputError
from harness.spreadsheet import write_csv
from systems.messages import unknown_name

PACKAGE = "paper_figures"
PAPERS: Mapping[str, str] = {"angel": "Angel-PTM", "patrickstar": "PatrickStar", "elixir": "Elixir", "h3t": "H3T"}
HERE = "none"  # of no paper: what this project shows of itself
TABLES, PICTURES = (".md", ".csv"), (".pdf", ".png", ".svg")


class FigureSpec(BaseModel):
    """Show a table or figure of a paper: its numbers, those measured here, and simulated ones, each told apart."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    name: str = Field(description="which one, as in harness ls figures")
    out: str | None = Field(None, description="file to write instead: .md or .csv; .pdf, .png or .svg where there is a picture")
    results: str = Field(KEPT, description="folder of the records")
    fresh: bool = Field(False, description="simulate again what is kept of simulations")


@dataclass(frozen=True)
class NamedFigure:
    """module: of the package that shows it. summary: a line."""

    name: str
    module: str
    summary: str

    @property
    def paper(self) -> str:
        """That it is of, or HERE."""
        return PAPERS.get(self.name.partition("-")[0], HERE)

    def loaded(self) -> Any:
        return importlib.import_module(f"{PACKAGE}.{self.module}")


def find() -> dict[str, NamedFigure]:
    """By name, paper by paper, in the order of their numbers. Imports none of them."""
    package = importlib.util.find_spec(PACKAGE)
    folders = package.submodule_search_locations if package is not None else None
    found = [figure for folder in folders or () for path in sorted(Path(folder).glob("*.py")) for figure in _shown_by(path)]
    return {figure.name: figure for figure in sorted(found, key=_place)}


def _shown_by(path: Path) -> list[NamedFigure]:
    for node in ast.parse(path.read_text(encoding="utf-8")).body:
        targets = node.targets if isinstance(node, ast.Assign) else [node.target] if isinstance(node, ast.AnnAssign) else []
        if any(isinstance(target, ast.Name) and target.id == "SHOWS" for target in targets):
            assert isinstance(node, ast.Assign | ast.AnnAssign) and node.value is not None
            shows: Mapping[str, str] = ast.literal_eval(node.value)
            return [NamedFigure(name, path.stem, summary) for name, summary in shows.items()]
    return []


def _place(figure: NamedFigure) -> tuple[Any, ...]:
    """Papers, then tables before figures, then numbers as numbers; of no paper last."""
    paper, _, rest = figure.name.partition("-")
    kind, number = re.match(r"(\D*)(\d*)", rest).groups()  # type: ignore[union-attr]
    return (
        [*PAPERS, paper].index(paper),
        ("table", "figure").index(kind) if kind in ("table", "figure") else 2,
        int(number or 0),
        rest,
    )


def show_figure(spec: FigureSpec) -> int:
    """Exit code 0. Raises BadInputError."""
    known = find()
    if spec.name not in known:
        raise BadInputError(unknown_name("figure", spec.name, known))
    suffix = None if spec.out is None else Path(spec.out).suffix
    if suffix not in (None, *TABLES, *PICTURES):
        raise BadInputError(f"--out {spec.out} ends in none of {', '.join(TABLES + PICTURES)}: name a file that does")
    if not os.path.isdir(spec.results):
        why = f"--results {spec.results} is no folder"
        if "results" in spec.model_fields_set:
            raise BadInputError(f"{why}: name the one that the records are in")
        complain(f"{why}: nothing that was measured here is shown")
    module = known[spec.name].loaded()
    if suffix in PICTURES and spec.name not in getattr(module, "PICTURES", ()):
        raise BadInputError(f"--out {spec.out}: there is no picture of {spec.name}: use {' or '.join(TABLES)}")
    try:
        if suffix in PICTURES:
            module.picture(spec.name, spec).savefig(spec.out, dpi=150)
            return 0
        made: list[PaperTable] = list(module.tables(spec.name, spec))
        text = "\n".join(each.markdown() for each in made)
        if spec.out is None:
            say(text.rstrip())
        elif suffix == ".csv":
            write_csv(Path(spec.out), [cell for each in made for cell in each.cells()])
        else:
            Path(spec.out).write_text(text, encoding="utf-8")
    except OSError as error:
        raise BadInputError(f"{error.filename or spec.out} cannot be used: {error.strerror}: name another file") from None
    return 0
