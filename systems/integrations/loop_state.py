"""What a loop's checkpoint has beside an engine's: an optimizer's groups, a schedule, random generators. JSON, as tensors.

Nothing here is pickled: what is no JSON is refused when it is saved.
"""

from __future__ import annotations

import json
import random
from collections.abc import Mapping, Sequence
from typing import Any

import numpy as np
import torch

from systems.errors import UnsupportedError

LOOP, PYTHON, NUMPY, CPU, CUDA = "loop", "random.python", "random.numpy", "random.cpu", "random.cuda"


def _as_tensor(value: Any, what: str) -> torch.Tensor:
    """UTF-8 of its JSON."""
    try:
        text = json.dumps(value)
    except (TypeError, ValueError) as error:
        raise UnsupportedError(f"{what} cannot be saved, which is kept as JSON: {error}") from error
    return torch.frombuffer(bytearray(text.encode()), dtype=torch.uint8)


def _of_tensor(tensor: torch.Tensor) -> Any:
    return json.loads(tensor.numpy().tobytes())


def loop_state(optimizer: torch.optim.Optimizer, schedule: Any) -> dict[str, torch.Tensor]:
    """Of all ranks alike. UnsupportedError for values that are no JSON."""
    groups = [{name: value for name, value in group.items() if name != "params"} for group in optimizer.param_groups]
    return {LOOP: _as_tensor({"groups": groups, "schedule": schedule.state_dict()}, "the optimizer's groups or the schedule")}


def check_loop(saved: Mapping[str, torch.Tensor], groups: Sequence[Mapping[str, Any]]) -> Any:
    """What `restore_loop` takes. ValueError where it is not there, or of other groups."""
    if LOOP not in saved:
        raise ValueError("the checkpoint has an engine's state and no loop's: it was not saved by an OffloadTrainer")
    found = _of_tensor(saved[LOOP])
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
        PYTHON: _as_tensor(random.getstate(), "Python's random state"),
        NUMPY: _as_tensor([name, np.asarray(keys).tolist(), *rest], "numpy's random state"),
        CPU: torch.get_rng_state(),
    }
    return found | ({CUDA: torch.cuda.get_rng_state()} if torch.cuda.is_available() else {})


def restore_random(saved: Mapping[str, torch.Tensor]) -> None:
    """Those generators that are there, and were when it was saved."""
    if PYTHON in saved:
        version, keys, gauss = _of_tensor(saved[PYTHON])
        random.setstate((version, tuple(keys), gauss))
    if NUMPY in saved:
        name, keys, *rest = _of_tensor(saved[NUMPY])
        np.random.set_state((name, np.array(keys, dtype=np.uint32), *rest))
    if CPU in saved:
        torch.set_rng_state(saved[CPU])
    if CUDA in saved and torch.cuda.is_available():
        torch.cuda.set_rng_state(saved[CUDA])
