"""The command line: `harness run | compare | plan | max-scale | ...`. Bad input is one line, exit code 2.

The flags of `run` are the fields of `RunSpec`, those of other commands of theirs. Nothing here imports torch:
what only the model or the system can judge is judged in the run's own process.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib.util
import io
import os
import signal
import sys
import time
import types
import typing
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, Literal, TypeVar

import tyro
from pydantic import BaseModel, ConfigDict, Field, ValidationError, create_model
from rich.console import Console
from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

from harness import comparison, scale, store, trace
from harness.channel import LISTEN_S
from harness.compare import CompareSpec, Contender, StoredSpec, check_options, collect, entries, read_runs
from harness.launch import launch
from harness.output import complain, fill_standard_streams, progress_console, say
from harness.plan_spec import PlanSpec
from harness.record import Record, to_json
from harness.scale import BatchSpec, ScaleSpec
from harness.spec import BadInputError, RunSpec, flag, in_flags
from harness.stopping import Stop, stop_signals
from harness.table import show
from harness.wandb_log import Tracker
from systems import registry
from systems.errors import UnsupportedError
from systems.messages import invalid_value, one_line, printable, unknown_name
from systems.ranks.launchers import Launched, launched

OK, FAILED, BAD_INPUT, UNLIKE = 0, 1, 2, 3
INTERRUPTED = 128 + signal.SIGINT
COMMANDS = {
    "run": "train a model under a system and keep a record",
    "compare": "train a model under several systems, or take kept runs, and say which is faster",
    "plan": "say whether a model fits a machine that need not be here, and how fast it would train",
    "max-scale": "find the largest model that trains here",
    "max-batch": "find the largest batch that a model trains with here",
    "tables": "write the results tables in docs/results.md from the kept records",
    "profile": "measure this machine's roofs into a hardware profile",
    "ls": "list systems, models or runs",
    "doctor": "say what this machine lacks",
}
_Spec = TypeVar("_Spec", bound=BaseModel)


class ListSpec(BaseModel):
    """List what there is."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    what: Literal["systems", "models", "runs"] = Field(description="what to list")
    results: str = Field("results", description="folder of the records, for runs")


class DoctorSpec(BaseModel):
    """Say what this machine lacks, one line each, with what to do."""

    model_config = ConfigDict(frozen=True, extra="forbid")


def _takes_several(spec: type[BaseModel], field: str) -> bool:
    return typing.get_origin(spec.model_fields[field].annotation) is tuple


def _is_switch(spec: type[BaseModel], field: str) -> bool:
    """A flag that is there or not, without a value."""
    return spec.model_fields[field].annotation is bool


def _metavar(annotation: Any) -> str:
    """STEPS-like placeholder of a type: {cuda,cpu} for choices, INT, FLOAT, TEXT."""
    if typing.get_origin(annotation) is Literal:
        return "{" + ",".join(typing.get_args(annotation)) + "}"
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        known = [_metavar(part) for part in typing.get_args(annotation) if part is not type(None)]
        return "|".join(dict.fromkeys(known))
    if typing.get_origin(annotation) is typing.Annotated:
        return _metavar(typing.get_args(annotation)[0])
    return {int: "INT", float: "FLOAT"}.get(annotation, "TEXT")


def _text_rule(spec: type[BaseModel]) -> ConstructorRegistry:
    """tyro hands every value on as text: pydantic alone reads and judges values, so complaints are of one kind."""
    rules = ConstructorRegistry()

    @rules.primitive_rule
    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if info.type is spec:
            return None
        several = typing.get_origin(info.type) is tuple and typing.get_args(info.type)[-1:] == (Ellipsis,)
        return PrimitiveConstructorSpec(
            nargs="*" if several else 1,
            metavar="TEXT" if several else _metavar(info.type),
            instance_from_str=(lambda texts: tuple(texts)) if several else (lambda texts: texts[0]),
            is_instance=lambda value: True,
            str_from_instance=lambda value: [] if value is None or value == () else [str(value)],
        )

    return rules


def _without(spec: type[BaseModel], fields: frozenset[str]) -> type[BaseModel]:
    """The same for --help, but for flags that are refused."""
    kept: dict[str, Any] = {name: (field.annotation, field) for name, field in spec.model_fields.items() if name not in fields}
    return create_model(spec.__name__, __doc__=spec.__doc__, **kept)


