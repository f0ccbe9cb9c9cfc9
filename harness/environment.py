"""Where a run took place: versions, hardware, limits, threads, seeds, code. Facts only; what is not known is null."""

from __future__ import annotations

import hashlib
import importlib.metadata
import os
import platform
import subprocess
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from types import MappingProxyType
from typing import Any

import torch

from harness import nvml
from harness.record import Code, Environment, Hardware, Threads
from systems.machine.limits import PROC, MachineLimits, boot_id
from systems.messages import one_line

PACKAGES = ("torch", "transformers", "deepspeed", "roundpipe", "numpy", "pydantic", "triton")
VARIABLES = (
    "OMP_NUM_THREADS", "OMP_PROC_BIND", "OMP_WAIT_POLICY", "GOMP_SPINCOUNT", "MKL_NUM_THREADS", "KMP_AFFINITY",
    "CUDA_VISIBLE_DEVICES", "CUDA_LAUNCH_BLOCKING", "CUDA_DEVICE_MAX_CONNECTIONS",
    "PYTORCH_CUDA_ALLOC_CONF", "PYTORCH_ALLOC_CONF",
    "CUBLAS_WORKSPACE_CONFIG", "NVIDIA_TF32_OVERRIDE", "NCCL_DEBUG", "NCCL_ALGO", "NCCL_PROTO", "NCCL_P2P_DISABLE",
    "NCCL_NVLS_ENABLE", "MALLOC_ARENA_MAX", "LD_PRELOAD", "PYTHONHASHSEED", "CC", "CXX", "TORCH_CUDA_ARCH_LIST",
)  # fmt: skip
SHORT_DTYPES: Mapping[str, str] = MappingProxyType({"bfloat16": "bf16", "float16": "fp16", "float32": "fp32"})
SOURCE_FOLDERS = ("models", "systems", "harness")
SOURCE_SUFFIXES = (".py", ".cpp", ".cu", ".h")
CPU_FLAGS = ("avx2", "fma", "avx512f", "avx512_bf16", "amx_bf16")

# Dense peaks at 16 bits, FLOP/s, by the name CUDA gives the device (vendor's data sheets). Others have no peak here.
PEAK_FLOPS_PER_S: Mapping[str, float] = MappingProxyType(
    {
        "NVIDIA H100 80GB HBM3": 989.4e12,
        "NVIDIA H200": 989.4e12,
        "NVIDIA A100-SXM4-80GB": 312e12,
        "NVIDIA A100-SXM4-40GB": 312e12,
    }
)


def peak_flops_per_s(device_name: str, dtype: str) -> float | None:
    return PEAK_FLOPS_PER_S.get(device_name) if dtype in ("bf16", "fp16") else None


def versions() -> dict[str, str | None]:
    """Of Python, the packages that decide a run's speed, and the libraries torch was built with."""
    found: dict[str, str | None] = {"python": platform.python_version()}
    for package in PACKAGES:
        try:
            found[package] = importlib.metadata.version(package)
        except importlib.metadata.PackageNotFoundError:
            found[package] = None
    found["cuda"] = torch.version.cuda
    cudnn = torch.backends.cudnn.version() if torch.version.cuda else None
    found["cudnn"] = None if cudnn is None else str(cudnn)
    found["nccl"] = None
    if torch.version.cuda and torch.distributed.is_nccl_available():
        found["nccl"] = ".".join(str(part) for part in torch.cuda.nccl.version())
    found["os"] = f"{platform.system()} {platform.release()}"
    return found


def source_sha256(root: Path, packages: Sequence[str] = SOURCE_FOLDERS) -> str:
    """Of every source file that a run may use: equal for equal code, committed or not, installed or not."""
    digest = hashlib.sha256()
    for package in packages:
        for path in sorted(path for path in (root / package).rglob("*") if path.suffix in SOURCE_SUFFIXES):
            digest.update(path.relative_to(root).as_posix().encode() + b"\0" + path.read_bytes() + b"\0")
    return digest.hexdigest()


