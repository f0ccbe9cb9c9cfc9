"""The command line: `harness run | compare | plan | max-scale | ...`. Bad input is one line, exit code 2.

The flags of `run` are the fields of `RunSpec`, those of other commands of theirs. Nothing here imports torch:
what only the model or the system can judge is judged in the run's own process.
"""

from __future__ import annotations

import contextlib
import errno
import gc
import importlib.util
import os
import signal
import sys
import time
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import TypeVar

from pydantic import BaseModel, ConfigDict, ValidationError
from rich.console import Console

from harness import comparison, names, scale, store, sweep, trace
from harness.channel import LISTEN_S
from harness.compare import CompareSpec, Contender, StoredSpec, check_options, collect, entries, read_runs
from harness.flags import parse
from harness.keeping import keep, tracker_of
from harness.launch import launch
from harness.output import (
    complain,
    fill_standard_streams,
    json_asked,
    progress_console,
    result_console,
    say,
    say_json,
    show_notices,
)
from harness.plan_spec import PlanSpec
from harness.record import Record, to_json
from harness.scale import BatchSpec, ScaleSpec
from harness.spec import BadInputError, RunSpec, flag, in_flags
from harness.stopping import Stop, stop_signals
from harness.sweep import SweepSpec
from harness.table import show
from harness.wandb_log import Tracker
from systems.errors import UnsupportedError
from systems.messages import invalid_value, printable, unknown_name
from systems.ranks.launchers import Launched, launched

OK, FAILED, BAD_INPUT, UNLIKE = 0, 1, 2, 3
INTERRUPTED = 128 + signal.SIGINT
OF_RECORDS = ("ls", "export", "ledger", "report", "check")
GIVE_JSON = ("run", "compare", "plan", "max-scale", "max-batch", "sweep", "profile", *OF_RECORDS)
JSON_HELP = "With --json the result is one line of JSON, the last on stdout, as it is wherever stdout is no terminal."
EXAMPLES = {
    "run": "harness run --system elixir --model opt-tiny --device cpu --device-memory 6MiB",
    "compare": "harness compare --system elixir --system resident --model opt-tiny --device cpu",
    "plan": "harness plan --system all --model ps-4b --hardware h100-80g-x1 --recompute full",
    "max-scale": "harness max-scale --system elixir --model opt-tiny --device cpu --device-memory 6MiB --most 24",
    "max-batch": "harness max-batch --system elixir --model opt-tiny --device cpu --device-memory 6MiB --most 64",
    "sweep": "harness sweep 10-h200-speed --group ps-4b --for 25 --archive records.tar.gz",
    "tables": "harness tables --check",
    "ledger": "harness ledger --paper h3t",
    "report": "harness report --out report.html",
    "check": "harness check",
    "export": "harness export --out records.csv",
    "figure": "harness figure patrickstar-table4",
    "profile": "harness profile --out machine.json",
    "doctor": "harness doctor",
}
COMMANDS = {
    "run": "train a model under a system and keep a record",
    "compare": "train a model under several systems, or take kept runs, and say which is faster",
    "plan": "say whether a model fits a machine that need not be here, and how fast it would train",
    "max-scale": "find the largest model that trains here",
    "max-batch": "find the largest batch that a model trains with here",
    "sweep": "run what a table's cells still want, to be stopped and gone on with at any time",
    "tables": "write the results tables in docs/results.md from the kept records",
    "ledger": "say which of the papers' claims the kept records confirm",
    "report": "write one HTML page: which strategy when, and whether what the papers say holds here",
    "check": "check what is kept: numbers, digests, pages, and that claims were written first",
    "export": "write the records as one table for other programs",
    "figure": "show a table or figure of a paper, beside what was measured and simulated here",
    "profile": "measure this machine's roofs into a hardware profile",
    "ls": "list systems, models, hardware, figures or runs, or tell of one",
    "doctor": "say what this machine lacks",
}
_Spec = TypeVar("_Spec", bound=BaseModel)


class DoctorSpec(BaseModel):
    """Say what this machine lacks, one line each, with what to do."""

    model_config = ConfigDict(frozen=True, extra="forbid")


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
    names.check_run(spec)
    if spec.wandb != "off" and importlib.util.find_spec("wandb") is None:
        raise BadInputError("--wandb needs the package wandb: pip install wandb, or use --wandb off")
    _check_name(spec.disk)
    store.prepare(store.folder_of(spec))
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
    tracker, code = tracker_of(spec.wandb, console), OK
    with stop_signals() as stop:
        for replicate in range(spec.repeat):
            record = launch(spec, replicate=replicate, console=console, stop=stop, advise=replicate == 0)
            kept = keep(record, spec, console, tracker, summed_up=True)
            if kept:
                say_json(to_json(record))
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
    tracker = tracker_of(spec.wandb, console)
    lost: list[Record] = []
    with stop_signals() as stop:

        def execute(entry: Contender, replicate: int) -> Record | None:
            return _execute(entry, replicate, console, stop, lost, tracker)

        records = collect(found, spec.repeat, execute)
    code = _tell(comparison.compare(records, spec=spec.model_dump(mode="json")))
    return stop.code or (FAILED if lost else code)


def _execute(
    entry: Contender, replicate: int, console: Console, stop: Stop, lost: list[Record], tracker: Tracker
) -> Record | None:
    """One run of a comparison; None if there shall be no further one. lost: takes up a record that could not be kept."""
    if lost or stop.number is not None:
        return None
    console.print(printable(f"{entry.label}: run {replicate + 1} of {entry.spec.repeat}"), markup=False)
    record = launch(entry.spec, replicate=replicate, console=console, stop=stop)
    if not keep(record, entry.spec, console, tracker):
        lost.append(record)
    return record