def _collect(spec: type[BaseModel], arguments: Sequence[str], positional: str | None) -> list[str]:
    """The same arguments, each flag once, its values behind it. Raises BadInputError for what fits no field."""
    fields = {flag(field): field for field in spec.model_fields if field != positional}
    left_out: frozenset[str] = getattr(spec, "left_out", frozenset())
    given: dict[str, list[str]] = {}
    current = ""
    for token in arguments:
        name, equals, value = token.partition("=")
        if name.startswith("--"):
            if fields.get(name) in left_out:
                raise BadInputError(f"{name} is of a run and changes nothing here: leave it out")
            if name not in fields:
                raise BadInputError(unknown_name("flag", name, fields))
            if _is_switch(spec, fields[name]):
                if equals:
                    raise BadInputError(f"{name} takes no value: leave {equals}{value} out")
                given[name], current = [], ""
                continue
            current = name
            if not _takes_several(spec, fields[name]):
                given[name] = []
            given.setdefault(name, []).extend([value] if equals else [])
        elif current and (_takes_several(spec, fields[current]) or not given[current]):
            given[current].append(token)
        elif positional and positional not in given:
            given[positional] = [token]
        else:
            raise BadInputError(f"unexpected argument {token!r}" + (f" after {current}" if current else ""))
    for name, values in given.items():
        if not values and not _is_switch(spec, fields.get(name, name)):
            raise BadInputError(f"{name} needs a value")
    missing = [positional] if positional and positional not in given else []
    missing += [name for name, field in fields.items() if spec.model_fields[field].is_required() and name not in given]
    if missing:
        field = missing[0].lstrip("-").replace("-", "_")
        raise BadInputError(f"{missing[0]} is missing: {spec.model_fields[field].description}")
    return [token for name, values in given.items() for token in ([name] if name in fields else []) + values]


def parse(spec: type[_Spec], arguments: Sequence[str], *, prog: str, positional: str | None = None) -> _Spec:
    """Arguments as a spec. Raises BadInputError with one line; --help prints and exits as usual."""
    shown = _without(spec, getattr(spec, "left_out", frozenset())) if {"-h", "--help"} & set(arguments) else spec
    tyro_spec: Any = typing.Annotated[shown, tyro.conf.FlagCreatePairsOff]
    if positional:
        tyro_spec = typing.Annotated[tyro_spec, tyro.conf.PositionalRequiredArgs]
    if shown is not spec or {"-h", "--help"} & set(arguments):
        with _text_rule(shown):
            tyro.cli(tyro_spec, prog=prog, args=["--help"])
    collected = _collect(spec, arguments, positional)
    complaint = io.StringIO()
    try:
        with _text_rule(spec), contextlib.redirect_stderr(complaint):
            return typing.cast(_Spec, tyro.cli(tyro_spec, prog=prog, args=collected))
    except SystemExit as error:
        raise BadInputError(_complaint(error, complaint.getvalue(), positional)) from None


def _complaint(error: BaseException, printed: str, positional: str | None) -> str:
    """The pydantic error behind tyro's exit as one line; failing that, what tyro printed without its frame."""
    cause: BaseException | None = error
    while cause is not None and not isinstance(cause, ValidationError):
        cause = cause.__context__
    if cause is None:
        return one_line(printed.translate(str.maketrans("╭╮╰╯─│", "      ")))

    def told(field: str, given: Any) -> str:
        value = " ".join(given) if isinstance(given, tuple) else given
        return f"{field if field == positional else flag(field)} {value}"

    return invalid_value(cause, told)


@contextlib.contextmanager
def _one_line_errors() -> Iterator[list[int]]:
    """Tell bad input, and Ctrl-C, in one line; the exit code is in the list then."""
    code: list[int] = []
    try:
        yield code
    except KeyboardInterrupt:
        complain("interrupted")
        code.append(INTERRUPTED)
    except BadInputError as error:
        complain(in_flags(str(error)))
        code.append(BAD_INPUT)


def _refuse_launcher() -> None:
    """For commands that start runs of their own."""
    told = _launched()
    if told is not None:
        raise BadInputError(
            f"WORLD_SIZE is {told.size}: of all commands torchrun starts harness run alone: start this one without it, with "
            f"--ranks {told.size}"
        )


def _launched() -> Launched | None:
    try:
        return launched()
    except UnsupportedError as error:
        raise BadInputError(str(error)) from None


