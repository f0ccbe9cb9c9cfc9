"""What is known of an optimizer: which fp32 states it keeps, whose parameter groups it reads, and the kernel that updates.

All else follows from that: the bytes of a layout, plans and forecasts, homes on host and disk, second versions, checkpoints,
and what `optimizer.state_dict()` gives. A file of this folder that binds `RULE` is an optimizer; choice.py finds it.
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import Any, ClassVar

import torch

from systems.adam.kernel import AdamKernel
from systems.settings import Hyperparameters


class OptimizerRule(ABC):
    """One element-wise optimizer: an element's update reads and writes that element of master, moments and gradient alone.

    name: as in checkpoints, where it must not change. hyperparameters: their class. taken: the torch classes whose groups are
    read, just these and no subclass. counted: torch's state of a parameter has `step`, the number of its updates.
    """

    name: ClassVar[str]
    hyperparameters: ClassVar[type[Hyperparameters]]
    taken: ClassVar[tuple[type[torch.optim.Optimizer], ...]]
    counted: ClassVar[bool] = False

    @abstractmethod
    def moments(self, hyper: Any) -> tuple[str, ...]:
        """Names of the fp32 tensors that it keeps beside the master weight, as torch's state_dict has them."""

    @abstractmethod
    def read(self, optimizer: torch.optim.Optimizer, group: Mapping[str, Any]) -> Hyperparameters:
        """Of one parameter group, as it is now."""

    @abstractmethod
    def range(self, hyper: Any, offset: int, numel: int, step: int) -> Any:
        """Elements [offset, offset + numel) of a task of the kernel's, which take their update number `step`, from 1."""

    @abstractmethod
    def kernel(self, base: AdamKernel) -> AdamKernel:
        """What updates so, on the device of `base`, and adds, rounds and copies as that does."""
