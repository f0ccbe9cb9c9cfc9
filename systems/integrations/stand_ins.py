"""What transformers' Trainer takes for its model and its optimizer: both lead to the engine, which has weights and moments."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import torch

from systems.system import Engine


class ModelStandIn:
    """Called as the model is, it runs the engine; everything else that is asked of it is the model's own.

    It is no module, so that nobody wraps, moves or casts what the engine keeps.
    """

    def __init__(self, engine: Engine) -> None:
        self._engine = engine

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._engine(*args, **kwargs)

    def __getattr__(self, name: str) -> Any:
        return getattr(self._engine.module, name)


class OptimizerStandIn(torch.optim.Optimizer):
    """Its step is the engine's; its groups are those of `optimizer`, whose moments the engine has.

    step_was_skipped: the last step met a gradient that was not finite, and changed nothing.
    """

    _is_accelerate_prepared = True  # else Accelerate wraps it, and copies all moments to the device
    step_was_skipped = False

    def __init__(self, engine: Engine, optimizer: torch.optim.Optimizer) -> None:  # torch's own would want parameters
        self._engine, self._optimizer = engine, optimizer

    def __getattr__(self, name: str) -> Any:
        return getattr(self._optimizer, name)

    def step(self, closure: Callable[[], float] | None = None) -> None:  # type: ignore[override]
        before = len(self._engine.outcomes)
        self._engine.step()
        self.step_was_skipped = any(outcome.skipped for outcome in self._engine.outcomes[before:])

    def state_dict(self) -> dict[str, Any]:
        return self._optimizer.state_dict()

    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._optimizer.load_state_dict(state_dict)

    def add_param_group(self, param_group: dict[str, Any]) -> None:
        self._optimizer.add_param_group(param_group)
