"""`harness ls`: systems, models, hardware profiles, figures and runs, one line each on stdout, or all that is known of one.

Nothing here imports torch, so that it takes no seconds: Note [Faces] in systems/registry.py, `Family.parameters`.
"""

from __future__ import annotations

import dataclasses
import json
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal

from pydantic import BaseModel, ConfigDict, Field

from harness import figures, names, store, summary
from harness.availability import faces, why_unavailable
from harness.flags import metavar, parse
from harness.option_texts import option_texts
from harness.output import complain, gives_json, progress_console, say
from harness.record import Record, Status
from harness.spec import KEPT, TRIALS, BadInputError, flag
from systems import registry
from systems.errors import UnavailableError
from systems.face import Abilities
from systems.messages import printable, unknown_name
from systems.sizes import format_size

MODEL_COLUMNS = (
    "model", "family", "label", "size", "parameters", "layers", "width", "heads", "vocabulary", "positions", "tokens", "notes",
)  # fmt: skip
RUN_COLUMNS = ("run", "status", "device", "mean step s", "tokens/s", "tag", "folder")
Row = tuple[str, ...]
Told = tuple[list[Row], Any]  # lines of cells for a person (a single one is a line of text), and the same as JSON


class ListSpec(BaseModel):
    """Name what to list."""

    model_config = ConfigDict(frozen=True, extra="forbid")


class SystemsSpec(ListSpec):
    """List the systems, or tell what one can do and its options."""

    name: str | None = Field(None, description="one system, whose abilities and options are told")


class ModelsSpec(ListSpec):
    """List the models that have a name, or tell the shape of one."""

    name: str | None = Field(None, description="one model, whose shape is told; also a folder, or module:function")
    family: str | None = Field(None, description="only the models of this family")


class HardwareSpec(ListSpec):
    """List the hardware profiles, or tell the numbers of one and their sources."""

    name: str | None = Field(None, description="one profile, or a file ending in .json")


class FiguresSpec(ListSpec):
    """List the tables and figures of papers that harness figure shows, or tell what one is."""

    name: str | None = Field(None, description="one figure, told in words; harness figure NAME shows it")


class RunsSpec(ListSpec):
    """List the records of runs, the newest first, or tell what one came to."""

    name: str | None = Field(None, description="one run, by its id or a part that no other has; with --json its whole record")
    results: str | None = Field(None, description=f"folder of the records; default: {KEPT} and {TRIALS}")
    system: str | None = Field(None, description="only runs of this system")
    model: str | None = Field(None, description="only runs of this model")
    status: Status | None = Field(None, description="only runs that ended so")
    tag: str | None = Field(None, description="only runs with this tag")
    sort: Literal["time", "step", "tokens/s"] = Field(
        "time", description="time: the newest first; step: the shortest first; tokens/s: the most first"
    )


EXAMPLES = {
    "systems": "harness ls systems elixir",
    "models": "harness ls models opt-1.3b",
    "hardware": "harness ls hardware h100-80g-x1",
    "figures": "harness ls figures",
    "runs": "harness ls runs --system elixir --status ok --sort step",
}
SUMMARIES = {
    "systems": "the systems, or one with its abilities and options",
    "models": "the models, or one with its shape",
    "hardware": "the hardware profiles, or one with all its numbers",
    "figures": "the tables and figures of papers that can be shown, or one in words",
    "runs": "the records of runs, with filters, or what one came to",
}


def list_asked(arguments: Sequence[str]) -> int:
    """The rest of a command line. The exit code. Raises BadInputError."""
    first, rest = (arguments[0], arguments[1:]) if arguments else ("", ())
    if first in ("-h", "--help"):
        say("usage: harness ls WHAT; harness ls WHAT --help")
        for what, summary in SUMMARIES.items():
            say(f"  {what:10}{summary}")
        say(f"example: {EXAMPLES['systems']}")
        return 0
    if not first or first.startswith("-"):
        raise BadInputError(f"what is missing: name one of {', '.join(EXAMPLES)}")
    if first not in EXAMPLES:
        raise BadInputError(unknown_name("list", first, EXAMPLES))
    help_too = [f"Example: {EXAMPLES[first]}", "With --json the list is one line of JSON."]

    def asked(spec: type[Any], positional: str | None = "name") -> Any:
        return parse(spec, rest, prog=f"harness ls {first}", positional=positional, help_too=help_too)

    if first == "systems":
        return _tell(systems(asked(SystemsSpec)))
    if first == "models":
        return _tell(models(asked(ModelsSpec)))
    if first == "hardware":
        return _tell(hardware(asked(HardwareSpec)))
    if first == "figures":
        return _tell(listed_figures(asked(FiguresSpec)))
    return _tell(runs(asked(RunsSpec)))


def _tell(told: Told) -> int:
    """Text by default even where stdout is no terminal: a list is looked through with grep too."""
    rows, tree = told
    if gives_json(only_asked=True):
        say(json.dumps(tree, allow_nan=False))
        return 0
    rows = [tuple(map(printable, row)) for row in rows]
    widths = [max(map(len, column)) for column in zip(*(row for row in rows if len(row) > 1), strict=True)]
    for row in rows:
        line = "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=False)) if len(row) > 1 else row[0]
        say(line.rstrip())
    return 0


