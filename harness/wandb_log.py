"""A finished record, logged to Weights & Biases: per-step curves, and the derived numbers as the run's summary.

After the run and not during it, so that nothing is sent from inside a timed step, and all that the package started for it is
ended before the next run begins. In a process of its own (this file is its program), because what the package does there is not
the run's: it may wait for a network, ask for a key, take stdout over or end the process.
"""

from __future__ import annotations

import importlib
import os
import signal
import subprocess
import sys
import tempfile
from collections.abc import Callable, Sequence
from contextlib import suppress
from pathlib import Path
from typing import Any, Literal

from harness.output import say
from harness.record import Record, to_json
from systems.messages import one_line

PROJECT = "offload-training"
WAIT_S = 120.0  # for a record to be taken
_TAKEN, _NOT_TAKEN = "the record was logged", "the record was not logged: "
_SETTINGS = {"WANDB_CONSOLE": "off", "WANDB_INIT_TIMEOUT": "60", "PYTHONUNBUFFERED": "1"}

Mode = Literal["off", "offline", "online"]


class Tracker:
    """Logs the records of one command. The first that is not taken is told in a line, and no further one is tried.

    tell: takes what the package says, a line a call. warn: takes that line.
    """

    def __init__(self, mode: Mode, *, tell: Callable[[str], None], warn: Callable[[str], None]) -> None:
        self._mode, self._tell, self._warn = mode, tell, warn

    def log(self, record: Record) -> None:
        if self._mode == "off":
            return
        lines = _log_apart(record, self._mode)
        if _TAKEN in lines:
            for line in lines:
                self._tell(line)
            return
        told = (
            [line.removeprefix(_NOT_TAKEN) for line in lines if line.startswith(_NOT_TAKEN)]
            or lines[-1:]
            or ["it said nothing"]
        )
        self._warn(f"--wandb {self._mode}: this record is kept but not logged, nor are later ones of this command: {told[-1]}")
        self._mode = "off"


def _log_apart(record: Record, mode: Mode) -> list[str]:
    """What the process said that was to log it."""
    root = str(Path(__file__).resolve().parents[1])
    path = os.pathsep.join([root, *filter(None, [os.environ.get("PYTHONPATH")])])
    command = [sys.executable, "-m", "harness.wandb_log", mode, str(os.getpid())]
    own = os.environ | _SETTINGS | {"PYTHONPATH": path}
    more = b""
    with tempfile.TemporaryFile() as told:  # no pipe: what it leaves behind would hold it open
        try:
            process = subprocess.Popen(
                command, stdin=subprocess.PIPE, stdout=told, stderr=told, env=own, start_new_session=True
            )
        except OSError as error:
            return [f"{_NOT_TAKEN}{error}"]
        with process:
            try:
                process.communicate(to_json(record).encode(), timeout=WAIT_S)
            except subprocess.TimeoutExpired:
                more = f"\n{_NOT_TAKEN}no answer within {WAIT_S:g} s".encode()
            finally:
                with suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # of its own session: what it left behind, too
        told.seek(0)
        said = told.read() + more
    return [line for line in said.decode("utf-8", "replace").splitlines() if line.strip()]


def _curves(record: Record) -> list[dict[str, float]]:
    """One dict of what is known of it for each step the run took itself."""
    lists: dict[str, Sequence[float | None]] = {
        "loss": record.metrics.loss,
        "grad_norm_before_clip": record.metrics.grad_norm_before_clip,
        "step_time_s": record.samples.step_time_s,
        "tokens_per_s": _throughput(record),
        "learning_rate": record.samples.learning_rate,
    }
    steps = max((len(values) for values in lists.values()), default=0)
    rows: list[dict[str, float]] = [{} for _ in range(steps)]
    for name, values in lists.items():
        for row, value in zip(rows, values, strict=False):
            if value is not None:
                row[name] = value
    for step, loss in zip(record.metrics.eval_step, record.metrics.eval_loss, strict=True):
        if loss is not None:
            rows[step - 1 - (record.resolved.steps_before or 0)]["eval_loss"] = loss
    return rows


def _throughput(record: Record) -> list[float]:
    """Of each step, between undrained boundaries; the record's own is of the timed region as a whole."""
    tokens = record.resolved.tokens_per_step
    return [] if tokens is None else [tokens / seconds for seconds in record.samples.step_time_s if seconds > 0]


def log(record: Record, mode: Mode) -> None:
    """In this process. Raises whatever the package raises."""
    wandb: Any = importlib.import_module("wandb")
    tree = record.model_dump(mode="json")
    config = {"spec": tree["spec"], "resolved": tree["resolved"], "environment": tree["environment"]}
    with wandb.init(project=PROJECT, name=record.run_id, mode=mode, config=config, tags=[record.status]) as run:
        for step, row in enumerate(_curves(record), start=1 + (record.resolved.steps_before or 0)):
            run.log(row, step=step)
        scalars = {key: value for key, value in tree["metrics"].items() if not isinstance(value, list)}
        run.summary.update({**scalars, "status": record.status, **{f"memory.{k}": v for k, v in tree["memory"].items()}})


def main(mode: Mode, parent_pid: int) -> None:
    from harness.worker import die_with

    die_with(parent_pid)
    record = Record.model_validate_json(sys.stdin.buffer.read())
    try:
        log(record, mode)
    except (Exception, SystemExit) as error:  # noqa: BLE001 - the service's own errors are many; the record is written already
        say(f"{_NOT_TAKEN}{one_line(f'{type(error).__name__}: {error}')}")
        sys.exit(1)
    say(_TAKEN)


if __name__ == "__main__":
    main(sys.argv[1], int(sys.argv[2]))  # type: ignore[arg-type]  # one of the modes, from the parent
