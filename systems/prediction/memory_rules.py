"""What packages that offload hold of each tier by their own rules of memory: no step is simulated, and nothing of them runs.

Note [Memory rules]
    host      what a run is refused by: `host_need` of deepspeed_config.py and of fsdp_memory.py.
              ZeRO-2 with offload   gradients (fp32) and 16-bit parameters in pinned buffers, each of a power of two bytes, and
                                    master and moments
              ZeRO-3 with offload   16-bit parameters and gradients and an fp32 buffer a sub-group, pinned alike, beside them
              FSDP2                 fp32 parameters, pinned one by one, gradients and moments
    device    activations at their peak, as observed, and
              ZeRO-2 with offload   all 16-bit parameters, and two buckets of gradients (overlap_comm)
              ZeRO-3 with offload   one bucket, and parameters up to stage3_max_live_parameters
              FSDP2                 the root's group and its gradient, and two blocks (one comes ahead) if a block has the peak
    Sources: DeepSpeed 0.19.8 (its stages 1 to 3, and the `estimate_zero2_model_states_mem_needs` and
    `estimate_zero3_model_states_mem_needs`, which take 16 and 18 bytes a parameter of host memory times a buffer factor of 1.5,
    and leave out buckets and activations), torch's fully_shard. They are what is known to be held: recorded runs took 3 to 18 %
    more of the host, and of the device 3 % less to 16 % more (tests/prediction/test_memory_rules.py).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from types import MappingProxyType

from systems.baselines import deepspeed_zero2_offload, deepspeed_zero3_offload
from systems.baselines.external import deepspeed_config, fsdp_memory
from systems.baselines.external.deepspeed_config import BUCKET, MAX_LIVE, Sizes, Variant, configuration
from systems.errors import UnsupportedError
from systems.planning.allowance import EXACT
from systems.planning.layout import ADAM, ModelIndex
from systems.planning.trace import NO_UNIT
from systems.prediction.forecast import Observations, Question
from systems.prediction.needs import TierNeed
from systems.settings import TORCH_DTYPE, Settings

Rule = Callable[[ModelIndex, Question, bool], tuple[int, dict[str, int]]]
"""Bytes of a rank's host, and of its device by kind, without activations; told whether a block has their peak."""
RULE = "by its memory rules; no step forecast"


@dataclass(frozen=True)
class RuledNeed:
    """Of one device and of one node's host: see Note [Memory rules]."""

    system: str
    device: TierNeed
    host: TierNeed

    @property
    def fits(self) -> bool:
        return self.device.fits and self.host.fits


def ruled_needs(question: Question, observations: Observations) -> list[RuledNeed]:
    """Of CUDA devices, and training with Adam: none for another question, nor of a package that does not take the model."""
    if question.allowance == EXACT or question.moments != ADAM:
        return []
    index, work = observations.of(question)
    activations = max(interval.peak_bytes for interval in work.intervals)
    behind = next(n for n, interval in enumerate(work.intervals) if interval.peak_bytes == activations)
    unit = work.events[behind][1] if behind < len(work.events) else NO_UNIT
    in_block = unit != NO_UNIT and index.units[unit].block is not None
    found = []
    for name, rule in RULES.items() if question.expert_ranks == 1 else ():  # each rank has all experts there
        if name == FSDP2 and question.dtype == "fp16":
            continue  # it has no loss scale there
        try:
            host, device = rule(index, question, in_block)
        except UnsupportedError:
            continue
        device = {kind: size for kind, size in (device | {"activations": activations}).items() if size}
        states = {"model states": host * question.ranks_on_node}
        needs = [
            TierNeed(sum(parts.values()), have, parts)
            for parts, have in ((device, question.device_memory), (states, question.host_memory))
        ]
        found.append(RuledNeed(name, *needs))
    return found


def _zero(variant: Variant) -> Rule:
    def rule(index: ModelIndex, question: Question, in_block: bool) -> tuple[int, dict[str, int]]:
        settings = Settings(
            device="cuda", dtype=question.dtype, accumulate=question.accumulate, clip=question.clip, ranks=question.ranks
        )
        sizes = Sizes.of(index, settings)
        host = deepspeed_config.host_need(variant, settings, sizes, configuration(variant, settings, sizes))
        bucket = sizes.width * min(BUCKET, sizes.trainable)
        if variant.stage == 2:
            return host, {"weights": sizes.width * sizes.parameters, "gradients": 2 * bucket}
        return host, {"weights": sizes.width * min(MAX_LIVE, sizes.parameters), "gradients": bucket}

    return rule


def _fsdp2(index: ModelIndex, question: Question, in_block: bool) -> tuple[int, dict[str, int]]:
    width = TORCH_DTYPE[question.dtype].itemsize
    numels = [p.numel for p in index.parameters]
    blocks = [sum(numels[number] for number in unit.parameters) for unit in index.units if unit.block is not None]
    root = sum(numels) - sum(blocks)
    weights = root + (sum(sorted(blocks)[-2:]) if in_block else 0)
    parts = {"weights": width * weights, "gradients": width * root}
    return fsdp_memory.host_need(index, question.ranks, cuda=True), parts


FSDP2 = "fsdp2-offload"
RULES: Mapping[str, Rule] = MappingProxyType(
    {
        "deepspeed-zero2-offload": _zero(deepspeed_zero2_offload.SYSTEM.variant),
        "deepspeed-zero3-offload": _zero(deepspeed_zero3_offload.SYSTEM.variant),
        FSDP2: _fsdp2,
    }
)
