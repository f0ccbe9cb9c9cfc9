"""Exceptions and deaths as statuses and reasons (cases C36 and C48)."""

from __future__ import annotations

import errno
import os
import resource
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

from harness.failures import LOG_LINES, Death, from_death, from_exception
from systems.errors import BudgetError, DivergedError, OutOfMemoryError, UnavailableError, UnsupportedError

GIB = 1 << 30
ROOM = 5 << 20
CUDA_MESSAGE = (
    "CUDA out of memory. Tried to allocate 2.00 GiB. GPU 0 has a total capacity of 79.11 GiB of which 1.50 GiB is free."
)
CUDA_BUDGET_MESSAGE = (
    CUDA_MESSAGE + " Including non-PyTorch memory, this process has 1.75 GiB memory in use. 2.00 GiB allowed; "
    "Of the allocated memory 1.50 GiB is allocated by PyTorch, and 256.00 MiB is reserved by PyTorch but unallocated."
)
CPU_MESSAGE = (
    "[enforce fail at alloc_cpu.cpp:125] DefaultCPUAllocator: can't allocate memory: you tried to allocate 4096 bytes."
)


@pytest.mark.parametrize(
    ("error", "status", "expected"),
    [
        (BudgetError("too small", tier="host", need=2, have=1), "refused", ("host", 2, 1)),
        (UnsupportedError("cannot"), "refused", (None, None, None)),
        (UnavailableError("missing"), "unavailable", (None, None, None)),
        (OutOfMemoryError("full", tier="disk", need=5, have=3), "oom", ("disk", 5, 3)),
        (torch.OutOfMemoryError(CUDA_MESSAGE), "oom", ("device", 2 * GIB, GIB + GIB // 2)),
        (torch.OutOfMemoryError(CUDA_BUDGET_MESSAGE), "oom", ("device", 2 * GIB, GIB // 4)),
        (RuntimeError("CUDA error: out of memory"), "oom", ("device", None, None)),
        (RuntimeError(CPU_MESSAGE), "oom", ("host", 4096, ROOM)),
        (MemoryError(), "oom", ("host", None, ROOM)),
        (MemoryError("Unable to allocate 3.00 GiB for an array"), "oom", ("host", 3 * GIB, ROOM)),
        (OSError(errno.ENOMEM, os.strerror(errno.ENOMEM)), "oom", ("host", None, ROOM)),
        (OSError(errno.ENOSPC, os.strerror(errno.ENOSPC)), "oom", ("disk", None, None)),
        (OSError(errno.EDQUOT, os.strerror(errno.EDQUOT)), "oom", ("disk", None, None)),
        (OSError(errno.EIO, os.strerror(errno.EIO)), "failed", (None, None, None)),
        (DivergedError("20 skips"), "diverged", (None, None, None)),
        (RuntimeError("a\nb"), "failed", (None, None, None)),
        (SystemExit(3), "failed", (None, None, None)),
        (ValueError("late"), "failed", (None, None, None)),
    ],
)
def test_exceptions(error: BaseException, status: str, expected: tuple[Any, ...]) -> None:
    found, reason = from_exception(error, "step", rank=0, host_room=ROOM)
    assert found == status
    assert (reason.tier, reason.need, reason.have) == expected
    assert reason.phase == "step"
    assert "\n" not in reason.message
    assert reason.message


def test_a_full_disk_tells_what_it_has_left(tmp_path: Path) -> None:
    error = OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), str(tmp_path / "not" / "there"))
    _, reason = from_exception(error, "step", rank=0)
    assert reason.have is not None
    assert reason.have > 0


def test_too_many_open_files_says_how_many_may_be() -> None:
    status, reason = from_exception(OSError(errno.EMFILE, "Too many open files"), "step", 0)
    assert status == "failed"
    assert "ulimit -n" in reason.message and str(resource.getrlimit(resource.RLIMIT_NOFILE)[0]) in reason.message


def test_what_is_missing_comes_with_its_install_line() -> None:
    status, reason = from_exception(UnavailableError("no parts", install="pip install parts"), "initialize", rank=0)
    assert (status, reason.message, reason.install) == ("unavailable", "no parts: pip install parts", "pip install parts")
    status, reason = from_exception(ModuleNotFoundError("No module named 'parts.x'", name="parts.x"), "initialize", rank=0)
    assert (status, reason.install) == ("unavailable", "pip install parts")
    status, reason = from_exception(ModuleNotFoundError("No module named 'harness.x'", name="harness.x"), "build", rank=0)
    assert (status, reason.install) == ("failed", None)


def test_the_first_of_wrapped_errors_decides() -> None:
    error = RuntimeError("the lane stopped")
    error.__cause__ = OutOfMemoryError("full", tier="device", need=5, have=3)
    status, reason = from_exception(error, "step", rank=0)
    assert (status, reason.tier, reason.need, reason.have) == ("oom", "device", 5, 3)
    assert reason.message == "the lane stopped"


@pytest.mark.parametrize(
    ("death", "status", "said"),
    [
        ({"exit_code": -9, "oom_kills": 1, "host_bytes": GIB, "host_budget": GIB}, "oom", "at 1GiB resident"),
        ({"exit_code": -9, "oom_kills": 0}, "failed", "killed by SIGKILL"),
        ({"exit_code": -9}, "failed", "nothing here counts"),
        ({"exit_code": -11, "oom_kills": 1}, "failed", "killed by SIGSEGV"),
        ({"exit_code": -7}, "failed", "shared memory found no room"),
        ({"exit_code": 3}, "failed", "exit code 3"),
        ({"exit_code": 0}, "failed", "left no result"),
        ({"exit_code": -9, "timed_out_s": 5.0, "oom_kills": 0}, "timeout", "no end within 5 s"),
        ({"exit_code": -9, "stopped_by": signal.SIGTERM, "oom_kills": 0}, "interrupted", "stopped by SIGTERM"),
        ({"exit_code": -9, "stopped_by": signal.SIGINT, "oom_kills": 0}, "interrupted", "stopped by SIGINT"),
    ],
)
def test_deaths(death: dict[str, Any], status: str, said: str) -> None:
    found, reason = from_death(Death(phase="step", log=[str(line) for line in range(50)], **death))
    assert (found, reason.phase) == (status, "step")
    assert said in reason.message
    assert reason.log == [str(line) for line in range(50 - LOG_LINES, 50)]


@pytest.mark.parametrize(
    ("line", "exit_code", "expected"),
    [
        (f"torch.OutOfMemoryError: {CUDA_MESSAGE}", 1, ("oom", "device", 2 * GIB, GIB + GIB // 2)),
        (f"torch.cuda.OutOfMemoryError: {CUDA_BUDGET_MESSAGE}", 1, ("oom", "device", 2 * GIB, GIB // 4)),
        (f"[rank0]: torch.OutOfMemoryError: {CUDA_MESSAGE}", 1, ("oom", "device", 2 * GIB, GIB + GIB // 2)),
        (f"  what():  {CUDA_MESSAGE}", -signal.SIGABRT, ("oom", "device", 2 * GIB, GIB + GIB // 2)),
        (f"RuntimeError: {CPU_MESSAGE}", 1, ("oom", "host", 4096, None)),
        ("RuntimeError: CUDA error: an illegal memory access was encountered", 1, ("failed", None, None, None)),
        (f"a warning about torch.OutOfMemoryError: {CUDA_MESSAGE}", 1, ("failed", None, None, None)),
        (f"torch.OutOfMemoryError: {CUDA_MESSAGE}", 0, ("failed", None, None, None)),
        (f"torch.OutOfMemoryError: {CUDA_MESSAGE}", -signal.SIGKILL, ("failed", None, None, None)),
    ],
)
def test_an_error_of_a_package_s_own_thread_is_found_in_the_log(line: str, exit_code: int, expected: tuple[Any, ...]) -> None:
    log = ["Exception in thread Thread-3:", "Traceback (most recent call last):", line, "RuntimeError: the pipeline stopped"]
    status, reason = from_death(Death(exit_code=exit_code, phase="step", log=log))
    assert (status, reason.tier, reason.need, reason.have) == expected
    assert reason.log == log
    if status == "oom":
        assert (CPU_MESSAGE if expected[1] == "host" else "Tried to allocate 2.00 GiB") in reason.message


def test_a_kernel_kill_names_tier_and_budget() -> None:
    _, reason = from_death(Death(exit_code=-9, phase="warm-up", oom_kills=1, host_budget=GIB, host_bytes=GIB - 5))
    assert (reason.tier, reason.have, reason.need, reason.signal) == ("host", GIB, None, "SIGKILL")
    assert reason.last_known_bytes == GIB - 5
