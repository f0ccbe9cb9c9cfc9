"""The state of a managed engine, parameter by parameter, for checkpoints; see systems.checkpoint."""

from __future__ import annotations

from systems.checkpoint import Described, LoopState, ParameterState
from systems.planning.layout import ModelIndex
from systems.substrate.planner import Parts


class ManagedState:
    """Call only when drained, outside a step."""

    def __init__(self, index: ModelIndex, parts: Parts) -> None:
        self._parts = parts
        self.parameters = [Described(p.name, tuple(p.shape), p.trainable) for p in index.parameters]

    @property
    def loop(self) -> LoopState:
        return self._parts.control.loop

    @loop.setter
    def loop(self, state: LoopState) -> None:
        self._parts.control.loop = state

    def read(self, parameter: int) -> ParameterState:
        store, shape = self._parts.store, self.parameters[parameter].shape
        value = store.parameter_values(parameter, shape)
        moments = store.moments(parameter)
        first, second = (None, None) if moments is None else (each.view(shape) for each in moments)
        return ParameterState(value, first, second, self._parts.control.updates[parameter])

    def write(self, parameter: int, state: ParameterState) -> None:
        self._parts.residency.overwrite(parameter, state.value)
        if state.exp_avg is not None and state.exp_avg_sq is not None:
            self._parts.store.overwrite_moments(parameter, state.exp_avg.reshape(-1), state.exp_avg_sq.reshape(-1))
        self._parts.control.updates[parameter] = state.updates
