"""Host memory within a pass that is no activation."""

from __future__ import annotations

from contextlib import AbstractContextManager

from torch.utils._python_dispatch import _disable_current_modes


def uncounted() -> AbstractContextManager[object]:
    """Around tensors that a pass makes and that are no activations: host memory, which has an account of its own.

    The emulated device's memory is the host's too, so that its meter would count them; inside this nobody sees operations.
    """
    return _disable_current_modes()
