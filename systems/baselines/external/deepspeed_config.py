"""DeepSpeed's configurations: one Variant a baseline, and the dictionary that DeepSpeed is given for it.

Note [A fair DeepSpeed]
    Each variant is DeepSpeed's own recommendation for its kind, with everything said that its defaults leave open.
    Clipping is what the run asks for (DeepSpeed's default is 1.0). Timers are off: its throughput timer synchronises the
    device twice a step. Buckets and prefetch are 5e8 elements, at most 1e9 parameters are live, parameters below 1e5
    elements stay resident, all host buffers are pinned, reduction overlaps backward. Gradients of several micro-batches
    add up in fp32, as in the reference recipe. Where no optimizer is offloaded, AdamW is torch's fused one ("torch_adam"),
    which needs no compiler on the machine; offloaded ones are DeepSpeed's own CPU Adam.
    The harness tells a system no batch size, and one is all that DeepSpeed's throughput figures, never read here, would
    need it for: train_micro_batch_size_per_gpu is 1.
"""

from __future__ import annotations

import math
import os
import shutil
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, Literal

from systems.baselines.external.budget import pinned_bytes
from systems.baselines.external.package import Config, merge, read_config, refuse_changes
from systems.errors import BudgetError, UnsupportedError
from systems.machine.limits import in_memory
from systems.planning.layout import ModelIndex
from systems.settings import TORCH_DTYPE, Settings
from systems.sizes import format_need, format_size

BUCKET = 500_000_000
MAX_LIVE = 1_000_000_000
PERSISTENT = 100_000
SUB_GROUP = 1_000_000_000
# Weights, two moments and the gradient of three sub-groups: one is read, one updated, one written at the same time.
OPTIMIZER_BUFFERS = 12
IGNORED_SIZES = ("train_batch_size", "train_micro_batch_size_per_gpu")

Place = Literal["device", "cpu", "nvme"]


@dataclass(frozen=True, kw_only=True)
class Variant:
    """One baseline. sub_group: elements updated at once by ZeRO-3. partial: the optimizer is split between both sides."""

    stage: Literal[2, 3]
    optimizer: Place = "device"
    parameters: Place = "device"
    sub_group: int = SUB_GROUP
    partial: bool = False
    super_offload: bool = False

    @property
    def offloads(self) -> bool:
        return self.optimizer != "device"

    def check(self, settings: Settings, system: str) -> None:
        """UnsupportedError for what this variant would do wrong, or not do."""
        if not settings.adam.decoupled and (self.partial or self.super_offload):
            raise UnsupportedError(f"{system} has AdamW only, with decoupled decay: take another system for Adam")
        if not self.super_offload:
            return
        if settings.device != "cuda":
            raise UnsupportedError(f"{system} runs on CUDA only: take deepspeed-zero3-offload with `device='cpu'`")
        if settings.clip > 0:
            raise UnsupportedError(
                f"{system} updates during backward only without clipping, and `clip` is {settings.clip:g}: use `clip=0`, "
                "or deepspeed-zero3-offload"
            )
        if settings.dtype == "fp16":
            raise UnsupportedError(f"{system} updates before gradients are unscaled: use `dtype='bf16'`")


