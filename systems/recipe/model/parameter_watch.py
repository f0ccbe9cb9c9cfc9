"""Sees to it that what a user does to live parameters past the engine is followed or refused by name, never lost.

Note [Edits]
    An edit in place counts in the parameter's version, be it under no_grad or through `.data`. `check` finds it at the next
    call of the engine: a forward pass, step, summon, a checkpoint, or close. It may lie in memory that is about to go, or in
    the NaNs that stand for an absent weight, so it is not taken over but refused, until summon(write=True) has written all
    values anew. Other values by `parameter.data = t` or `load_state_dict` are refused at once, as is a conversion of the model.
    Who closes an engine gets the values that were trained, edits or not, and parameters that were replaced are put back.
    What numpy, a kernel of the user's or a view from before initialize writes leaves no trace that could be found.

Note [A module that casts itself]
    Within a call of the engine a module may ask for its weights in another dtype (`self.router.to(torch.float32)`). Then it
    reads a copy: the compute dtype's values in the dtype it asks for. The copy is an activation, and stands for the weight
    until the call ends. Forward, recomputation and a pass without gradients are calls of their own. Its gradient comes in
    the copy's dtype and is rounded to the compute dtype as it arrives.
"""

from __future__ import annotations

import sys
import weakref
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import cache
from typing import Any

import torch
from torch import nn

from systems.errors import UnsupportedError
from systems.recipe.model.calls import Hook
from systems.recipe.model.parameters import ManagedParameter, data_of, set_data
from systems.recipe.model.structure import ADVICE, Structure
from systems.recipe.model.units import FoundModel
from systems.state_dicts import refuse_loading

Pending = Callable[[bool], bool]


class _Eye:
    """On one parameter; see parameters.Watched."""

    __slots__ = ("_number", "_watch", "gradients_pending")

    def __init__(self, watch: ParameterWatch, number: int, pending: Pending) -> None:
        self._watch, self._number, self.gradients_pending = watch, number, pending

    def is_of(self, watch: ParameterWatch) -> bool:
        return self._watch is watch

    def hides_gradient(self) -> bool:
        return self._watch.converting

    def exchange(self, parameter: nn.Parameter, value: torch.Tensor) -> None:
        self._watch.exchange(self._number, value)

    def place(self, parameter: nn.Parameter, source: object) -> None:
        if not (isinstance(source, torch.Tensor) and _same_place(parameter, source)):
            self._watch.refuse_values(self._number, "set_()")

    def refuse_another(self) -> None:
        self._watch.refuse_another(self._number)


class _Conversion:
    """Stands before a module's `_apply`, by which .to(), .half(), .cuda() and the like change its parameters and buffers."""

    def __init__(self, module: nn.Module, watch: ParameterWatch) -> None:
        self._module, self._watch = module, watch

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        with self._watch.conversion(self._module, fn):
            return type(self._module)._apply(self._module, fn, *args, **kwargs)

    def __reduce__(self) -> Any:
        """A copy of the module has its own `_apply`, with nothing before it."""
        return getattr, (self._module, "_apply")


