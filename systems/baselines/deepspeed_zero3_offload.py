"""DeepSpeed ZeRO-3 with parameters and optimizer on the host: the usual way to train what does not fit on a device."""

from __future__ import annotations

from systems.baselines.external.deepspeed_config import Variant
from systems.baselines.external.deepspeed_system import DeepSpeedSystem
from systems.baselines.external.faces import DEEPSPEED_ZERO3_OFFLOAD as FACE

SYSTEM = DeepSpeedSystem(FACE, Variant(stage=3, optimizer="cpu", parameters="cpu"))