def _as_launched(spec: RunSpec, arguments: Sequence[str]) -> RunSpec:
    """With the ranks of the launcher that started this process as one of them."""
    told = _launched()
    if told is None:
        return spec
    if spec.ranks != told.size and any(token.partition("=")[0] == flag("ranks") for token in arguments):
        raise BadInputError(f"--ranks {spec.ranks}: WORLD_SIZE is {told.size}: leave --ranks out under torchrun")
    if spec.repeat > 1:
        raise BadInputError(f"--repeat {spec.repeat}: torchrun starts one run: call it as often instead")
    try:
        return RunSpec.model_validate(spec.model_dump() | {"ranks": told.size})
    except ValidationError as error:
        raise BadInputError(invalid_value(error, lambda field, given: f"{flag(field)} {given}")) from None


def _check_before_work(spec: RunSpec) -> None:
    """What can be found wrong without torch, before any process is started."""
    known = registry.find()
    if spec.system not in known:
        raise BadInputError(unknown_name("system", spec.system, known))
    if spec.wandb != "off" and importlib.util.find_spec("wandb") is None:
        raise BadInputError("--wandb needs the package wandb: pip install wandb, or use --wandb off")
    _check_name(spec.disk)
    store.prepare(Path(spec.results))
    if spec.trace is not None:
        trace.prepare(Path(spec.trace))


def _check_name(disk: str | None) -> None:
    """Of a folder: one that no machine could have is no matter of this machine's."""
    try:
        if disk is not None:
            os.stat(disk)
    except OSError as error:
        if error.errno in (errno.ENAMETOOLONG, errno.ELOOP):
            raise BadInputError(f"--disk {disk} cannot be used: {error.strerror}: name another folder") from None


def run(spec: RunSpec) -> int:
    """Every replicate in its own process; each record is kept and printed as it ends. The exit code.

    A replicate that fails does not end the others: exit code 1 says that not all of them went well.
    """
    told = launched()
    if told is not None and told.rank > 0:
        return _run_behind(spec)
    _check_before_work(spec)
    console = progress_console()
    tracker, code = _tracker(spec, console), OK
    with stop_signals() as stop:
        for replicate in range(spec.repeat):
            record = launch(spec, replicate=replicate, console=console, stop=stop, advise=replicate == 0)
            kept = _keep(record, spec, console, tracker)
            say(to_json(record))
            if record.status != "ok" or not kept:
                code = FAILED
            if not kept or stop.number is not None:
                break
    return stop.code or code


def _run_behind(spec: RunSpec) -> int:
    """Of a rank that is not the first, which alone keeps and prints. Where this one failed its launcher ends all as soon as
    this command ends, so the first one gets the time to keep its record.
    """
    with stop_signals() as stop:
        try:
            record = launch(spec, console=progress_console(), stop=stop)
        except BadInputError as error:
            why, code = in_flags(str(error)), BAD_INPUT
        else:
            if stop.code or record.reason is None:
                return stop.code
            why, code = record.reason.message, FAILED
    complain(why)
    time.sleep(2 * LISTEN_S)
    return code


def compare(spec: CompareSpec) -> int:
    """Run all systems interleaved, then compare. The exit code: 1 if a run failed, else 3 if a pair is refused, else 0."""
    _refuse_launcher()
    found = entries(spec)
    for entry in found:
        _check_before_work(entry.spec)
    check_options(found)
    console = progress_console()
    tracker = _tracker(spec, console)
    lost: list[Record] = []
    with stop_signals() as stop:

        def execute(entry: Contender, replicate: int) -> Record | None:
            return _execute(entry, replicate, console, stop, lost, tracker)

        records = collect(found, spec.repeat, execute)
    code = _tell(comparison.compare(records, spec=spec.model_dump(mode="json")), console)
    return stop.code or (FAILED if lost else code)


def _execute(
    entry: Contender, replicate: int, console: Console, stop: Stop, lost: list[Record], tracker: Tracker
) -> Record | None:
    """One run of a comparison; None if there shall be no further one. lost: takes up a record that could not be kept."""
    if lost or stop.number is not None:
        return None
    console.print(f"{entry.label}: run {replicate + 1} of {entry.spec.repeat}", markup=False)
    record = launch(entry.spec, replicate=replicate, console=console, stop=stop)
    if not _keep(record, entry.spec, console, tracker):
        say(to_json(record))
        lost.append(record)
    return record