def search(spec: ScaleSpec | BatchSpec) -> int:
    """Try sizes, each in its own process. The exit code: 0 if one fits."""
    _refuse_launcher()
    _check_before_work(spec)
    console = progress_console()
    tracker = tracker_of(spec.wandb, console)
    with stop_signals() as stop:

        def one(asked: RunSpec) -> Record | None:
            record = launch(asked, replicate=0, console=console, stop=stop)
            kept = keep(record, asked, console, tracker)
            return record if kept and stop.number is None else None

        found = scale.search(spec, one, console, lambda: stop.number is not None)
    scale.show(found, result_console())
    say_json(scale.to_json(found))
    return stop.code or (OK if found.largest is not None and found.failed is None else FAILED)


def compare_kept(spec: StoredSpec) -> int:
    """The same of records that are there already."""
    return _tell(comparison.compare(read_runs(spec)))


def _tell(made: comparison.Comparison) -> int:
    show(made, result_console())
    say_json(comparison.to_json(made))
    return FAILED if made.failed else UNLIKE if made.refusals else OK


def _check_text(arguments: Sequence[str]) -> None:
    """A record cannot hold them, nor a process be told them: raises BadInputError for bytes that are no UTF-8."""
    for token in arguments:
        try:
            token.encode()
        except UnicodeEncodeError:
            raise BadInputError(f"the argument {os.fsencode(token)!r} is not UTF-8: name it in UTF-8") from None


def _usage() -> str:
    rows = [f"  {name:10}{what}" for name, what in COMMANDS.items()]
    return "\n".join(["usage: harness COMMAND [FLAGS]; harness COMMAND --help", *rows, f"example: {EXAMPLES['run']}"])


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


def _take_json(command: str, arguments: Sequence[str]) -> tuple[bool, list[str]]:
    """Whether --json is among the arguments of a command that has a result, and the others."""
    if command not in GIVE_JSON:
        return False, list(arguments)
    for token in arguments:
        if token.startswith("--json="):
            raise BadInputError(f"--json takes no value: leave {token.removeprefix('--json')} out")
    kept = [token for token in arguments if token != "--json"]
    return len(kept) < len(arguments), kept


def _asked(spec: type[_Spec], command: str, arguments: Sequence[str], *, positional: str | None = None) -> _Spec:
    told = [f"Example: {EXAMPLES[command]}", *([JSON_HELP] if command in GIVE_JSON else [])]
    return parse(spec, arguments, prog=f"harness {command}", positional=positional, help_too=told)


def _carry_out(command: str, rest: Sequence[str]) -> int:
    if command == "run":
        return run(_as_launched(_asked(RunSpec, command, rest), rest))
    if command == "compare":
        if any(token.partition("=")[0] == flag("runs") for token in rest):
            return compare_kept(_asked(StoredSpec, command, rest))
        return compare(_asked(CompareSpec, command, rest))
    if command == "plan":
        wanted = _asked(PlanSpec, command, rest)
        names.check_plan(wanted)
        with _uncollected():
            from harness.plan import plan

            return plan(wanted)
    if command == "max-scale":
        return search(_asked(ScaleSpec, command, rest))
    if command == "max-batch":
        return search(_asked(BatchSpec, command, rest))
    if command == "sweep":
        _refuse_launcher()
        return sweep.sweep_table(_asked(SweepSpec, command, rest, positional="table"))
    if command == "ls":
        from harness.listing import list_asked

        return list_asked(rest)
    if command == "profile":
        from harness.profile_spec import ProfileSpec

        asked = _asked(ProfileSpec, command, rest)
        from harness.profile import take_profile

        return take_profile(asked)
    if command == "figure":
        from harness.figures import FigureSpec, show_figure

        return show_figure(_asked(FigureSpec, command, rest, positional="name"))
    if command == "tables":
        from harness.tables import TablesSpec, write_tables

        return write_tables(_asked(TablesSpec, command, rest))
    if command == "ledger":
        from harness.ledger import LedgerSpec, show_ledger

        return show_ledger(_asked(LedgerSpec, command, rest))
    if command == "report":
        from harness.report.page import ReportSpec, write_report

        return write_report(_asked(ReportSpec, command, rest))
    if command == "check":
        from harness.check import CheckSpec, check

        return check(_asked(CheckSpec, command, rest))
    if command == "export":
        from harness.export import ExportSpec, export

        return export(_asked(ExportSpec, command, rest))
    if command == "doctor":
        _asked(DoctorSpec, command, rest)
        from harness.doctor import examine

        return examine()
    raise BadInputError(unknown_name("command", command, COMMANDS))


def main(arguments: Sequence[str] | None = None) -> int:
    """The entry point. The exit code: 0 ok, 1 a run failed or a plan does not fit, 2 bad input, 3 a comparison refuses, 130
    Ctrl-C (128 and the signal's number for any other that ends a run).
    """
    fill_standard_streams()
    show_notices()
    given = list(sys.argv[1:] if arguments is None else arguments)
    if not given or given[0] in ("-h", "--help"):
        say(_usage())
        return OK if given else BAD_INPUT
    with _one_line_errors() as code:
        _check_text(given)
        asked, rest = _take_json(given[0], given[1:])
        with json_asked(asked):
            return _carry_out(given[0], rest)
    return code[0] if code else FAILED
