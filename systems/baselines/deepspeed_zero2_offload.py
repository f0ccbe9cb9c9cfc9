"""DeepSpeed ZeRO-2 with the optimizer on the host (ZeRO-Offload): 16-bit parameters stay on the device."""

from __future__ import annotations

from systems.baselines.external.deepspeed_config import Variant
from systems.baselines.external.deepspeed_system import DeepSpeedSystem
from systems.baselines.external.faces import DEEPSPEED_ZERO2_OFFLOAD as FACE

SYSTEM = DeepSpeedSystem(FACE, Variant(stage=2, optimizer="cpu"))
