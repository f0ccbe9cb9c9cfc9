"""DeepSpeed ZeRO-Infinity: parameters and optimizer on disk, in the folder that nvme_path names."""

from __future__ import annotations

from systems.baselines.external.deepspeed_config import Variant
from systems.baselines.external.deepspeed_system import DeepSpeedSystem, InfinityOptions

SYSTEM = DeepSpeedSystem(
    "deepspeed-infinity",
    "DeepSpeed ZeRO-Infinity, model states on disk; needs nvme_path",
    Variant(stage=3, optimizer="nvme", parameters="nvme", sub_group=100_000_000),
    InfinityOptions,
)
