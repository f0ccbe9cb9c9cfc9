"""Sees to it that what a user does to live parameters past the engine is followed or refused by name, never lost.

Note [Edits]
    An edit in place counts in the parameter's version, be it under no_grad or through `.data`. `check` finds it at the next
    call of the engine: a forward pass, step, summon, a checkpoint, or close. It may lie in memory that is about to go, or in
    the NaNs that stand for an absent weight, so it is not taken over but refused, until summon(write=True) has written all
    values anew. Other values by `parameter.data = t` or `load_state_dict` are refused at once, as is a conversion of the model.
    Who closes an engine gets the values that were trained, edits or not, and parameters that were replaced are put back.
    What numpy, a kernel of the user's or a view from before initialize writes leaves no trace that could be found.

What modules do by conversions of their weights is followed in casts.py.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Sequence
from functools import cache
from typing import Any

import torch
from torch import nn

from systems.errors import UnsupportedError
from systems.recipe.model.calls import Hook
from systems.recipe.model.casts import Casts, refuse_values, same_place
from systems.recipe.model.parameters import ManagedParameter
from systems.recipe.model.structure import ADVICE, Structure
from systems.recipe.model.units import FoundModel
from systems.state_dicts import refuse_loading

Pending = Callable[[bool], bool]


class _Eye:
    """On one parameter; see parameters.Watched."""

    __slots__ = ("_casts", "_name", "_number", "gradients_pending")

    def __init__(self, casts: Casts, number: int, name: str, pending: Pending) -> None:
        self._casts, self._number, self._name, self.gradients_pending = casts, number, name, pending

    def is_of(self, casts: Casts) -> bool:
        return self._casts is casts

    def hides_gradient(self) -> bool:
        return self._casts.converting

    def exchange(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        self._casts.exchange(self._number, value)

    def place(self, parameter: nn.Parameter, source: object) -> None:
        if not (isinstance(source, torch.Tensor) and same_place(parameter, source)):
            refuse_values(self._name, "set_()")

    def refuse_another(self) -> None:
        raise UnsupportedError(
            f"parameter {self._name} is with the engine, and another Parameter made of it would not be: {ADVICE}"
        )


class ParameterWatch:
    """From construction to `end`. See the note above.

    pending: asked with whether there is something in `.grad`. kind: what parameters become. readable: whether the values of a
    parameter are on the device now. restore: makes good what an edit did to what stands for absent values.
    cast: told of a parameter that is read in another dtype. casts: follows that, within calls of the engine.
    """

    def __init__(
        self,
        model: nn.Module,
        found: FoundModel,
        parameters: Sequence[nn.Parameter],
        pending: Pending,
        kind: type[ManagedParameter] = ManagedParameter,
        *,
        readable: Callable[[int], bool] = lambda number: True,
        restore: Callable[[], None] = lambda: None,
        cast: Callable[[int], None] = lambda number: None,
    ) -> None:
        self._names, self._parameters = [p.name for p in found.index.parameters], parameters
        self._restore = restore
        self.casts = Casts(parameters, self._names, readable, cast)
        self._classes: list[Any] = [type(p) for p in parameters]
        self._trainable = [p.requires_grad for p in parameters]
        mine = {id(p) for p in parameters}
        self._guarded = [m for m in model.modules() if any(id(p) in mine for p in m.parameters())]
        self._references = [weakref.ref(p) for p in parameters]  # torch.utils.swap_tensors refuses what has one
        self._told = False
        self._undone: list[str] = []
        self._as_edited: list[str] = []
        self._end_refusing: Callable[[], None] = lambda: None
        self._structure = Structure(model, parameters, self._names)
        try:
            self._begin(kind, pending)
        except BaseException:
            self.end()
            raise

    def _begin(self, kind: type[ManagedParameter], pending: Pending) -> None:
        for number, (parameter, theirs) in enumerate(zip(self._parameters, self._classes, strict=True)):
            parameter._watched = _Eye(self.casts, number, self._names[number], pending)  # type: ignore[attr-defined]
            parameter.__class__ = kind if theirs is nn.Parameter else _managed(kind, theirs)
        self.casts.begin(self._guarded)
        self._end_refusing = refuse_loading(self._guarded, Hook(_refuse_to_load))
        self.accept()

    def accept(self) -> None:
        """All values were written by the engine: whatever was edited before does not matter any more."""
        self._versions = [p._version for p in self._parameters]
        self._told = False
        self._restore()

    def check(self) -> None:
        """UnsupportedError for a parameter edited, replaced or unfrozen since initialize; asks the device nothing."""
        error = self._found() or self._structure.changed()
        if error is not None:
            self._told = True
            raise error

    def lost(self) -> UnsupportedError | None:
        """Before the engine closes: what `check` would say, if nobody was told, of this or of another error."""
        return None if self._told or sys.exception() is not None else self._found() or self._structure.lost()

    def check_names(self) -> None:
        """UnsupportedError where names of now are not those of initialize; edits do not matter."""
        error = self._structure.renamed()
        if error is not None:
            raise error

    def undo(self, restore: Callable[[int], bool]) -> None:
        """Before values are given back: they are those that were trained, not what they were edited to.

        restore: gives a parameter the values that the engine has of it. False where that has none but the parameter's own.
        """
        for number, parameter in enumerate(self._parameters):
            if parameter._version != self._versions[number]:
                (self._undone if restore(number) else self._as_edited).append(self._names[number])

    def given_back(self, lost: UnsupportedError | None) -> UnsupportedError | None:
        """Parameters that were replaced are the model's again. Returns what is to be said of edits. lost: see `lost`."""
        replaced = self._structure.put_back()
        if self._as_edited:
            return UnsupportedError(
                f"parameter {self._as_edited[0]} was edited in place, which the engine does not see, and being frozen it has "
                "no values but these: the model is given back with them, all else as it was trained"
            )
        if lost is not None and (replaced or self._undone):
            return UnsupportedError(f"{lost}; the engine is closed now, and has given the model its trained values")
        return lost

    def _found(self) -> UnsupportedError | None:
        for number, parameter in enumerate(self._parameters):
            if parameter._version != self._versions[number]:
                self._restore()
                more = ", which has the trained values and drops this edit" if self._trainable[number] else ""
                return UnsupportedError(
                    f"parameter {self._names[number]} was edited in place, which the engine does not see: edit it inside "
                    f"engine.summon(write=True){more}"
                )
            if parameter.requires_grad and not self._trainable[number]:
                return UnsupportedError(
                    f"parameter {self._names[number]} was frozen when the engine was made and has no optimizer state: set "
                    "requires_grad before initialize"
                )
        return None

    def end(self) -> None:
        self.casts.end()
        self._end_refusing()
        self._references.clear()
        self._structure.end()
        for parameter, kind in zip(self._parameters, self._classes, strict=True):
            eye = parameter.__dict__.get("_watched")
            if isinstance(eye, _Eye) and eye.is_of(self.casts):
                parameter.__class__ = kind
                del parameter.__dict__["_watched"]


def _refuse_to_load(module: nn.Module, *given: Any) -> None:
    raise UnsupportedError(
        "load_state_dict(): the engine keeps this model's weights, and does not see what is loaded: call it before initialize, "
        "or copy the values inside `with engine.summon(write=True) as values`, which has the names of the state dict"
    )


@cache
def _managed(kind: type[ManagedParameter], theirs: type[nn.Parameter]) -> type[nn.Parameter]:
    """A user's own class of parameters, watched."""
    make: Any = type(theirs)
    made: type[nn.Parameter] = make(theirs.__name__, (kind, theirs), {"__module__": theirs.__module__})
    return made
