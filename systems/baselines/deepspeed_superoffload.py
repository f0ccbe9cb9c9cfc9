"""DeepSpeed SuperOffload: ZeRO-3 whose CPU Adam runs in a process of its own and starts during backward.

Only without clipping, which would need the norm first. It spawns, so the main module of the program needs a
`__main__` guard.
"""

from __future__ import annotations

from systems.baselines.external.deepspeed_config import Variant
from systems.baselines.external.deepspeed_system import DeepSpeedSystem
from systems.baselines.external.faces import DEEPSPEED_SUPEROFFLOAD as FACE

SYSTEM = DeepSpeedSystem(FACE, Variant(stage=3, optimizer="cpu", super_offload=True, sub_group=400_000_000))
