"""Calls of the model that come past the engine: `model(...)`, `model.generate()`, `model.encoder(x)`.

They get what a call of the engine has about it. One with gradients belongs to the step in progress, if that takes any; every
other one is a pass without gradients.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, ExitStack, contextmanager

import torch

from systems.device.device import Device, ambient
from systems.substrate.batch_shape import batch_shape_of
from systems.substrate.planner import Planner
from systems.substrate.progress import Progress
from systems.substrate.runtime import Runtime


class CallsPastEngine:
    """What is put around each of them."""

    def __init__(self, runtime: Runtime, *, progress: Progress, planner: Planner, device: Device) -> None:
        self._runtime, self._progress, self._planner, self._device = runtime, progress, planner, device
        self._casting: Callable[[], AbstractContextManager[None]] = contextlib.nullcontext

    def let_cast(self, casting: Callable[[], AbstractContextManager[None]]) -> None:
        """Once the parameters are watched: around each call, it lets modules cast their weights."""
        self._casting = casting

    @contextmanager
    def around(self, given: object) -> Iterator[None]:
        """given: what the outermost module is called with."""
        progress, device = self._progress, self._device
        device.access.check_process()
        with ExitStack() as stack:
            if not (torch.is_grad_enabled() and progress.wants_more):
                self._planner.meet_aside(batch_shape_of(given), in_step=progress.in_step)
                stack.enter_context(self._runtime.aside())
            stack.enter_context(self._casting())
            stack.enter_context(ambient())
            stack.enter_context(device.metered())
            yield
