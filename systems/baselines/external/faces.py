"""What the systems that front for a package say of themselves: Note [Faces] in systems/registry.py."""

from __future__ import annotations

from typing import Literal

from pydantic import Field

from systems.baselines.external.package import ConfigOptions
from systems.face import Abilities, Face
from systems.sizes import Size

INSTALL = "pip install -e '.[baselines]'"  # in this project's folder: no index has it
Weights = Literal["masters", "autocast", "compute"]


class FsdpOptions(ConfigOptions):
    """fsdp2-offload's options."""


class DdpOptions(ConfigOptions):
    """How plain PyTorch holds its weights."""

    weights: Weights = Field(
        "masters",
        description="masters: 16-bit weights beside fp32 ones; autocast: fp32 weights under autocast; compute: no masters",
    )


class RoundPipeOptions(ConfigOptions):
    """When an update is waited for."""

    asynchronous: bool = Field(False, description="false: each step waits for its update; true: it is used a step late")


class DeepSpeedOptions(ConfigOptions):
    """Options of every DeepSpeed baseline."""


class TwinFlowOptions(ConfigOptions):
    """The split of the optimizer between CPU and device."""

    ratio: float | None = Field(None, ge=0, le=1, description="share of the optimizer on the CPU; null: what does not fit")
    reserve: Size | None = Field(None, description="device memory left free for activations when ratio is null; null: 50 %")


class InfinityOptions(ConfigOptions):
    """Where model states go."""

    nvme_path: str | None = Field(None, description="folder on the disk that holds the optimizer; needed")
    parameters: Literal["cpu", "nvme"] = Field(
        "cpu", description="16-bit parameters: cpu is faster, nvme leaves the host almost empty"
    )


FSDP2_OFFLOAD = Face(
    name="fsdp2-offload",
    summary="torch FSDP2 with CPUOffloadPolicy, masters and optimizer on the host",
    Options=FsdpOptions,
    abilities=Abilities(package="torch", ranks=True),
)
TORCH_DDP = Face(
    name="torch-ddp",
    summary="plain PyTorch (DistributedDataParallel), everything on the device",
    Options=DdpOptions,
    abilities=Abilities(package="torch", ranks=True),
)
ROUNDPIPE = Face(
    name="roundpipe",
    summary="RoundPipe: layers stream through the device, the optimizer in a CPU thread; recomputes every block",
    Options=RoundPipeOptions,
    abilities=Abilities(package="roundpipe", install=INSTALL),
)


def _deepspeed(name: str, summary: str, options: type[ConfigOptions] = DeepSpeedOptions) -> Face:
    return Face(
        name=f"deepspeed-{name}",
        summary=f"DeepSpeed {summary}",
        Options=options,
        abilities=Abilities(package="deepspeed", install=INSTALL, ranks=True),
    )


DEEPSPEED_INFINITY = _deepspeed("infinity", "ZeRO-Infinity, optimizer on disk; needs nvme_path", InfinityOptions)
DEEPSPEED_SUPEROFFLOAD = _deepspeed("superoffload", "SuperOffload, updates during backward; no clipping")
DEEPSPEED_TWINFLOW = _deepspeed("twinflow", "ZeRO-3, optimizer split between host and device", TwinFlowOptions)
DEEPSPEED_ZERO2 = _deepspeed("zero2", "ZeRO-2, nothing offloaded")
DEEPSPEED_ZERO2_OFFLOAD = _deepspeed("zero2-offload", "ZeRO-2, optimizer on the host")
DEEPSPEED_ZERO3 = _deepspeed("zero3", "ZeRO-3, nothing offloaded")
DEEPSPEED_ZERO3_OFFLOAD = _deepspeed("zero3-offload", "ZeRO-3, parameters and optimizer on the host")
