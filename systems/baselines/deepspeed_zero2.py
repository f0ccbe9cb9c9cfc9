"""DeepSpeed ZeRO-2 without offload, as H3T compares with it: everything on the device."""

from __future__ import annotations

from systems.baselines.external.deepspeed_config import Variant
from systems.baselines.external.deepspeed_system import DeepSpeedSystem

SYSTEM = DeepSpeedSystem(
    "deepspeed-zero2",
    "DeepSpeed ZeRO-2, nothing offloaded",
    Variant(stage=2),
)
