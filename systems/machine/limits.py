"""What this machine lets one process have: memory, cores, swap. The budget is the smallest limit in force.

Reads /proc and the cgroup tree, versions 1 and 2, nested groups included. Both roots can be given, so that a test can
pretend to be in any container without privileges. An unreadable limit is None, never a guess.

Note [Hosts]
    A host is what a budget of host memory is of: the machine, or the container with a smaller limit. Processes under one kernel
    share its memory, whoever started them, unless their smallest limits are those of different cgroups: then each group is a
    host of its own. Limits of several groups that are together more than the machine has are not seen through.
"""

from __future__ import annotations

import math
import os
import resource
import socket
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from pydantic import BaseModel, ConfigDict, Field

PROC = Path("/proc")
CGROUP_ROOT = Path("/sys/fs/cgroup")
OPEN_FILES = 1 << 20  # more than anything here needs; some programs walk through all that they may have
MEMORY_FILE_SYSTEMS = frozenset({"tmpfs", "ramfs", "devtmpfs", "hugetlbfs", "rootfs"})
MEMORY_DEVICES = ("/dev/ram", "/dev/zram")
_UNLIMITED = 1 << 60  # version 1 writes "no limit" as a number near 2**63


class MachineLimits(BaseModel):
    """Bytes and cores. host_budget_bytes: the smallest of the machine, every enclosing cgroup and RLIMIT_AS."""

    model_config = ConfigDict(frozen=True)

    machine_memory_bytes: int | None = None
    available_memory_bytes: int | None = Field(None, description="free or reclaimable when the run started")
    cgroup_memory_bytes: int | None = Field(None, description="smallest limit of the nested groups; null: unlimited")
    rlimit_as_bytes: int | None = Field(None, description="ulimit -v; null: unlimited")
    rlimit_memlock_bytes: int | None = Field(None, description="ulimit -l; null: unlimited")
    rlimit_open_files: int | None = Field(None, description="ulimit -n; null: unlimited")
    host_budget_bytes: int | None = None
    machine_cores: int | None = None
    cores: int = Field(1, description="usable ones: affinity, cpuset and CPU quota (rounded up), the smallest")
    swap_total_bytes: int | None = None
    swap_used_bytes: int | None = None


@dataclass(frozen=True)
class Cgroups:
    """The nested groups this process is in, innermost first, and the files that say so."""

    memory_v1: tuple[Path, ...]
    cpu_v1: tuple[Path, ...]
    cpuset_v1: tuple[Path, ...]
    v2: tuple[Path, ...]


def boot_id() -> str | None:
    """Of this machine, another one whenever it starts."""
    return (_read(PROC / "sys/kernel/random/boot_id") or "").strip() or None


def _read(path: Path) -> str | None:
    try:
        return path.read_text(errors="replace")
    except OSError:
        return None


def _read_int(path: Path) -> int | None:
    text = (_read(path) or "").strip()
    return int(text) if text.lstrip("-").isdigit() else None


def _table(text: str | None) -> dict[str, str]:
    """'key value' or 'key: value' lines as a dict."""
    rows = (line.replace(":", " ").split() for line in (text or "").splitlines())
    return {row[0]: row[1] for row in rows if len(row) >= 2}


def _nested(root: Path, inner: str) -> tuple[Path, ...]:
    """Existing folders from root/inner up to root. Inside a cgroup namespace `inner` may not exist; then root alone."""
    parts = [part for part in inner.split("/") if part not in ("", "..")]
    folders = [root.joinpath(*parts[:depth]) for depth in range(len(parts), -1, -1)]
    return tuple(folder for folder in folders if folder.is_dir())


