"""Budgets and core counts from pretended containers (cases C36 and C37)."""

from __future__ import annotations

import os
import resource
import socket
import subprocess
import sys
from pathlib import Path

import pytest

from systems.machine.limits import free_host_memory, host_identity, in_memory, oom_kills, read_limits

GIB = 1 << 30


def write(root: Path, files: dict[str, str]) -> None:
    for name, text in files.items():
        path = root / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)


@pytest.fixture
def machine(tmp_path: Path) -> tuple[Path, Path]:
    """(proc, cgroup root) of a machine of 64 GiB without limits."""
    proc, root = tmp_path / "proc", tmp_path / "cgroup"
    meminfo = f"MemTotal: {64 << 20} kB\nMemAvailable: {60 << 20} kB\nSwapTotal: {4 << 20} kB\nSwapFree: {3 << 20} kB\n"
    write(proc, {"meminfo": meminfo, "self/cgroup": "0::/\n", "vmstat": "oom_kill 7\n"})
    root.mkdir()
    return proc, root


def test_without_limits_the_machine_is_the_budget(machine: tuple[Path, Path]) -> None:
    limits = read_limits(*machine)
    assert limits.host_budget_bytes == limits.machine_memory_bytes == 64 * GIB
    assert limits.cgroup_memory_bytes is None
    assert limits.swap_used_bytes == 1 * GIB


def test_version_2_takes_the_smallest_of_nested_limits(machine: tuple[Path, Path]) -> None:
    proc, root = machine
    write(proc, {"self/cgroup": "0::/pod/container\n"})
    write(root, {"memory.max": "max\n", "pod/memory.max": f"{8 * GIB}\n", "pod/container/memory.max": "max\n"})
    assert read_limits(proc, root).host_budget_bytes == 8 * GIB
    write(root, {"pod/container/memory.max": f"{GIB}\n"})
    limits = read_limits(proc, root)
    assert (limits.host_budget_bytes, limits.machine_memory_bytes) == (GIB, 64 * GIB)


def test_inside_a_namespace_the_root_counts(machine: tuple[Path, Path]) -> None:
    proc, root = machine
    write(proc, {"self/cgroup": "0::/../outside\n"})
    write(root, {"memory.max": f"{2 * GIB}\n"})
    assert read_limits(proc, root).host_budget_bytes == 2 * GIB


def test_version_1_unlimited_and_hierarchical(machine: tuple[Path, Path]) -> None:
    proc, root = machine
    write(proc, {"self/cgroup": "4:memory:/a/b\n3:cpuset:/a\n1:cpu,cpuacct:/\n0::/\n"})
    unlimited = "9223372036854771712\n"
    write(root, {"memory/memory.limit_in_bytes": unlimited, "memory/a/b/memory.limit_in_bytes": unlimited})
    assert read_limits(proc, root).cgroup_memory_bytes is None
    write(root, {"memory/a/b/memory.stat": f"cache 1\nhierarchical_memory_limit {3 * GIB}\n"})
    assert read_limits(proc, root).host_budget_bytes == 3 * GIB
    write(root, {"memory/a/memory.limit_in_bytes": f"{2 * GIB}\n"})
    assert read_limits(proc, root).host_budget_bytes == 2 * GIB


def test_ulimit_v_counts(machine: tuple[Path, Path], monkeypatch: pytest.MonkeyPatch) -> None:
    real = resource.getrlimit

    def limited(kind: int) -> tuple[int, int]:
        return (GIB, GIB) if kind == resource.RLIMIT_AS else real(kind)

    monkeypatch.setattr(resource, "getrlimit", limited)
    limits = read_limits(*machine)
    assert (limits.host_budget_bytes, limits.rlimit_as_bytes) == (GIB, GIB)


def test_what_is_free_is_the_least_that_machine_and_limits_leave(machine: tuple[Path, Path]) -> None:
    proc, root = machine
    assert free_host_memory(*machine) == 60 * GIB
    write(proc, {"self/cgroup": "0::/pod\n", "self/status": f"VmRSS: {3 << 20} kB\n"})
    write(root, {"pod/memory.max": f"{8 * GIB}\n"})
    assert free_host_memory(*machine) == 5 * GIB
    write(proc, {"self/status": f"VmRSS: {9 << 20} kB\n"})
    assert free_host_memory(*machine) == 0


@pytest.mark.parametrize(
    ("files", "cores"),
    [
        ({"cpuset.cpus.effective": "3\n"}, 1),
        ({"pod/cpu.max": "50000 100000\n"}, 1),
        ({"pod/cpu.max": "max 100000\n", "cpuset.cpus.effective": "0-63\n"}, None),
    ],
)
def test_cores_follow_cpuset_and_quota(machine: tuple[Path, Path], files: dict[str, str], cores: int | None) -> None:
    proc, root = machine
    write(proc, {"self/cgroup": "0::/pod\n"})
    usable = read_limits(proc, root).cores
    write(root, files)
    assert read_limits(proc, root).cores == (usable if cores is None else cores)


