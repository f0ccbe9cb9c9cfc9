"""What every engine of this project's own does in the same way: counts micro-batches, ends and drops steps, and closes."""

from __future__ import annotations

import contextlib
import sys
from abc import abstractmethod
from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch

from systems.checkpoint import TrainingState
from systems.device.lanes.access import Access
from systems.errors import BudgetError, UnsupportedError
from systems.machine.budgets import host_budget
from systems.messages import in_words
from systems.recipe.model.giving_back import leave_without
from systems.recipe.model.inputs import refuse_training_nothing
from systems.recipe.model.parameter_watch import ParameterWatch
from systems.recipe.step.control import StepControl
from systems.recipe.step.in_progress import is_running
from systems.recipe.step.optimizer_states import Moments, OptimizerStates
from systems.settings import Settings
from systems.system import Engine

NO_LOSS = "backward: call the engine first, with gradients enabled, to get a loss of the step that it begins"


class SteppingEngine(Engine):
    """_trains: something of the model requires a gradient. _failed: an exception ended the `with` block.

    _states: of the user's torch optimizer, None without one. _broken_off: a pass runs, or what an exception left of one is
    not tidied up yet. _given: the model has its values again.
    """

    settings: Settings
    control: StepControl
    _watch: ParameterWatch
    _trains: bool
    _access: Access
    _states: OptimizerStates | None = None
    _closed = _failed = _broken_off = _given = False

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
    def _state(self, what: str) -> Moments:
        """Once nothing moves. what: is wanted, for messages. UnsupportedError within a step."""

    def _host_room(self) -> int:
        """Bytes of host memory that are left of the budget."""
        return host_budget(self.settings)

    @abstractmethod
    def _give_back(self, *, keep: bool) -> None:
        """Free everything; if nothing is in the way, the model has its values again. Else it raises, all being freed.

        keep: False for a model that shall have none; what is in the way is told all the same. What goes wrong while memory is
        freed is raised as well, and costs no values.
        """

    @abstractmethod
    def _let_go(self) -> None:
        """Free everything, and leave the model without weights."""

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
        with self._recovering(), self._watch.call():
            self._backward(loss)

    @torch.inference_mode(False)
    def step(self) -> None:
        self._check_open()
        refuse_training_nothing(self._trains, "step")
        if not self._passes:
            raise ValueError(f"step: 0 of {self.settings.accumulate} micro-batches had their backward: call backward first")
        refused: UnsupportedError | None = None
        with self._recovering():
            self._watch.check()
            try:
                self.control.check()
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
        self._broken_off = True
        try:
            yield
        except BaseException as error:
            self.control.told.add(in_words(error))
            (recover or self._abort)()
            self._broken_off = False
            raise
        self._broken_off = False

    def _check_open(self) -> None:
        if self._closed:
            raise ValueError("the engine is closed")
        self._access.check()
        if self._broken_off and not is_running(self):  # a second Ctrl-C came before all was tidied up
            self._abort()
            self._broken_off = False

    def set_lr(self, lr: float) -> None:
        self._access.check_process()
        self.control.set_lr(lr)

    def training_state(self) -> TrainingState:
        return self._state("checkpoint or export")

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

    def __exit__(self, kind: object = None, *_: object) -> None:
        """After an error that is the one that is told, whatever closing meets."""
        self._failed = kind is not None
        with contextlib.suppress(Exception) if self._failed else contextlib.nullcontext():
            self.close()

    @torch.inference_mode(False)  # what the model is given back is to train
    def close(self, *, keep: bool = True) -> None:
        if self._closed:
            return
        if self._access.is_foreign:  # everything is its maker's
            self._closed = True
            return
        if not self._failed:
            self._access.check()
            if is_running(self):
                raise ValueError("close: a pass of this engine is running, which needs its weights: close it after that")
        self._closed = True
        lost, told, amid = self._watch.lost(), frozenset(self.control.told), sys.exception() is not None
        if self._states is not None:
            self._states.end(used=any(self.control.updates))
        if self._failed:
            self._leave_without("an error ended its engine")
            self._let_go()
            return
        try:
            self._give_back(keep=keep)
        except BaseException as error:
            if not self._given:
                self._leave_without(f"its engine could not give them back ({in_words(error)})")
            first = amid and isinstance(error, Exception)  # which stands
            if not first and not isinstance(error, BudgetError) and in_words(error) not in told:
                raise
        else:
            if keep:
                lost = self._watch.given_back(lost)
            else:
                self._leave_without("its engine was closed with keep=False")
        if lost is not None and not amid:
            raise lost

    def _leave_without(self, why: str) -> None:
        leave_without(self.module, f"this model's weights are gone: {why}")


@contextmanager
def starting(engine: SteppingEngine) -> Iterator[None]:
    """Around what is left to do when the model's own values are gone: if it breaks off, the model has none."""
    try:
        yield
    except BaseException:
        engine._closed = True
        if engine._states is not None:
            engine._states.end(used=False)
        engine._leave_without("its engine could not start")
        engine._let_go()
        raise
