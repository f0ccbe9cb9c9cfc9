"""DeepSpeed ZeRO-Infinity: the optimizer on disk, in the folder that nvme_path names, and parameters too if asked for.

16-bit parameters stay in host memory by default. parameters=nvme puts them on disk as well, without fetching ahead, which
DeepSpeed cannot do there for a model that is trained (external/deepspeed_config.py says why).
"""

from __future__ import annotations

from systems.baselines.external.deepspeed_config import Variant
from systems.baselines.external.deepspeed_system import DeepSpeedSystem
from systems.baselines.external.faces import DEEPSPEED_INFINITY as FACE

SYSTEM = DeepSpeedSystem(FACE, Variant(stage=3, optimizer="nvme", parameters="cpu", sub_group=100_000_000))