def find_cgroups(proc: Path = PROC, root: Path = CGROUP_ROOT) -> Cgroups:
    """Reads /proc/self/cgroup; controllers of version 1 are folders of the root, version 2 is the root or `unified`."""
    v1: dict[str, tuple[Path, ...]] = {}
    v2: tuple[Path, ...] = _nested(root, "")
    for line in (_read(proc / "self" / "cgroup") or "").splitlines():
        _, controllers, inner = line.split(":", 2)
        if controllers == "":
            v2 = _nested(root / "unified" if (root / "unified").is_dir() else root, inner)
        for controller in controllers.split(","):
            v1[controller] = _nested(root / controller, inner)
    return Cgroups(memory_v1=v1.get("memory", ()), cpu_v1=v1.get("cpu", ()), cpuset_v1=v1.get("cpuset", ()), v2=v2)


def _cgroup_memory_limits(groups: Cgroups) -> Iterator[tuple[Path, int | None]]:
    """Each with the folder that tells it, innermost first."""
    for folder in groups.v2:
        yield folder, _read_int(folder / "memory.max")
    for folder in groups.memory_v1:
        yield folder, _read_int(folder / "memory.limit_in_bytes")
        hierarchical = _table(_read(folder / "memory.stat")).get("hierarchical_memory_limit", "")
        yield folder, int(hierarchical) if hierarchical.isdigit() else None


def _quota_cores(groups: Cgroups) -> Iterator[float]:
    """CPU quotas in cores, one per group that has one."""
    for folder in groups.v2:
        quota, _, period = (_read(folder / "cpu.max") or "max").partition(" ")
        if quota.strip().isdigit() and period.strip().isdigit():
            yield int(quota) / int(period)
    for folder in groups.cpu_v1:
        quota_us, period_us = _read_int(folder / "cpu.cfs_quota_us"), _read_int(folder / "cpu.cfs_period_us")
        if quota_us and period_us and quota_us > 0:
            yield quota_us / period_us


def _list_length(text: str) -> int:
    """'0-3,7' -> 5, the form of cpuset files."""
    spans = [part.partition("-") for part in text.strip().split(",") if part.strip()]
    return sum(int(last or first) - int(first) + 1 for first, _, last in spans)


def _cpuset_cores(groups: Cgroups) -> Iterator[int]:
    for folder in groups.v2 + groups.cpuset_v1:
        for name in ("cpuset.cpus.effective", "cpuset.effective_cpus", "cpuset.cpus"):
            count = _list_length(_read(folder / name) or "")
            if count:
                yield count
                break


def _rlimit(kind: int) -> int | None:
    soft, _ = resource.getrlimit(kind)
    return None if soft == resource.RLIM_INFINITY else soft


def raise_open_files() -> None:
    """Let this process have as many open files as it may: CUDA keeps some for events and memory, and stops at the limit."""
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    wanted = OPEN_FILES if hard == resource.RLIM_INFINITY else min(hard, OPEN_FILES)
    if soft != resource.RLIM_INFINITY and soft < wanted:
        resource.setrlimit(resource.RLIMIT_NOFILE, (wanted, hard))


def _smallest(values: list[int | None]) -> int | None:
    known = [value for value in values if value is not None and 0 < value < _UNLIMITED]
    return min(known, default=None)


def read_limits(proc: Path = PROC, cgroup_root: Path = CGROUP_ROOT) -> MachineLimits:
    """All limits in force for this process now."""
    groups = find_cgroups(proc, cgroup_root)
    memory = {key: int(value) * 1024 for key, value in _table(_read(proc / "meminfo")).items() if value.isdigit()}
    cgroup = _smallest([limit for _, limit in _cgroup_memory_limits(groups)])
    swap_total, swap_free = memory.get("SwapTotal"), memory.get("SwapFree")
    cores: list[int] = [len(os.sched_getaffinity(0)), *_cpuset_cores(groups)]
    cores += [math.ceil(quota) for quota in _quota_cores(groups)]
    return MachineLimits(
        machine_memory_bytes=memory.get("MemTotal"),
        available_memory_bytes=memory.get("MemAvailable"),
        cgroup_memory_bytes=cgroup,
        rlimit_as_bytes=_rlimit(resource.RLIMIT_AS),
        rlimit_memlock_bytes=_rlimit(resource.RLIMIT_MEMLOCK),
        rlimit_open_files=_rlimit(resource.RLIMIT_NOFILE),
        host_budget_bytes=_smallest([memory.get("MemTotal"), cgroup, _rlimit(resource.RLIMIT_AS)]),
        machine_cores=os.cpu_count(),
        cores=max(1, min(cores)),
        swap_total_bytes=swap_total,
        swap_used_bytes=swap_total - swap_free if swap_total is not None and swap_free is not None else None,
    )


