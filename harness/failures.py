"""Every way a run can fail, as a status and a reason: from an exception in the process, or from how it died."""

from __future__ import annotations

import errno
import re
import resource
import shutil
import signal
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from harness.record import Reason, Status
from harness.spec import in_flags
from systems.errors import BudgetError, DivergedError, OutOfMemoryError, PeerGoneError, UnavailableError, UnsupportedError
from systems.messages import one_line
from systems.sizes import format_size, parse_size

LOG_LINES = 20
OWN_PACKAGES = ("models", "systems", "harness", "paper_figures")  # a module missing there is a mistake, not an installation
_HOST_ALLOCATION = re.compile(r"can't allocate memory|cannot allocate memory|failed to allocate memory|std::bad_alloc", re.I)
_DEVICE_ALLOCATION = re.compile(r"CUDA (error: )?out of memory|CUBLAS_STATUS_ALLOC_FAILED|cudaErrorMemoryAllocation", re.I)
# As Python prints an error, with the rank that torch puts before it, and as C++ does.
_PRINTED_ERROR = re.compile(r"(?:\[rank\d+\]:)?\s*(?:(?:\w+\.)*(?P<name>\w*Error)|what\(\)):\s+(?P<message>\S.*)")


def _first_size(pattern: str, text: str) -> int | None:
    """Bytes of the first size such as '2.00 GiB' or '17179869184 bytes' that follows the pattern."""
    match = re.search(pattern + r"\s*([\d.]+)\s*([KMGT]?i?B|bytes)", text)
    return parse_size(match[1] + match[2].replace("bytes", "")) if match else None


def _cuda_room(message: str) -> int | None:
    """Bytes that CUDA's allocator could still have taken: what the device had free, or less under a budget of its own."""
    free = _first_size("of which", message)
    allowed, allocated = _first_size(r"memory in use\.", message), _first_size("Of the allocated memory", message)
    if " allowed;" not in message or free is None or allowed is None or allocated is None:
        return free
    cached = _first_size("by PyTorch, and", message) or 0
    return max(0, min(free, allowed - allocated - cached))


def _disk_room(error: OSError) -> int | None:
    """Bytes left where the file is that could not be written; None if the error names no place."""
    place = Path(error.filename) if isinstance(error.filename, str) else None
    while place is not None and not place.exists() and place != place.parent:
        place = place.parent
    try:
        return None if place is None else shutil.disk_usage(place).free
    except OSError:
        return None


def _out_of_memory(error: BaseException, message: str, host_room: int | None) -> dict[str, Any] | None:
    """tier, need and have of an error that means no room, whoever raised it; None if it means something else."""
    if isinstance(error, BudgetError | OutOfMemoryError):
        tier = error.tier if error.tier in ("device", "host", "disk") else None
        return {"tier": tier, "need": error.need, "have": error.have}
    if room := _allocation_failed(type(error).__name__, message, host_room):
        return room
    if isinstance(error, OSError) and error.errno in (errno.ENOSPC, errno.EDQUOT):
        return {"tier": "disk", "have": _disk_room(error)}
    return None


def _allocation_failed(name: str, message: str, host_room: int | None) -> dict[str, Any] | None:
    """The same of an error known by the name of its class and its message."""
    if name == "OutOfMemoryError" or _DEVICE_ALLOCATION.search(message):  # torch's own class
        return {"tier": "device", "need": _first_size("Tried to allocate", message), "have": _cuda_room(message)}
    if name == "MemoryError" or _HOST_ALLOCATION.search(message):
        need = _first_size("(?:tried|Unable) to allocate", message)
        return {"tier": "host", "need": need, "have": host_room}
    return None


def _printed_out_of_memory(log: list[str]) -> tuple[str, dict[str, Any]] | None:
    """The first error in the log that means no room, and what it says of it: what came after may only follow from it."""
    for line in log:
        match = _PRINTED_ERROR.fullmatch(line)
        room = _allocation_failed(match["name"] or "", match["message"], None) if match else None
        if match and room:
            return one_line(match["message"]), room
    return None


def _missing_package(error: BaseException) -> str | None:
    """The outside package whose absence the error is about."""
    package = error.name.partition(".")[0] if isinstance(error, ModuleNotFoundError) and error.name else None
    return None if package in OWN_PACKAGES else package


def _follows(error: BaseException | None) -> bool:
    """Whether it is that another rank is gone, or only comes of that."""
    seen: set[int] = set()
    while error is not None and id(error) not in seen:
        if isinstance(error, PeerGoneError):
            return True
        seen.add(id(error))
        error = error.__cause__ or error.__context__
    return False


