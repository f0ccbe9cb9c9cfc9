"""What every engine of this project's own does in the same way: counts micro-batches, ends and drops steps. How it closes:
closing.py.
"""

from __future__ import annotations

import threading
from abc import abstractmethod
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager

import torch

from systems.checkpoint import AllExperts, TrainingState
from systems.errors import UnsupportedError
from systems.machine.budgets import host_budget
from systems.messages import in_words
from systems.ranks.group_names import REPLICA
from systems.ranks.ranks import Ranks
from systems.recipe.model.inputs import refuse_training_nothing
from systems.recipe.model.wider_buffers import explain_types
from systems.recipe.step.closing import ClosingEngine
from systems.recipe.step.control import StepControl, check_together
from systems.recipe.step.in_progress import is_running
from systems.recipe.step.optimizer_states import WrittenState
from systems.settings import TORCH_DTYPE, Settings

NO_LOSS = "backward: call the engine first, with gradients enabled, to get a loss of the step that it begins"


class SteppingEngine(ClosingEngine):
    """_trains: something of the model requires a gradient. _together: all ranks, if there are several.

    _groups: of the ranks that have each parameter. _named_by_all: see FirstValuesAlike.names.
    """

    settings: Settings
    control: StepControl
    _trains: bool
    _together: Ranks | None = None
    _groups: Sequence[str] = ()
    _named_by_all: Sequence[Sequence[str]] = ()

    # ---- what the engines do differently

    @property
    @abstractmethod
    def _passes(self) -> int:
        """Backward passes of the step in progress."""

    @abstractmethod
    def _backward(self, loss: torch.Tensor) -> None: ...

    @abstractmethod
    def _finish_step(self) -> None: ...

    @abstractmethod
    def _abort(self) -> None:
        """Something broke off: forget a step that is not done."""

    @abstractmethod
    def _discard(self) -> None:
        """Forget the step in progress, or refuse to."""

    @abstractmethod
    def _state(self, what: str) -> WrittenState:
        """Once nothing moves. what: is wanted, for messages. UnsupportedError within a step."""

    def _host_room(self, wanted: int) -> int:
        """Bytes of host memory that are left of the budget; wanted: how many had better be."""
        return host_budget(self.settings)

    # ---- what they do alike

    @torch.inference_mode(False)
    def backward(self, loss: torch.Tensor) -> None:
        self._check_open()
        refuse_training_nothing(self._trains, "backward")
        accumulate = self.settings.accumulate
        if self._passes >= accumulate:
            raise ValueError(
                f"backward was called {self._passes + 1} times in a step with accumulate={accumulate}: call step(), or set "
                "accumulate to the number of micro-batches"
            )
        with self._recovering(), self._watch.casts.call():
            self._backward(loss)

    @torch.inference_mode(False)
    def step(self) -> None:
        self._check_open()
        refuse_training_nothing(self._trains, "step")
        if not self._passes:
            raise ValueError(f"step: 0 of {self.settings.accumulate} micro-batches had their backward: call backward first")
        refused: UnsupportedError | None = None
        with self._recovering():
            if self._together is None:
                self._watch.check()
            else:
                self._together.together("edits", self._watch.check)
            try:
                if self._together is None:
                    self.control.check()
                else:
                    check_together(self.control, self._together)
            except UnsupportedError as error:  # nothing was done: the step can still be taken, or dropped
                refused = error
            else:
                self._finish_step()
        if refused is not None:
            raise refused

    def discard(self) -> None:
        self._check_open()
        self._discard()

    @contextmanager
    def _recovering(self, recover: Callable[[], None] | None = None) -> Iterator[None]:
        """An exception leaves an engine that can run the next step, or says why it cannot, or close.

        recover: instead of forgetting the step in progress.
        """
        self._begun_in = threading.get_ident()
        try:
            yield
        except BaseException as error:
            self.control.told.add(in_words(error))
            explain_types(error, self.module, TORCH_DTYPE[self.settings.dtype])
            (recover or self._abort)()
            self._begun_in = None
            raise
        self._begun_in = None

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the engine is closed")
        self._access.check()
        if self._begun_in is not None and not is_running(self, self._begun_in):
            self._abort()  # a second Ctrl-C came before all was tidied up
            self._begun_in = None

    def set_lr(self, lr: float) -> None:
        self._access.check_process()
        self.control.groups.set_lr(lr)

    def training_state(self) -> TrainingState:
        state = self._state("checkpoint or export")
        if not self._named_by_all:
            return state
        return AllExperts(state, self._named_by_all, [group == REPLICA for group in self._groups], self.ranks)

    def _settle(self, what: str, *, in_step: bool, overwrites: bool = False) -> None:
        """Wait until nothing moves. UnsupportedError within a step, RuntimeError where parameters belong to no step.

        overwrites: edits past the engine do not matter.
        """
        self._check_open()
        if in_step:
            raise UnsupportedError(f"{what}: a step is in progress: do it before the forward pass or after step()")
        (self._watch.check_names if overwrites else self._watch.check)()
        self.drain()
        self.control.check_whole()