def code() -> Code:
    """What this runs from; revision and dirty are null outside of a repository."""
    root = Path(__file__).resolve().parents[1]
    if not (root / ".git").exists():
        return Code(source_sha256=source_sha256(root))

    def git(*arguments: str) -> str | None:
        try:
            done = subprocess.run(["git", "-C", str(root), *arguments], capture_output=True, text=True, timeout=20)
        except (OSError, subprocess.TimeoutExpired):
            return None
        return done.stdout.strip() if done.returncode == 0 else None

    revision, changes = git("rev-parse", "HEAD"), git("status", "--porcelain", "--untracked-files=no")
    dirty = None if revision is None or changes is None else bool(changes)
    return Code(revision=revision, dirty=dirty, source_sha256=source_sha256(root))


def open_nvml() -> nvml.Nvml | None:
    """The management library's view of the current CUDA device."""
    properties: Any = torch.cuda.get_device_properties(torch.cuda.current_device())
    try:
        address = f"{properties.pci_domain_id:08x}:{properties.pci_bus_id:02x}:{properties.pci_device_id:02x}.0"
    except AttributeError:  # torch builds for other vendors have no such fields
        return None
    return nvml.open_device(address)


def attention(model: torch.nn.Module) -> str | None:
    """The attention a transformers model was built with, and for torch's fused one the kernels torch may choose from."""
    name: str | None = getattr(getattr(model, "config", None), "_attn_implementation", None)
    if name != "sdpa":
        return name
    cuda = torch.backends.cuda
    kernels = {
        "flash": cuda.flash_sdp_enabled(),
        "memory-efficient": cuda.mem_efficient_sdp_enabled(),
        "cudnn": cuda.cudnn_sdp_enabled(),
        "plain": cuda.math_sdp_enabled(),
    }
    return f"{name} ({', '.join(kernel for kernel, enabled in kernels.items() if enabled)})"


def dtypes_of(tensors: Iterable[torch.Tensor]) -> list[str]:
    """Short names of the types among them: ['bf16', 'int64']."""
    found = {str(tensor.dtype).removeprefix("torch.") for tensor in tensors}
    return sorted(SHORT_DTYPES.get(name, name) for name in found)


def _cpu() -> tuple[str | None, list[str]]:
    """Model name and the vector extensions of the first core."""
    try:
        lines = (PROC / "cpuinfo").read_text().splitlines()
    except OSError:
        return None, []
    table = {key.strip(): value.strip() for key, _, value in (line.partition(":") for line in reversed(lines))}
    flags = set(table.get("flags", "").split())
    return table.get("model name"), [flag for flag in CPU_FLAGS if flag in flags]


def hardware(device: str, device_nvml: nvml.Nvml | None) -> Hardware:
    model, flags = _cpu()
    if device != "cuda":
        return Hardware(device_name="cpu-emulated", device_count=1, boot_id=boot_id(), cpu_model=model, cpu_flags=flags)
    properties = torch.cuda.get_device_properties(torch.cuda.current_device())
    link = device_nvml.link() if device_nvml else nvml.PcieLink()
    return Hardware(
        device_name=properties.name,
        device_count=torch.cuda.device_count(),
        device_memory_bytes=properties.total_memory,
        device_driver=device_nvml.driver() if device_nvml else None,
        device_uuid=str(getattr(properties, "uuid", None) or "") or None,
        boot_id=boot_id(),
        pcie_generation=link.generation,
        pcie_generation_max=link.generation_max,
        pcie_width=link.width,
        pcie_width_max=link.width_max,
        cpu_model=model,
        cpu_flags=flags,
    )


def describe(device: str, limits: MachineLimits, seed: int, device_nvml: nvml.Nvml | None) -> Environment:
    return Environment(
        code=code(),
        versions=versions(),
        hardware=hardware(device, device_nvml),
        limits=limits,
        threads=Threads(intra_op=torch.get_num_threads(), inter_op=torch.get_num_interop_threads()),
        seeds={"weights": seed, "data": seed, "dropout": seed},
        variables={name: one_line(os.environ[name]) for name in VARIABLES if name in os.environ},
    )