@dataclass(frozen=True, kw_only=True)
class Sizes:
    """Of the model, in elements; width: bytes of one in the compute dtype. ranks: that share it.

    largest: parameter. block: all parameters of the largest block; block_parameters: how many of a block's are fetched.
    """

    parameters: int
    trainable: int
    largest: int
    block: int
    block_parameters: int
    width: int
    ranks: int = 1

    @classmethod
    def of(cls, index: ModelIndex, settings: Settings) -> Sizes:
        numels = [p.numel for p in index.parameters]
        blocks = [[numels[number] for number in unit.parameters] for unit in index.units if unit.block is not None] or [numels]
        return cls(
            parameters=index.numel(),
            trainable=index.numel(trainable_only=True),
            largest=max(numels),
            block=max(map(sum, blocks)),
            block_parameters=max(sum(numel > PERSISTENT for numel in block) for block in blocks),
            width=TORCH_DTYPE[settings.dtype].itemsize,
            ranks=settings.ranks,
        )

    @property
    def disk_buffers(self) -> int:
        """For parameters that come from disk: one for each that may be live, in two blocks and beside them."""
        return 2 * self.block_parameters + 4

    @property
    def disk_buffer(self) -> int:
        """Of a rank's share of a parameter."""
        return max(self.share(self.largest), 1 << 20)

    def share(self, numel: int) -> int:
        """A rank's."""
        return -(-numel // self.ranks)


def configuration(
    variant: Variant, settings: Settings, sizes: Sizes, *, ratio: float = 1.0, nvme_path: str | None = None
) -> Config:
    """What DeepSpeed is given, without the user's own file. ratio: share of the optimizer on the CPU, if it is split."""
    adam = settings.adam
    parameters: Config = {
        "lr": adam.lr,
        "betas": list(adam.betas),
        "eps": adam.eps,
        "weight_decay": adam.weight_decay,
        "adam_w_mode": adam.decoupled,
    }
    if not variant.offloads:
        parameters |= {"torch_adam": True, "fused": True}
    config: Config = {
        "train_micro_batch_size_per_gpu": 1,
        "gradient_accumulation_steps": settings.accumulate,
        "gradient_clipping": settings.clip,
        "steps_per_print": None,
        "wall_clock_breakdown": False,
        "timers": {"throughput": {"enabled": False}},
        "optimizer": {"type": "AdamW" if adam.decoupled else "Adam", "params": parameters},
        "bf16": {"enabled": settings.dtype == "bf16"},
        "fp16": {"enabled": settings.dtype == "fp16", "loss_scale": 0, "initial_scale_power": 16, "loss_scale_window": 2000}
        | {"hysteresis": 1, "min_loss_scale": 1},
        "zero_optimization": _zero(variant, sizes, ratio, nvme_path),
    }
    if settings.accumulate > 1:
        config["data_types"] = {"grad_accum_dtype": "fp32"}
    if "nvme" in (variant.optimizer, variant.parameters):
        config["aio"] = {
            "block_size": 1 << 20,
            "queue_depth": 8,
            "intra_op_parallelism": 1,
            "single_submit": False,
            "overlap_events": True,
        }
    return config


def _zero(variant: Variant, sizes: Sizes, ratio: float, nvme_path: str | None) -> Config:
    zero: Config = {
        "stage": variant.stage,
        "contiguous_gradients": True,
        "overlap_comm": not variant.super_offload,
        "reduce_scatter": True,
        "reduce_bucket_size": BUCKET,
        "allgather_bucket_size": BUCKET,
    }
    if variant.stage == 3:
        zero |= {
            "sub_group_size": variant.sub_group,
            "stage3_prefetch_bucket_size": BUCKET,
            "stage3_max_live_parameters": MAX_LIVE,
            "stage3_max_reuse_distance": MAX_LIVE,
            "stage3_param_persistence_threshold": PERSISTENT,
        }
    if variant.offloads:
        offload: Config = {"device": variant.optimizer, "pin_memory": True}
        if variant.partial:
            offload["ratio"] = ratio
        if variant.super_offload:
            offload |= {"super_offload": True, "cpuadam_cores_perc": 0.9}
        if variant.optimizer == "nvme":
            offload |= {"nvme_path": nvme_path, "buffer_count": OPTIMIZER_BUFFERS, "pipeline_read": True}
            offload |= {"pipeline_write": True}
        zero["offload_optimizer"] = offload
    if variant.parameters != "device":
        zero["offload_param"] = {"device": variant.parameters, "pin_memory": True}
        if variant.parameters == "nvme":
            # A parameter holds its buffer as long as it is live, so no more may be live than there are buffers for. And
            # none may be fetched ahead: where one occurs twice within the look-ahead, as at the turn from forward to
            # backward, DeepSpeed's prefetch from disk asks for it twice and fails (its issue 3062 is of this kind).
            zero |= {"stage3_prefetch_bucket_size": 0, "stage3_max_reuse_distance": sizes.block}
            zero["stage3_max_live_parameters"] = min(MAX_LIVE, 2 * sizes.block + sizes.largest)
            buffers = {"buffer_count": sizes.disk_buffers, "buffer_size": sizes.disk_buffer}
            zero["offload_param"] |= {"nvme_path": nvme_path, "max_in_cpu": 0} | buffers
    return zero


def with_users_file(config: Config, path: str | None, system: str) -> tuple[Config, list[str]]:
    """The user's file merged in, and what of it is not used. UnsupportedError if it changes what flags decide."""
    if path is None:
        return config, []
    theirs = read_config(path)
    notes = [f"{path}: {key} is not used, the run's batch size decides" for key in IGNORED_SIZES if key in theirs]
    theirs = {key: value for key, value in theirs.items() if key not in IGNORED_SIZES}
    refuse_changes(path, theirs, _decided(config, system))
    if "scheduler" in theirs:
        raise UnsupportedError(f"{path} has a scheduler: the run's own decides the learning rate; leave it out")
    return merge(config, theirs), notes


def _decided(config: Config, system: str) -> Mapping[tuple[str, ...], tuple[Any, str]]:
    """What is not the file's to change, and whose it is."""
    adam = config["optimizer"]["params"]
    return {
        ("gradient_accumulation_steps",): (config["gradient_accumulation_steps"], "`accumulate` decides"),
        ("gradient_clipping",): (config["gradient_clipping"], "`clip` decides"),
        ("bf16", "enabled"): (config["bf16"]["enabled"], "`dtype` decides"),
        ("fp16", "enabled"): (config["fp16"]["enabled"], "`dtype` decides"),
        ("zero_optimization", "stage"): (config["zero_optimization"]["stage"], f"{system} is named after it"),
        ("optimizer", "type"): (config["optimizer"]["type"], "every system here runs it"),
        ("optimizer", "params", "lr"): (adam["lr"], "the optimizer's own decides"),
        ("optimizer", "params", "betas"): (adam["betas"], "every system here has them"),
        ("optimizer", "params", "eps"): (adam["eps"], "every system here has it"),
        ("optimizer", "params", "weight_decay"): (adam["weight_decay"], "the optimizer's own decides"),
    }


def split_ratio(sizes: Sizes, variant: Variant, room: int) -> float:
    """Share of the optimizer left on the CPU when the device has `room` bytes for the rest.

    DeepSpeed puts the first int((1 - ratio) x n) of n sub-groups on the device: 16 bytes an element there, for master,
    moments and gradient in fp32.
    """
    trainable = sizes.share(sizes.trainable)
    groups = max(1, math.ceil(trainable / variant.sub_group))
    each = 16 * min(variant.sub_group, trainable)
    fitting = min(groups, max(room, 0) // max(each, 1))
    return 0.0 if fitting == groups else round(1 - (fitting + 0.5) / groups, 6) if fitting else 1.0


def host_need(variant: Variant, settings: Settings, sizes: Sizes, config: Config) -> int:
    """Bytes of host memory that DeepSpeed is known to hold for this variant on each rank, from its sources.

    Stage 3 shares parameters, gradients and states among the ranks, stage 2 the latter two. On several ranks each also starts
    with all parameters in the compute dtype on the host, before there are any states.
    Pinned buffers come from torch's allocator, which rounds each up to a power of two. Where the device is emulated,
    what would lie on the device is host memory too, and nothing is pinned.
    """
    cuda = settings.device == "cuda"
    pin = pinned_bytes if cuda else int
    parameters = sizes.share(sizes.parameters) if variant.stage == 3 else sizes.parameters
    start = sizes.parameters * sizes.width if sizes.ranks > 1 else 0
    need = 0
    if variant.parameters == "cpu":
        need += pin(parameters * sizes.width)
    elif variant.parameters == "nvme":
        need += pin(sizes.disk_buffers * sizes.disk_buffer * sizes.width)
    elif not cuda:
        need += parameters * sizes.width
    return max(start, need + _states_need(variant, settings, sizes, config))


def _states_need(variant: Variant, settings: Settings, sizes: Sizes, config: Config) -> int:
    """The part of `host_need` that is not parameters: a rank's share of gradients, masters and moments."""
    cuda = settings.device == "cuda"
    pin = pinned_bytes if cuda else int
    trainable, width, need = sizes.share(sizes.trainable), sizes.width, 0
    gradient_width = 4 if settings.accumulate > 1 else width
    if variant.optimizer == "device":
        return need if cuda else need + trainable * (12 + gradient_width)
    if variant.stage == 2:
        return need + pin(4 * trainable) + pin(width * trainable) + 12 * trainable
    group = int(config["zero_optimization"].get("sub_group_size", SUB_GROUP))
    whole, rest = divmod(trainable, group)
    need += pin(gradient_width * trainable)
    if variant.optimizer == "nvme":
        buffers = int(config["zero_optimization"]["offload_optimizer"]["buffer_count"])
        return need + buffers * 4 * min(group, trainable)
    share = float(config["zero_optimization"]["offload_optimizer"].get("ratio", 1.0)) if cuda else 1.0
    return need + int(share * (whole * pin(4 * group) + pin(4 * rest) + 12 * trainable))


def check_disk(sizes: Sizes, folder: str | None, system: str, ranks_here: int = 1) -> Path:
    """The folder. UnsupportedError without one, BudgetError when its disk has no room for what so many ranks will write."""
    if folder is None:
        raise UnsupportedError(f"{system} keeps model states on disk: say where with `options=dict(nvme_path='FOLDER')`")
    if not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise UnsupportedError(f"`options=dict(nvme_path='{folder}')` is not a folder that can be written to: make it first")
    if (memory := in_memory(folder)) is not None:
        raise UnsupportedError(f"`options=dict(nvme_path='{folder}')` is in memory ({memory}): name a folder on a disk")
    need = ranks_here * (16 * sizes.share(sizes.trainable) + sizes.width * sizes.share(sizes.parameters))
    have = shutil.disk_usage(folder).free
    if need > have:
        raise BudgetError(
            f"{system} writes about {format_need(need, have)} to {folder}, {format_size(have)} are free there: lower the "
            "model or take another folder",
            tier="disk",
            need=need,
            have=have,
        )
    return Path(folder).absolute()
