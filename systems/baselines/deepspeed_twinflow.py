"""DeepSpeed ZeRO-3 with the optimizer split between CPU and device (Twin-Flow, of ZeRO-Offload++).

Parameters stay on the device. The ratio is the user's, or sized so that the device is filled. DeepSpeed places whole
sub-groups, so they are small here: 1e8 elements.
"""

from __future__ import annotations

from systems.baselines.external.deepspeed_config import Variant
from systems.baselines.external.deepspeed_system import DeepSpeedSystem
from systems.baselines.external.faces import DEEPSPEED_TWINFLOW as FACE

SYSTEM = DeepSpeedSystem(FACE, Variant(stage=3, optimizer="cpu", partial=True, sub_group=100_000_000))
