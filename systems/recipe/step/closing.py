"""How an engine ends: what its model is given back, what is told once more, and what is told when it could not even start.

An engine has the model's values for as long as it is open. Whatever ends it, the model has them again or says why not, all
memory is free, and what went wrong is raised once.
"""

from __future__ import annotations

import contextlib
import sys
from abc import abstractmethod
from collections.abc import Iterator
from contextlib import contextmanager

import torch

from systems.device.lanes.access import Access
from systems.errors import BudgetError
from systems.messages import in_words
from systems.recipe.model.giving_back import leave_without
from systems.recipe.model.parameter_watch import ParameterWatch
from systems.recipe.step.control import StepControl
from systems.recipe.step.in_progress import is_running
from systems.recipe.step.optimizer_states import OptimizerStates
from systems.system import Engine


class ClosingEngine(Engine):
    """An engine that took its model's values and gives them back.

    _failed: an exception ended the `with` block. _given: the model has its values again. _states: of the user's torch
    optimizer, None without one. _begun_in: the thread of a backward pass or step that runs, or of which an exception left what
    is not tidied up yet.
    """

    control: StepControl
    _watch: ParameterWatch
    _access: Access
    _begun_in: int | None = None
    _states: OptimizerStates | None = None
    _closed = _failed = _given = False

    @abstractmethod
    def _give_back(self, *, keep: bool) -> None:
        """Free everything; if nothing is in the way, the model has its values again. Else it raises, all being freed.

        keep: False for a model that shall have none; what is in the way is told all the same. What goes wrong while memory is
        freed is raised as well, and costs no values.
        """

    @abstractmethod
    def _let_go(self) -> None:
        """Free everything, and leave the model without weights."""

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
            if is_running(self, self._begun_in):
                raise ValueError("close: a pass of this engine is running, which needs its weights: close it after that")
        self._closed = True
        try:
            self._end(keep)
        finally:
            self.ranks.leave()

    def _end(self, keep: bool) -> None:
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
def starting(engine: ClosingEngine) -> Iterator[None]:
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