class ParameterWatch:
    """From construction to `end`. See the notes above.

    pending: asked with whether there is something in `.grad`. kind: what parameters become. readable: whether the values of a
    parameter are on the device now. restore: makes good what an edit did to what stands for absent values.
    cast: told of a parameter that is read in another dtype.
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
        self._readable, self._restore, self._cast = readable, restore, cast
        self._classes: list[Any] = [type(p) for p in parameters]
        self._number = {id(p): number for number, p in enumerate(parameters)}
        self._trainable = [p.requires_grad for p in parameters]
        self._guarded = [m for m in model.modules() if any(id(p) in self._number for p in m.parameters())]
        self._references = [weakref.ref(p) for p in parameters]  # torch.utils.swap_tensors refuses what has one
        self._calls = 0
        self._homes: dict[int, torch.Tensor] = {}  # what a cast stands for
        self.converting = False
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
            parameter._watched = _Eye(self, number, pending)  # type: ignore[attr-defined]
            parameter.__class__ = kind if theirs is nn.Parameter else _managed(kind, theirs)
        for module in self._guarded:
            module.__dict__["_apply"] = _Conversion(module, self)
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

    # ---- casts

    @contextmanager
    def call(self) -> Iterator[None]:
        """The engine runs the model: see Note [A module that casts itself]."""
        before = self._calls
        try:
            self._calls = before + 1
            yield
        finally:
            self._calls = before
            if not self._calls:
                self._put_back()

    def _put_back(self) -> None:
        for number, home in self._homes.items():
            set_data(self._parameters[number], home)
        self._homes.clear()

    @contextmanager
    def conversion(self, module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> Iterator[None]:
        """A module's `_apply`, refused before it touches anything."""
        if self.converting:
            yield
            return
        changed = self._changed(module, convert)
        future = torch.__future__
        if future.get_overwrite_module_params_on_conversion() or future.get_swap_module_params_on_conversion():
            raise UnsupportedError(
                "torch.__future__ is set to replace or swap parameters when a module is converted, which would leave the "
                "engine without them: set it back while the engine is open"
            )
        if changed and not self._calls:
            raise UnsupportedError(
                f"parameter {self._names[changed[0]]} is with the engine, so that the module cannot be converted (.to(), "
                ".half(), .cuda() and the like): convert it before initialize, whose dtype is that of the weights"
            )
        for number in changed:
            if not self._readable(number):
                raise UnsupportedError(
                    f"parameter {self._names[number]} is converted outside the unit that owns it, where it is not on the "
                    "device: convert it in that module's forward"
                )
        self.converting = True
        try:
            yield
        finally:
            self.converting = False

    def _changed(self, module: nn.Module, convert: Callable[[torch.Tensor], torch.Tensor]) -> list[int]:
        """Parameters that this would make others of, tried on empty tensors like them."""
        kinds: dict[Any, bool] = {}
        found = []
        for parameter in module.parameters():
            number = self._number.get(id(parameter))
            if number is None:
                continue
            kind = (parameter.dtype, parameter.device, parameter.dim())
            if kind not in kinds:
                probe = torch.empty((0,) * parameter.dim(), dtype=parameter.dtype, device=parameter.device)
                with torch.no_grad():
                    kinds[kind] = convert(probe) is not probe
            if kinds[kind]:
                found.append(number)
        return found

    def exchange(self, number: int, value: torch.Tensor) -> None:
        """`parameter.data = value`: nothing where that is what it has, a cast within a call, else refused."""
        parameter = self._parameters[number]
        if _same_place(parameter, value):
            return
        if not self._calls or not self._casts(number, value):
            self.refuse_values(number, "its .data")
        home = self._homes.setdefault(number, data_of(parameter))
        if value.dtype == home.dtype:
            del self._homes[number]
            value = home
        set_data(parameter, value)
        self._cast(number)

    def _casts(self, number: int, value: torch.Tensor) -> bool:
        """True for the values of now in another floating dtype."""
        now = data_of(self._parameters[number])
        alike = value.layout == now.layout and value.shape == now.shape and value.device == now.device
        if not alike or value.dtype == now.dtype or not value.is_floating_point():
            return False
        return self.converting or torch.equal(now.to(value.dtype), value)

    def refuse_values(self, number: int, what: str) -> None:
        raise UnsupportedError(
            f"parameter {self._names[number]} was given other values through {what}, which the engine does not take over: set "
            "them inside engine.summon(write=True)"
        )

    def refuse_another(self, number: int) -> None:
        raise UnsupportedError(
            f"parameter {self._names[number]} is with the engine, and another Parameter made of it would not be: {ADVICE}"
        )

    def end(self) -> None:
        self._put_back()
        self._end_refusing()
        self._references.clear()
        for module in self._guarded:
            module.__dict__.pop("_apply", None)
        self._structure.end()
        for parameter, kind in zip(self._parameters, self._classes, strict=True):
            eye = parameter.__dict__.get("_watched")
            if isinstance(eye, _Eye) and eye.is_of(self):
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


def _same_place(one: torch.Tensor, other: object) -> bool:
    return (
        isinstance(other, torch.Tensor)
        and one.layout == other.layout == torch.strided
        and (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        and one.storage_offset() == other.storage_offset()
        and one.untyped_storage()._cdata == other.untyped_storage()._cdata
    )
