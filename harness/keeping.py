"""A record as its run ends: kept in its folder, logged where that is asked for, and told."""

from __future__ import annotations

from pathlib import Path
from typing import Literal

from rich.console import Console

from harness import store, summary
from harness.output import complain, gives_json, result_console, say
from harness.record import Record, to_json
from harness.spec import RunSpec
from harness.wandb_log import Tracker
from systems.messages import printable


def tracker_of(mode: Literal["off", "offline", "online"], console: Console) -> Tracker:
    return Tracker(mode, tell=lambda line: console.print(printable(line), markup=False), warn=complain)


def keep(record: Record, spec: RunSpec, console: Console, tracker: Tracker, *, summed_up: bool = False) -> bool:
    """Write a record and tell how the run ended. False if it cannot be kept: then no further run is worth its time.

    summed_up: to a person in all that matters; else, and to a program, in the lines that say what went wrong.
    """
    try:
        path = store.write(record, store.folder_of(spec, record.resolved.device))
    except store.StoreError as error:
        complain(str(error))
        say(to_json(record))
        return False
    tracker.log(record)
    if summed_up and not gives_json():
        summary.show(record, path, result_console())
    else:
        _tell_end(record, path, console)
    return True


def _tell_end(record: Record, path: Path, console: Console) -> None:
    said = f"{record.status}: {record.reason.message}" if record.reason else record.status
    console.print(printable(f"{said} ({path})"), markup=False)
    for line in record.reason.advice if record.reason else ():
        console.print(printable(f"try: {line}"), markup=False)
    for doubt in record.doubts:
        console.print(f"doubt: {doubt.code}: {doubt.seen}; may be {doubt.cause}; {doubt.advice}", markup=False)
