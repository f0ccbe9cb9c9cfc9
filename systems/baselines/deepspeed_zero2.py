"""DeepSpeed ZeRO-2 without offload, as H3T compares with it: everything on the device."""

from __future__ import annotations

from systems.baselines.external.deepspeed_config import Variant
from systems.baselines.external.deepspeed_system import DeepSpeedSystem
from systems.baselines.external.faces import DEEPSPEED_ZERO2 as FACE

SYSTEM = DeepSpeedSystem(FACE, Variant(stage=2))