def test_kernel_kills_are_counted_for_this_group_first(machine: tuple[Path, Path]) -> None:
    proc, root = machine
    assert oom_kills(proc, root) == 7  # nothing but the machine's counter
    write(proc, {"self/cgroup": "0::/pod\n"})
    write(root, {"pod/memory.events": "low 0\noom 3\noom_kill 2\n"})
    assert oom_kills(proc, root) == 2
    (proc / "vmstat").unlink()
    (root / "pod" / "memory.events").unlink()
    assert oom_kills(proc, root) is None


def test_version_1_kernel_kills(machine: tuple[Path, Path]) -> None:
    proc, root = machine
    write(proc, {"self/cgroup": "4:memory:/a\n"})
    write(root, {"memory/a/memory.oom_control": "oom_kill_disable 0\nunder_oom 0\noom_kill 5\n"})
    assert oom_kills(proc, root) == 5


def test_as_many_files_may_be_open_as_the_hard_limit_says() -> None:
    code = (
        "import resource\n"
        "from systems.machine.limits import raise_open_files, read_limits\n"
        "resource.setrlimit(resource.RLIMIT_NOFILE, (64, 96))\n"
        "before = read_limits().rlimit_open_files\n"
        "raise_open_files()\n"
        "print(before, *resource.getrlimit(resource.RLIMIT_NOFILE))\n"
    )
    told = subprocess.run([sys.executable, "-c", code], check=True, capture_output=True, text=True).stdout
    assert told.split() == ["64", "96", "96"]


@pytest.mark.parametrize(
    ("kind", "source", "options", "found"),
    [
        ("tmpfs", "tmpfs", "rw,size=1g", "tmpfs"),
        ("ramfs", "none", "rw", "ramfs"),
        ("ext4", "/dev/zram0", "rw", "ext4 on /dev/zram0"),
        ("ext4", "/dev/nvme0n1p1", "rw", None),
        ("overlay", "overlay", "rw,lowerdir=/a,upperdir=/proc/none,workdir=/c", None),
        ("overlay", "overlay", "rw,lowerdir=/a,upperdir=/dev/shm,workdir=/c", "tmpfs"),
    ],
)
def test_what_a_folder_is_kept_in(kind: str, source: str, options: str, found: str | None, tmp_path: Path) -> None:
    device, shm = os.stat(tmp_path).st_dev, os.stat("/dev/shm").st_dev
    if shm == device:
        shm += 1  # void there, and still right
    lines = [
        "20 1 0:0 / /else rw - tmpfs tmpfs rw",
        f"21 1 {os.major(device)}:{os.minor(device)} / /a\\040b rw shared:1 master:2 - {kind} {source} {options}",
        f"22 1 {os.major(shm)}:{os.minor(shm)} / /dev/shm rw - tmpfs shm rw",
    ]
    write(tmp_path / "proc", {"self/mountinfo": "short\n" + "\n".join(lines) + "\n"})
    assert in_memory(tmp_path, tmp_path / "proc") == found
    assert in_memory(tmp_path, tmp_path / "nowhere") is None
    with pytest.raises(FileNotFoundError):
        in_memory(tmp_path / "none", tmp_path / "proc")


def test_a_host_is_the_machine_or_the_group_with_a_smaller_limit(machine: tuple[Path, Path], tmp_path: Path) -> None:
    """Two pods under one kernel: one host as long as the machine is what limits both, else a host each, seen from any process
    inside."""
    proc, root = machine
    write(proc, {"sys/kernel/random/boot_id": "a-boot\n"})
    pods = [f"{pod}/{process}" for pod in ("one", "two") for process in ("first", "second")]

    def hosts() -> list[str]:
        found = []
        for pod in pods:
            write(proc, {"self/cgroup": f"0::/{pod}\n"})
            found.append(host_identity(proc, root))
        return found

    for pod in pods:
        write(root, {f"{pod}/memory.max": "max\n"})
    assert hosts() == ["a-boot"] * 4
    write(root, {"one/memory.max": f"{100 * GIB}\n"})  # more than there is
    assert hosts() == ["a-boot"] * 4
    write(root, {f"{pod}/memory.max": f"{8 * GIB}\n" for pod in ("one", "two", "one/first")})
    first, second, third, fourth = hosts()
    assert first == second != third == fourth
    assert first.startswith("a-boot ")
    write(proc, {"self/cgroup": "0::/\n"})  # as from inside of a namespace
    assert host_identity(proc, root / "one") == first
    (proc / "sys/kernel/random/boot_id").unlink()
    assert host_identity(proc, root / "one") == first.replace("a-boot", socket.gethostname())