def systems(spec: SystemsSpec) -> Told:
    if spec.name is not None:
        return _one_system(spec.name)
    rows: list[Row] = [("system", "")]
    tree = []
    for name, found in faces(registry.find()):
        summary = None if isinstance(found, UnavailableError) else found.summary
        why = found if isinstance(found, UnavailableError) else why_unavailable(found)
        said = summary or ""
        if why is not None:
            said = str(why).removeprefix(f"{name} is ")
        rows.append((name, said))
        tree.append({"name": name, "summary": summary, "unavailable": None if why is None else str(why)})
    return rows, tree


def _one_system(name: str) -> Told:
    names.check_system(name, ())
    try:
        face = registry.face(name)
    except UnavailableError as error:
        raise BadInputError(str(error)) from None
    why = why_unavailable(face)
    rows: list[Row] = [(f"{name}: {face.summary}",)]
    rows += [] if why is None else [(str(why),)]
    rows.append((f"can {', '.join(_abilities(face.abilities)) or 'train on one rank'}",))
    options = []
    texts = option_texts(face.Options)
    for option, field in face.Options.model_fields.items():
        default = "needed" if field.is_required() else _value(field.get_default(call_default_factory=True))
        rows.append((f"--option {option}=", metavar(field.annotation), default, texts.get(option, "")))
        options.append(
            {"name": option, "type": metavar(field.annotation), "default": default, "description": texts.get(option)}
        )
    tree = {"name": name, "summary": face.summary, "unavailable": None if why is None else str(why)}
    return rows, {**tree, "abilities": dataclasses.asdict(face.abilities), "options": options}


def _abilities(can: Abilities) -> Iterator[str]:
    told = {
        "train on several ranks": can.ranks,
        "keep optimizer states on a disk (--disk)": can.disk,
        "be traced (--trace)": can.trace,
        "tell its phases (--phases)": can.phases,
        f"train with the package {can.package}": can.package is not None,
        "run without a model": not can.model,
    }
    yield from (what for what, able in told.items() if able)


def _value(value: Any) -> str:
    """A default as it would be given."""
    return "none" if value is None else str(value).lower() if isinstance(value, bool) else str(value)


def short_count(parameters: int) -> str:
    """1315758080 -> '1.316B'."""
    for size, letter in ((10**9, "B"), (10**6, "M"), (10**3, "K")):
        if parameters >= size:
            return f"{parameters / size:.4g}{letter}"
    return str(parameters)


def models(spec: ModelsSpec) -> Told:
    from models import registry as models_registry

    if spec.family is not None:
        names.check_family(spec.family)
    if spec.name is not None:
        return _one_model(spec.name)
    rows: list[Row] = [MODEL_COLUMNS]
    tree = []
    for name in models_registry.names():
        shape = models_registry.resolve(name)
        if spec.family not in (None, shape.family):
            continue
        sizes = (shape.num_layers, shape.hidden_size, shape.num_heads, shape.vocab_size, shape.max_positions)
        texts = ["" if size is None else str(size) for size in sizes]
        parameters = models_registry.parameter_count(shape)
        counts = (short_count(parameters), str(parameters))
        tokens = f"{shape.batch_size} x {shape.seq_len}"
        rows.append((name, shape.family, shape.label, *counts, *texts, tokens, shape.notes))
        tree.append({**dataclasses.asdict(shape), "parameters": parameters})
    return rows, tree


def _one_model(name: str) -> Told:
    from models import registry as models_registry

    try:
        shape = models_registry.resolve(name)
        parameters = models_registry.parameter_count(shape)
    except ValueError as error:
        raise BadInputError(str(error)) from None
    tree = {**dataclasses.asdict(shape), "parameters": parameters}
    fields = [(field, _value(value)) for field, value in dataclasses.asdict(shape).items() if field != "name"]
    return [("model", name), ("parameters", f"{short_count(parameters)} ({parameters})"), *fields], tree


def hardware(spec: HardwareSpec) -> Told:
    from systems.planning import hardware as profiles

    try:
        if spec.name is not None:
            return _one_profile(profiles.load(spec.name), spec.name)
        found = {name: profiles.load(name) for name in profiles.names()}
    except ValueError as error:
        raise BadInputError(str(error)) from None
    rows: list[Row] = [("profile", "devices", "device", "device memory", "host memory", "disk", "source of its copies")]
    tree = []
    for name, one in found.items():
        sizes = (one.device_memory_bytes, one.host_memory_bytes, one.disk_bytes)
        memory = tuple("" if size is None else format_size(size.value) for size in sizes)
        rows.append((name, str(one.devices), one.device_name, *memory, one.h2d_bytes_per_s.source))
        tree.append({"name": name, **one.model_dump(mode="json", exclude={"other"})})
    return rows, tree


