"""`harness ls`: systems, models and runs, one line each on stdout."""

from __future__ import annotations

import sys
from pathlib import Path

from harness import store
from systems import registry
from systems.registry import UnavailableError


def list_what(what: str, results: Path) -> int:
    rows = {"systems": _systems, "models": _models, "runs": lambda: _runs(results)}[what]()
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True))
        sys.stdout.write(line.rstrip() + "\n")
    return 0


def _systems() -> list[tuple[str, ...]]:
    rows: list[tuple[str, ...]] = [("system", "")]
    for name, entry in registry.find().items():
        try:
            rows.append((name, registry.get(name, {name: entry}).summary))
        except UnavailableError as error:
            rows.append((name, str(error).partition(" is ")[2]))
    return rows


def _models() -> list[tuple[str, ...]]:
    from models import registry as models_registry

    rows: list[tuple[str, ...]] = [
        ("model", "family", "layers", "width", "heads", "vocabulary", "positions", "tokens", "label", "notes")
    ]
    for name in models_registry.names():
        shape = models_registry.resolve(name)
        sizes = (shape.num_layers, shape.hidden_size, shape.num_heads, shape.vocab_size, shape.max_positions)
        texts = ["" if size is None else str(size) for size in sizes]
        rows.append((name, shape.family, *texts, f"{shape.batch_size} x {shape.seq_len}", shape.label, shape.notes))
    return rows


def _runs(results: Path) -> list[tuple[str, ...]]:
    records, unreadable = store.read_all(results)
    rows: list[tuple[str, ...]] = [("run", "status", "device", "step s", "tokens/s", "tag")]
    for record in records:
        figures = (record.metrics.mean_step_time_s, record.metrics.tokens_per_s)
        texts = ["" if figure is None else f"{figure:.4g}" for figure in figures]
        device = record.resolved.device_label or ""
        rows.append((record.run_id, record.status, device, *texts, record.spec.tag or ""))
    for one in unreadable:
        sys.stderr.write(f"harness: {one.path} is no record: {one.why}\n")
    return rows