def from_exception(error: BaseException, phase: str, rank: int, *, host_room: int | None = None) -> tuple[Status, Reason]:
    """Status and reason of a run whose own process caught `error` in `phase`. host_room: bytes the host could still give."""
    message = in_flags(one_line(str(error))) or type(error).__name__
    status: Status = "failed"
    more: dict[str, Any] = {}
    if isinstance(error, UnavailableError):
        status, more = "unavailable", {"install": error.install}
    elif package := _missing_package(error):
        status, more = "unavailable", {"install": f"pip install {package}"}
        message = f"{message}: {more['install']}"
    elif isinstance(error, UnsupportedError):
        status = "refused"
    elif isinstance(error, DivergedError):
        status = "diverged"
    elif room := _out_of_memory(error, message, host_room):
        status, more = "refused" if isinstance(error, BudgetError) else "oom", room
    elif error.__cause__ is not None:  # wrapped on its way here: what happened first says more
        status, reason = from_exception(error.__cause__, phase, rank, host_room=host_room)
        more = reason.model_dump(include={"tier", "need", "have", "install"})
    if isinstance(error, OSError) and error.errno == errno.EMFILE:
        soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
        message = f"{message}: this process may have {soft} open at once: raise that with ulimit -n (its hard limit is {hard})"
    if status == "failed" or isinstance(error, MemoryError):
        message = f"{type(error).__name__}: {message}" if message != type(error).__name__ else message
    return status, Reason.model_validate({"message": message, "phase": phase, "rank": rank, "follows": _follows(error), **more})


@dataclass(frozen=True, kw_only=True)
class Death:
    """How the process of a run ended without a record of its own.

    rank: which process. exit_code: as subprocess gives it, negative for a signal. stopped_by: the signal that the parent itself
    received. stuck: what it said when ranks waited for each other.
    oom_kills: processes the kernel killed for memory meanwhile, None if nothing counts them. host_bytes: resident
    memory when last looked at. host_budget: in bytes.
    """

    exit_code: int
    phase: str
    rank: int = 0
    log: list[str] = field(default_factory=list)
    timed_out_s: float | None = None
    stopped_by: int | None = None
    stuck: str | None = None
    oom_kills: int | None = None
    host_bytes: int | None = None
    host_budget: int | None = None


def from_death(death: Death) -> tuple[Status, Reason]:
    """Status and reason of a run whose process told no result."""
    killed_by = signal.Signals(-death.exit_code).name if death.exit_code < 0 else None
    status: Status = "failed"
    room: dict[str, Any] = {}
    if death.stopped_by is not None:
        status, killed_by = "interrupted", signal.Signals(death.stopped_by).name
        message = f"the run was stopped by {killed_by} in phase {death.phase}"
    elif death.stuck is not None:
        message = death.stuck
    elif death.timed_out_s is not None:
        status, killed_by = "timeout", None
        message = f"no end within {death.timed_out_s:g} s: stopped in phase {death.phase}; raise --timeout or do less"
    elif killed_by == "SIGKILL" and death.oom_kills:
        status, room = "oom", {"tier": "host", "have": death.host_budget}
        seen = f" at {format_size(death.host_bytes)} resident" if death.host_bytes is not None else ""
        message = f"the kernel killed the process for memory in phase {death.phase}{seen}"
    elif death.exit_code != 0 and killed_by != "SIGKILL" and (printed := _printed_out_of_memory(death.log)):
        status, room = "oom", printed[1]
        message = f"the process ended in phase {death.phase} after an error in one of its threads: {printed[0]}"
    elif killed_by == "SIGKILL" and death.oom_kills is None:
        message = f"killed by SIGKILL in phase {death.phase}; nothing here counts the kernel's own kills for memory"
    elif killed_by:
        hint = "; a mapped file or shared memory found no room, or was cut short" if killed_by == "SIGBUS" else ""
        message = f"killed by {killed_by} in phase {death.phase}{hint}"
    else:
        message = f"the process ended with exit code {death.exit_code} in phase {death.phase} and left no result"
    return status, Reason.model_validate(
        {
            "message": message,
            "phase": death.phase,
            **room,
            "rank": death.rank if death.stuck is None else None,
            "signal": killed_by,
            "exit_code": death.exit_code if death.exit_code >= 0 else None,
            "last_known_bytes": death.host_bytes,
            "log": death.log[-LOG_LINES:],
        }
    )