def _one_profile(found: Any, name: str) -> Told:
    """Every number, with where it comes from."""
    tree = found.model_dump(mode="json")
    rows: list[Row] = [("profile", name, found.description), ("device_name", found.device_name, "")]

    def add(figure: str, one: Any) -> None:
        if not isinstance(one, Mapping):
            return
        if "source" not in one:
            for part, inner in one.items():
                add(f"{figure}.{part}" if figure != "other" else part, inner)
        elif "value" in one:
            value = one["value"]
            shown = format_size(int(value)) if figure.endswith("memory_bytes") else f"{value:,.6g}"
            rows.append((figure, shown, one["source"]))
        else:
            rows.append((figure, f"{len(one.get('points') or one.get('rates') or ())} points", one["source"]))

    for figure, one in tree.items():
        add(figure, one)
    return rows, {"name": name, **tree}


def listed_figures(spec: FiguresSpec) -> Told:
    known = figures.find()
    if spec.name is not None and spec.name not in known:
        raise BadInputError(unknown_name("figure", spec.name, known))
    found = list(known.values()) if spec.name is None else [known[spec.name]]
    rows: list[Row] = [("figure", "paper", ""), *((each.name, each.paper, each.summary) for each in found)]
    tree = [{"name": each.name, "paper": each.paper, "summary": each.summary} for each in found]
    return rows, tree if spec.name is None else tree[0]


def _one_run(spec: RunsSpec, name: str) -> Told:
    """As at the run's end. What narrows a list has no place beside one run."""
    filters = sorted(spec.model_fields_set - {"name", "results"})
    if filters:
        raise BadInputError(f"{flag(filters[0])} is of a list, and {name} is one run: leave one of the two out")
    folders = store.folders_of(spec.results)
    (record,) = store.find(folders, [name])
    path = next(path for folder in folders if (path := folder / f"{record.run_id}.json").exists())
    rows: list[Row] = [("run", record.run_id), ("status", summary.ended(record)), ("started", record.started_at)]
    return [*rows, *summary.facts(record, path)], record.model_dump(mode="json")


def runs(spec: RunsSpec) -> Told:
    if spec.name is not None:
        return _one_run(spec, spec.name)
    if spec.system is not None:
        _warn_of_name(spec.system)
    found: list[tuple[Record, Path]] = []
    for folder in store.folders_of(spec.results):
        records, unreadable = store.read_all(folder)
        if spec.results is not None and not folder.is_dir():
            complain(f"--results {folder} is no folder: no run is kept there")
        for one in unreadable:
            complain(f"{one.path} is no record: {one.why}")
        shown = [record for record in records if _wanted(spec, record)]
        found += [(record, folder) for record in shown]
        if folder.is_dir():
            below = store.said_below(store.counts_below(folder))
            told = f"{len(shown)} of {len(records)} runs in {folder}{f'; {below}: --results lists them' if below else ''}"
            progress_console().print(printable(told), markup=False)
    rows: list[Row] = [RUN_COLUMNS]
    tree = []
    for record, folder in sorted(found, key=ORDERS[spec.sort]):
        figures = ((_step_s(record), ".4g"), (record.metrics.tokens_per_s, ",.1f"))
        texts = ["" if figure is None else format(figure, how) for figure, how in figures]
        device = record.resolved.device_label or ""
        rows.append((record.run_id, record.status, device, *texts, record.spec.tag or "", str(folder)))
        tree.append(
            {
                "run_id": record.run_id,
                "status": record.status,
                "system": record.spec.system,
                "model": record.spec.model,
                "device": record.resolved.device_label,
                "step_s": _step_s(record),
                "tokens_per_s": record.metrics.tokens_per_s,
                "tag": record.spec.tag,
                "started_at": record.started_at,
                "path": str(folder / f"{record.run_id}.json"),
            }
        )
    return rows, tree


def _warn_of_name(system: str) -> None:
    """Kept runs may be of a system that is here no more, so a name that nobody knows is no error."""
    known = registry.find()
    if system not in known:
        complain(unknown_name("system", system, known))


def _step_s(record: Record) -> float | None:
    return record.metrics.mean_step_time_s


def _wanted(spec: RunsSpec, record: Record) -> bool:
    asked = (
        (spec.system, record.spec.system),
        (spec.model, record.spec.model),
        (spec.status, record.status),
        (spec.tag, record.spec.tag),
    )
    return all(wanted is None or wanted == there for wanted, there in asked)


def _newest_first(found: tuple[Record, Path]) -> tuple[float, ...]:
    """By the time in the run's name, which sorts as text does: each character's number, negated."""
    return tuple(-ord(each) for each in found[0].run_id)


def _shortest_first(found: tuple[Record, Path]) -> tuple[float, ...]:
    step_s = _step_s(found[0])
    return (1.0 if step_s is None else 0.0, step_s or 0.0, *_newest_first(found))


def _most_first(found: tuple[Record, Path]) -> tuple[float, ...]:
    rate = found[0].metrics.tokens_per_s
    return (1.0 if rate is None else 0.0, -(rate or 0.0), *_newest_first(found))


ORDERS: dict[str, Callable[[tuple[Record, Path]], tuple[float, ...]]] = {
    "time": _newest_first,
    "step": _shortest_first,
    "tokens/s": _most_first,
}
