"""Weights in another dtype than the engine's, for as long as a call of the engine lasts.

Note [A module that casts itself]
    Within a call of the engine a module may ask for its weights in another dtype (`self.router.to(torch.float32)`). Then it
    reads a copy: the compute dtype's values in the dtype it asks for. The copy is an activation, and stands for the weight
    until the call ends. Forward, recomputation and a pass without gradients are calls of their own. Its gradient comes in
    the copy's dtype and is rounded to the compute dtype as it arrives.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from typing import Any, NoReturn

import torch
from torch import nn

from systems.errors import UnsupportedError
from systems.recipe.model.parameters import data_of, set_data


class _Conversion:
    """Stands before a module's `_apply`, by which .to(), .half(), .cuda() and the like change its parameters and buffers."""

    def __init__(self, module: nn.Module, casts: Casts) -> None:
        self._module, self._casts = module, casts

    def __call__(self, fn: Callable[[torch.Tensor], torch.Tensor], *args: Any, **kwargs: Any) -> Any:
        with self._casts.conversion(self._module, fn):
            return type(self._module)._apply(self._module, fn, *args, **kwargs)

    def __reduce__(self) -> Any:
        """A copy of the module has its own `_apply`, with nothing before it."""
        return getattr, (self._module, "_apply")


class Casts:
    """Follows a cast within a call of the engine; refuses conversions, and other values, outside of one.

    readable: whether the values of a parameter are on the device now. told: of a parameter that is read in another dtype.
    converting: a module's `_apply` is at it. From `begin` to `end` that is stood before.
    """

    def __init__(
        self,
        parameters: Sequence[nn.Parameter],
        names: Sequence[str],
        readable: Callable[[int], bool],
        told: Callable[[int], None],
    ) -> None:
        self._parameters, self._names, self._readable, self._told = parameters, names, readable, told
        self._number = {id(p): number for number, p in enumerate(parameters)}
        self._modules: Sequence[nn.Module] = ()
        self._calls = 0
        self._homes: dict[int, torch.Tensor] = {}  # what a cast stands for
        self.converting = False

    def begin(self, modules: Sequence[nn.Module]) -> None:
        self._modules = modules
        for module in modules:
            module.__dict__["_apply"] = _Conversion(module, self)

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
        if same_place(parameter, value):
            return
        if not self._calls or not self._is_cast(number, value):
            refuse_values(self._names[number], "its .data")
        home = self._homes.setdefault(number, data_of(parameter))
        if value.dtype == home.dtype:
            del self._homes[number]
            value = home
        set_data(parameter, value)
        self._told(number)

    def _is_cast(self, number: int, value: torch.Tensor) -> bool:
        """True for the values of now in another floating dtype."""
        now = data_of(self._parameters[number])
        alike = value.layout == now.layout and value.shape == now.shape and value.device == now.device
        if not alike or value.dtype == now.dtype or not value.is_floating_point():
            return False
        return self.converting or torch.equal(now.to(value.dtype), value)

    def end(self) -> None:
        self._put_back()
        for module in self._modules:
            module.__dict__.pop("_apply", None)


def refuse_values(name: str, what: str) -> NoReturn:
    raise UnsupportedError(
        f"parameter {name} was given other values through {what}, which the engine does not take over: set "
        "them inside engine.summon(write=True)"
    )


def same_place(one: torch.Tensor, other: object) -> bool:
    return (
        isinstance(other, torch.Tensor)
        and one.layout == other.layout == torch.strided
        and (one.dtype, one.shape, one.stride()) == (other.dtype, other.shape, other.stride())
        and one.storage_offset() == other.storage_offset()
        and one.untyped_storage()._cdata == other.untyped_storage()._cdata
    )
