"""Threads that stay on their process's device."""

from __future__ import annotations

import threading
from collections.abc import Callable

import torch


class DeviceThread(threading.Thread):
    """A daemon on the CUDA device of whoever makes it.

    CUDA has every thread begin on device 0, where its first call takes half a GB, whichever device the call is about.
    """

    def __init__(self, target: Callable[[], None], name: str) -> None:
        super().__init__(target=target, name=name, daemon=True)
        self._device = torch.cuda.current_device() if torch.cuda.is_initialized() else None

    def run(self) -> None:
        if self._device is not None:
            torch.cuda.set_device(self._device)
        super().run()
