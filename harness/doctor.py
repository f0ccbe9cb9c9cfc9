"""`harness doctor`: what this machine has and lacks, one line each, with what to do. Changes nothing."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import shutil
import subprocess
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

from harness.availability import load_all
from harness.output import say
from systems import registry
from systems.errors import UnavailableError
from systems.machine.limits import MachineLimits, read_limits
from systems.native import build
from systems.sizes import format_size

_TIMEOUT_S = 20
_AIO_PROGRAM = "#include <libaio.h>\nint main() { io_context_t context = 0; return io_setup(1, &context); }\n"
HUGE_PAGES = Path("/sys/kernel/mm/transparent_hugepage/enabled")


@dataclass(frozen=True)
class Finding:
    """advice: what to do where something is lacking; empty where nothing is."""

    subject: str
    seen: str
    advice: str = ""


def cuda() -> Finding:
    import torch

    if torch.cuda.is_available():
        names = {torch.cuda.get_device_name(index) for index in range(torch.cuda.device_count())}
        return Finding("cuda", f"{torch.cuda.device_count()} x {', '.join(sorted(names))}, CUDA {torch.version.cuda}")
    if torch.version.cuda is None:
        advice = "pip install --force-reinstall torch, whose default build has it; until then --device cpu emulates one"
        return Finding("cuda", f"torch {torch.__version__} is built without it", advice)
    return Finding("cuda", "no device is visible", "nvidia-smi says whether the driver sees one; unset CUDA_VISIBLE_DEVICES")


def _first_line(command: list[str]) -> str | None:
    try:
        done = subprocess.run(command, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return None
    return (done.stdout or done.stderr).partition("\n")[0].strip()


def compiler() -> Finding:
    try:
        return Finding("compiler", build.compiler()[1].partition("\n")[0])
    except build.BuildError as error:
        advice = "apt install g++, or export CXX=...: the C++ Adam kernel needs one, without it a slower torch version runs"
        return Finding("compiler", str(error), advice)


def ninja() -> Finding:
    path = shutil.which("ninja") or str(Path(sys.executable).with_name("ninja"))
    version = _first_line([path, "--version"])
    if version is None:
        return Finding("ninja", "not found", "pip install ninja: torch builds C++ extensions with it")
    return Finding("ninja", version)


def libaio() -> Finding:
    """DeepSpeed builds its disk operations against it."""
    try:
        compiler = build.compiler()[0]
    except build.BuildError:
        return Finding("libaio", "not known without a C++ compiler", "apt install g++, then ask again")
    command = [*compiler, "-x", "c++", "-", "-laio", "-o", os.devnull]
    try:
        subprocess.run(command, input=_AIO_PROGRAM, capture_output=True, text=True, timeout=_TIMEOUT_S, check=True)
    except (OSError, subprocess.SubprocessError):
        return Finding("libaio", "the library or its headers are missing", "apt install libaio-dev for deepspeed-infinity")
    return Finding("libaio", "library and headers")


def huge_pages(path: Path = HUGE_PAGES) -> Finding:
    try:
        text = path.read_text().strip()
    except OSError:
        return Finding("huge pages", "not offered by this kernel", "host memory will be mapped in small pages: slower")
    mode = text.partition("[")[2].partition("]")[0]
    if mode == "never":
        return Finding("huge pages", "off", f"as root: echo madvise > {path}")
    return Finding("huge pages", mode)


def memory(limits: MachineLimits) -> Finding:
    """The budget, and which limit sets it."""
    if limits.host_budget_bytes is None:
        return Finding("host memory", "no limit is readable", "--host-memory 64GiB, say, at each run")
    parts = {
        "machine": limits.machine_memory_bytes,
        "cgroup": limits.cgroup_memory_bytes,
        "ulimit -v": limits.rlimit_as_bytes,
    }
    known = ", ".join(f"{name} {format_size(size)}" for name, size in parts.items() if size is not None)
    advice = ""
    if limits.machine_memory_bytes and limits.host_budget_bytes < limits.machine_memory_bytes:
        advice = "the budget is below the machine's memory: docker run --memory, or ulimit -v unlimited, for larger models"
    return Finding("host memory", f"budget {format_size(limits.host_budget_bytes)} ({known})", advice)


def pinning(limits: MachineLimits) -> Finding:
    if limits.rlimit_memlock_bytes is None:
        return Finding("locked memory", "unlimited")
    size = format_size(limits.rlimit_memlock_bytes)
    return Finding("locked memory", f"ulimit -l {size}", "if pinning fails on CUDA: ulimit -l unlimited")


def cores(limits: MachineLimits) -> Finding:
    advice = ""
    if limits.machine_cores and limits.cores < limits.machine_cores:
        advice = "taskset -p $$, or docker run --cpus: affinity, cpuset or a quota holds cores back from the CPU optimizer"
    return Finding("cores", f"{limits.cores} usable of {limits.machine_cores}", advice)


def swap(limits: MachineLimits) -> Finding:
    if not limits.swap_total_bytes:
        return Finding("swap", "none")
    used = format_size(limits.swap_used_bytes or 0)
    advice = "a run that swaps is flagged in its record: swapoff -a for measurements"
    return Finding("swap", f"{format_size(limits.swap_total_bytes)}, {used} in use", advice)


def packages() -> Iterator[Finding]:
    """Optional packages and what they are for. Extras are this project's folder's: no index has it under its name."""
    for name, install, purpose in (
        ("deepspeed", "pip install -e '.[baselines]'", "the DeepSpeed baselines"),
        ("roundpipe", "pip install -e '.[baselines]'", "the RoundPipe baseline"),
        ("accelerate", "pip install -e '.[trainer]'", "OffloadTrainer, under transformers' Trainer"),
        ("wandb", "pip install -e '.[wandb]'", "--wandb"),
        ("pynvml", "pip install nvidia-ml-py", "energy, clocks and PCIe link in records"),
    ):
        if importlib.util.find_spec(name) is None:
            yield Finding(name, "not installed", f"{install} for {purpose}")
        else:
            distribution = {"pynvml": "nvidia-ml-py"}.get(name, name)
            yield Finding(name, importlib.metadata.version(distribution))


def systems() -> Iterator[Finding]:
    """Those that cannot run here."""
    for name, found in load_all(registry.find()):
        if isinstance(found, UnavailableError):
            yield Finding(f"system {name}", "unavailable", str(found).partition("unavailable: ")[2] or str(found))


def findings() -> Iterator[Finding]:
    limits = read_limits()
    yield from (
        cuda(),
        compiler(),
        ninja(),
        libaio(),
        huge_pages(),
        memory(limits),
        pinning(limits),
        cores(limits),
        swap(limits),
    )
    yield from packages()
    yield from systems()


def examine() -> int:
    for finding in findings():
        mark, advice = ("lacks", f": {finding.advice}") if finding.advice else ("ok   ", "")
        say(f"{mark}  {finding.subject:14} {finding.seen}{advice}")
    return 0