def host_identity(proc: Path = PROC, cgroup_root: Path = CGROUP_ROOT) -> str:
    """The same for processes that share one memory, by Note [Hosts]."""
    boot = (_read(proc / "sys" / "kernel" / "random" / "boot_id") or socket.gethostname()).strip()
    machine = read_limits(proc, cgroup_root).machine_memory_bytes
    limits = [(folder, limit) for folder, limit in _cgroup_memory_limits(find_cgroups(proc, cgroup_root)) if limit]
    smallest = _smallest([limit for _, limit in limits])
    if smallest is None or (machine is not None and smallest >= machine):
        return boot
    *_, group = (folder for folder, limit in limits if limit == smallest)
    return f"{boot} {group.stat().st_ino}"  # of one group the same from inside and outside of a container


def free_host_memory(proc: Path = PROC, cgroup_root: Path = CGROUP_ROOT) -> int | None:
    """Bytes that this process can take beside what it has: what the machine has free, and what its limits leave over."""
    limits = read_limits(proc, cgroup_root)
    budget, free = limits.host_budget_bytes, limits.available_memory_bytes
    left = None if budget is None else max(0, budget - process_memory("self", proc).get("VmRSS", 0))
    return min((each for each in (free, left) if each is not None), default=None)


def oom_kills(proc: Path = PROC, cgroup_root: Path = CGROUP_ROOT) -> int | None:
    """Processes of this process's own group that the kernel has killed for memory so far; None if no counter is readable.

    Without a cgroup counter the machine-wide one in /proc/vmstat stands in.
    """
    groups = find_cgroups(proc, cgroup_root)
    candidates = [folder / "memory.events" for folder in groups.v2[:1]]
    candidates += [folder / "memory.oom_control" for folder in groups.memory_v1[:1]]
    for path in (*candidates, proc / "vmstat"):
        count = _table(_read(path)).get("oom_kill", "")
        if count.isdigit():
            return int(count)
    return None


def process_memory(pid: int | str, proc: Path = PROC) -> dict[str, int]:
    """VmRSS, VmHWM (peak) and VmSwap of a process in bytes; empty if it is gone."""
    table = _table(_read(proc / str(pid) / "status"))
    return {key: int(table[key]) * 1024 for key in ("VmRSS", "VmHWM", "VmSwap") if table.get(key, "").isdigit()}


def in_memory(folder: str | os.PathLike[str], proc: Path = PROC) -> str | None:
    """What a folder's file system is kept in, if that is the host's memory (`tmpfs`); None for a disk, and where nothing says.

    Raises OSError for a folder that is not there.
    """
    device = os.stat(folder).st_dev
    for line in (_read(proc / "self" / "mountinfo") or "").splitlines():
        left, _, right = line.partition(" - ")
        where, what = left.split(), right.split()
        if len(what) < 3 or where[2:3] != [f"{os.major(device)}:{os.minor(device)}"]:
            continue
        kind, source, options = what[:3]
        if kind in MEMORY_FILE_SYSTEMS:
            return kind
        if source.startswith(MEMORY_DEVICES):
            return f"{kind} on {source}"
        upper = next(
            (option.removeprefix("upperdir=") for option in options.split(",") if option.startswith("upperdir=")), None
        )
        if upper is not None and os.path.isdir(upper) and os.stat(upper).st_dev != device:
            return in_memory(upper, proc)
    return None