def search(spec: ScaleSpec | BatchSpec) -> int:
    """Try sizes, each in its own process. The exit code: 0 if one fits."""
    _refuse_launcher()
    _check_before_work(spec)
    console = progress_console()
    tracker = _tracker(spec, console)
    with stop_signals() as stop:

        def one(asked: RunSpec) -> Record | None:
            record = launch(asked, replicate=0, console=console, stop=stop)
            kept = _keep(record, asked, console, tracker)
            if not kept:
                say(to_json(record))
            return record if kept and stop.number is None else None

        found = scale.search(spec, one, console, lambda: stop.number is not None)
    scale.show(found, console)
    say(scale.to_json(found))
    return stop.code or (OK if found.largest is not None and found.failed is None else FAILED)


def compare_kept(spec: StoredSpec) -> int:
    """The same of records that are there already."""
    return _tell(comparison.compare(read_runs(spec)), progress_console())


def _tell(made: comparison.Comparison, console: Console) -> int:
    show(made, console)
    say(comparison.to_json(made))
    return FAILED if made.failed else UNLIKE if made.refusals else OK


def _tracker(spec: RunSpec, console: Console) -> Tracker:
    return Tracker(spec.wandb, tell=lambda line: console.print(line, markup=False), warn=complain)


def _keep(record: Record, spec: RunSpec, console: Console, tracker: Tracker) -> bool:
    """Write a record and tell how the run ended. False if it cannot be kept: then no further run is worth its time."""
    try:
        path = store.write(record, Path(spec.results))
    except store.StoreError as error:
        complain(str(error))
        return False
    tracker.log(record)
    _tell_end(record, path, console)
    return True


def _tell_end(record: Record, path: Path, console: Console) -> None:
    said = f"{record.status}: {record.reason.message}" if record.reason else record.status
    console.print(printable(f"{said} ({path})"), markup=False)
    for line in record.reason.advice if record.reason else ():
        console.print(printable(f"try: {line}"), markup=False)
    for doubt in record.doubts:
        console.print(f"doubt: {doubt.code}: {doubt.seen}; may be {doubt.cause}; {doubt.advice}", markup=False)


def _check_text(arguments: Sequence[str]) -> None:
    """A record cannot hold them, nor a process be told them: raises BadInputError for bytes that are no UTF-8."""
    for token in arguments:
        try:
            token.encode()
        except UnicodeEncodeError:
            raise BadInputError(f"the argument {os.fsencode(token)!r} is not UTF-8: name it in UTF-8") from None


def _usage() -> str:
    rows = [f"  {name:10}{what}" for name, what in COMMANDS.items()]
    return "\n".join(["usage: harness COMMAND [FLAGS]; harness COMMAND --help", *rows])


@contextlib.contextmanager
def _uncollected() -> Iterator[None]:
    """No search for unreachable cycles: what is imported and planned stays, and going through it again takes seconds."""
    collecting = gc.isenabled()
    gc.disable()
    try:
        yield
    finally:
        if collecting:
            gc.enable()


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point. The exit code: 0 ok, 1 a run failed or a plan does not fit, 2 bad input, 3 a comparison refuses, 130
    Ctrl-C (128 and the signal's number for any other that ends a run).
    """
    fill_standard_streams()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        say(_usage())
        return OK if given else BAD_INPUT
    command, rest = given[0], given[1:]
    with _one_line_errors() as code:
        _check_text(given)
        if command == "run":
            return run(_as_launched(parse(RunSpec, rest, prog="harness run"), rest))
        if command == "compare":
            if any(token.partition("=")[0] == flag("runs") for token in rest):
                return compare_kept(parse(StoredSpec, rest, prog="harness compare"))
            return compare(parse(CompareSpec, rest, prog="harness compare"))
        if command == "plan":
            wanted = parse(PlanSpec, rest, prog="harness plan")
            with _uncollected():
                from harness.plan import plan

                return plan(wanted)
        if command == "max-scale":
            return search(parse(ScaleSpec, rest, prog="harness max-scale"))
        if command == "max-batch":
            return search(parse(BatchSpec, rest, prog="harness max-batch"))
        if command == "ls":
            from harness.listing import list_what

            spec = parse(ListSpec, rest, prog="harness ls", positional="what")
            return list_what(spec.what, Path(spec.results))
        if command == "profile":
            from harness.profile import ProfileSpec, take_profile

            return take_profile(parse(ProfileSpec, rest, prog="harness profile"))
        if command == "tables":
            from harness.tables import TablesSpec, write_tables

            return write_tables(parse(TablesSpec, rest, prog="harness tables"))
        if command == "doctor":
            parse(DoctorSpec, rest, prog="harness doctor")
            from harness.doctor import examine

            return examine()
        raise BadInputError(unknown_name("command", command, COMMANDS))
    return code[0] if code else FAILED
