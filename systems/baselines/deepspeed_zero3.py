"""DeepSpeed ZeRO-3 without offload, as H3T compares with it. At one rank it partitions over nobody and keeps its own costs."""

from __future__ import annotations

from systems.baselines.external.deepspeed_config import Variant
from systems.baselines.external.deepspeed_system import DeepSpeedSystem
from systems.baselines.external.faces import DEEPSPEED_ZERO3 as FACE

SYSTEM = DeepSpeedSystem(FACE, Variant(stage=3))
