"""What a loop's checkpoint has beside an engine's: an optimizer's groups, a schedule, random generators. JSON, as tensors.

Nothing here is pickled: what is no JSON is refused when it is saved.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from systems.checkpoint import Loaded, as_tensor, of_tensor

LOOP, PYTHON, NUMPY, CPU, CUDA = "loop", "random.python", "random.numpy", "random.cpu", "random.cuda"


def loop_state(optimizer: torch.optim.Optimizer, schedule: Any) -> dict[str, Any]:
    """The client_state of a checkpoint, of all ranks alike."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return {"groups": groups, "schedule": schedule.state_dict()}


def check_loop(saved: Loaded, groups: Sequence[Mapping[str, Any]]) -> Any:
    """What `restore_loop` takes. ValueError where it is not there, or of other groups."""
    found = saved.client_state
    if LOOP in saved.beside:  # as it was saved before there were client_states
        found = of_tensor(saved.beside[LOOP], LOOP)
    if not {"groups", "schedule"} <= found.keys():
        raise ValueError("the checkpoint has an engine's state and no loop's: it was not saved by an OffloadTrainer")
    if len(found["groups"]) != len(groups):
        raise ValueError(f"the optimizer has {len(groups)} parameter groups, in the checkpoint {len(found['groups'])}")
    return found


def restore_loop(found: Any, optimizer: torch.optim.Optimizer, schedule: Any) -> None:
    for group, values in zip(optimizer.param_groups, found["groups"], strict=True):
        group.update({name: tuple(value) if isinstance(value, list) else value for name, value in values.items()})
    schedule.load_state_dict(found["schedule"])


def random_state() -> dict[str, torch.Tensor]:
    """Of this rank's generators."""
    name, keys, *rest = np.random.get_state(legacy=True)
    found = {
        PYTHON: as_tensor(random.getstate(), "Python's random state"),
        NUMPY: as_tensor([name, np.asarray(keys).tolist(), *rest], "numpy's random state"),
        CPU: torch.get_rng_state(),
    }
    return found | ({CUDA: torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def restore_random(saved: Mapping[str, torch.Tensor]) -> None:
    """Those generators that are there, and were when it was saved."""
    if PYTHON in saved:
        version, keys, gauss = of_tensor(saved[PYTHON], PYTHON)
        random.setstate((version, tuple(keys), gauss))
    if NUMPY in saved:
        name, keys, *rest = of_tensor(saved[NUMPY], NUMPY)
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    if CPU in saved:
        torch.set_rng_state(saved[CPU])
    if CUDA in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved[CUDA])
