"""`harness ls`: systems, models and runs, one line each on stdout."""

from __future__ import annotations

from pathlib import Path
from typing import TYPE_CHECKING

from harness import store
from harness.availability import load_all
from harness.output import complain, say
from systems import registry
from systems.errors import UnavailableError
from systems.messages import printable

if TYPE_CHECKING:
    from models.shape import ModelShape

MODEL_COLUMNS = (
    "model", "family", "label", "size", "parameters", "layers", "width", "heads", "vocabulary", "positions", "tokens", "notes",
)  # fmt: skip
COUNTED_AT = (1, 2)  # layers


def list_what(what: str, results: Path) -> int:
    found = {"systems": _systems, "models": _models, "runs": lambda: _runs(results)}[what]()
    rows = [tuple(map(printable, row)) for row in found]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        say(line.rstrip())
    return 0


def _systems() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("system", "")]
    for name, found in load_all(registry.find()):
        said = str(found).removeprefix(f"{name} is ") if isinstance(found, UnavailableError) else found.summary
        rows.append((name, said))
    return rows


def count_parameters(shape: ModelShape) -> int:
    """Exact, a tied one counted once. Layers are alike, so a deep model is counted at two depths and drawn out."""
    from models.registry import parameter_count

    shallow, deeper = COUNTED_AT
    if shape.num_layers > deeper:
        try:
            few, more = (parameter_count(shape.with_overrides({"num_layers": layers})) for layers in COUNTED_AT)
            return few + (more - few) * (shape.num_layers - shallow)
        except ValueError:
            pass  # a shape that ties other fields to its depth is built whole
    return parameter_count(shape)


def short_count(parameters: int) -> str:
    """1315758080 -> '1.316B'."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= size:
            return f"{parameters / size:.4g}{letter}"
    return str(parameters)


def _models() -> list[tuple[str, ...]]:
    from models import registry as models_registry

    rows: list[tuple[str, ...]] = [MODEL_COLUMNS]
    for name in models_registry.names():
        shape = models_registry.resolve(name)
        sizes = (shape.num_layers, shape.hidden_size, shape.num_heads, shape.vocab_size, shape.max_positions)
        texts = ["" if size is None else str(size) for size in sizes]
        parameters = count_parameters(shape)
        counts = (short_count(parameters), str(parameters))
        tokens = f"{shape.batch_size} x {shape.seq_len}"
        rows.append((name, shape.family, shape.label, *counts, *texts, tokens, shape.notes))
    return rows


def _runs(results: Path) -> list[tuple[str, ...]]:
    records, unreadable = store.read_all(results)
    if not results.is_dir():
        complain(f"--results {results} is no folder: no run is kept there")
    rows: list[tuple[str, ...]] = [("run", "status", "device", "step s", "tokens/s", "tag")]
    for record in records:
        figures = ((record.metrics.mean_step_time_s, ".4g"), (record.metrics.tokens_per_s, ",.1f"))
        texts = ["" if figure is None else format(figure, how) for figure, how in figures]
        device = record.resolved.device_label or ""
        rows.append((record.run_id, record.status, device, *texts, record.spec.tag or ""))
    for one in unreadable:
        complain(f"{one.path} is no record: {one.why}")
    return rows
