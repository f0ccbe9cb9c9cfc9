"""Starts the command line as a process, and finds out which processes it left."""

from __future__ import annotations

import os
import subprocess
import sys
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

from harness import launch

ROOT = Path(__file__).resolve().parents[2]
MARK = "HARNESS_TEST_MARK"
START_S = 60.0  # a loaded machine takes its time
LIGHT = (*launch.WORKER[:-1], "tests.harness.light_worker")
_HARNESS_WITH_LIGHT_WORKER = f"""
import sys
from harness import cli, launch
launch.WORKER = {LIGHT!r}
sys.exit(cli.main())
"""


def command_line(*arguments: str, light: bool = False) -> list[str]:
    """light: runs are made by a stand-in for the worker that starts at once."""
    return [sys.executable, *(("-c", _HARNESS_WITH_LIGHT_WORKER) if light else ("-m", "harness")), *arguments]


def environment(mark: str = "", more: Mapping[str, str] | None = None) -> dict[str, str]:
    return os.environ | {MARK: mark, "OMP_NUM_THREADS": "1"} | dict(more or {})


def start(*arguments: str, light: bool = False, mark: str = "", **more: Any) -> subprocess.Popen[str]:
    """more: of subprocess.Popen; env is added to this process's."""
    given: dict[str, Any] = {"cwd": ROOT, "stdout": subprocess.PIPE, "stderr": subprocess.PIPE, "text": True} | more
    given["env"] = environment(mark, more.get("env"))
    return subprocess.Popen(command_line(*arguments, light=light), **given)


def dummy(results: Path, *flags: str, options: tuple[str, ...] = ()) -> list[str]:
    """Arguments of a small run of the scripted system."""
    arguments = ["run", "--system", "dummy", "--model", "opt-tiny", "--device", "cpu", "--steps", "4", "--warmup", "1"]
    return [*arguments, "--results", str(results), *flags, *(["--option", *options] if options else [])]


def marked(mark: str) -> set[int]:
    """Processes that inherited the mark, zombies left out."""
    found = set()
    for folder in Path("/proc").glob("[0-9]*"):
        try:
            if f"{MARK}={mark}".encode() in (folder / "environ").read_bytes().split(b"\0"):
                found.add(int(folder.name))
        except OSError:
            continue
    return found


def wait_for(condition: Callable[[], bool], seconds: float) -> bool:
    until = time.monotonic() + seconds
    while time.monotonic() < until:
        if condition():
            return True
        time.sleep(0.05)
    return condition()
