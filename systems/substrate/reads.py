"""Which unit reads which parameter, where it is not its own: `F.linear(x, self.embed.weight)`, attention's `out_proj.weight`.

A layout knows who owns a parameter, and who says that it reads it (Note [Said and found] in uses.py). That another module does
is only known when it does: an operation of its forward has a view of the parameter among its arguments while no unit is at
work that is known to read it. Then the bundle is fetched and held for the innermost unit that runs, as one of its own: now, in
its backward, and in every later step and plan. On the emulated device the meter shows each operation; on CUDA a mode does so
in steps that have no plan yet.

What is refused: an edit of such a parameter, one that does not fit beside what the unit holds already, and a read in a backward
in which nobody who reads it is at work: there what a unit made was hidden from the hooks (see hooks.py). And, of several ranks,
one that not all of them make alike: it changes what is fetched, and when gradients leave, which are collectives.
"""

from __future__ import annotations

import sys
from bisect import bisect_right
from collections.abc import Sequence
from types import FrameType
from typing import Any

import torch
from torch import nn

from systems.errors import HiddenUseError, OutOfMemoryError
from systems.planning.layout import Layout
from systems.recipe.model.calls import NO_UNIT
from systems.recipe.model.unit_tensors import SEEN
from systems.recipe.model.units import ROOT, FoundModel
from systems.substrate.agreement import Agreement
from systems.substrate.bundle.states import ParameterState
from systems.substrate.cursor import Cursor
from systems.substrate.hooks import UnitHooks
from systems.substrate.moves.gradients import Gradients
from systems.substrate.moves.residency import Residency
from systems.substrate.planner import Planner
from systems.substrate.progress import Progress


class Reads:
    """check: to be told of every operation that reads its inputs' bytes. See the module's docstring."""

    def __init__(
        self,
        found: FoundModel,
        *,
        layout: Layout,
        residency: Residency,
        gradients: Gradients,
        cursor: Cursor,
        planner: Planner,
        progress: Progress,
        hooks: UnitHooks,
        agreement: Agreement,
    ) -> None:
        self._agreement = agreement
        self._index, self._hooks, self._progress, self._cursor, self._planner = found.index, hooks, progress, cursor, planner
        self._layout, self._residency, self._gradients = layout, residency, gradients
        root = next(m for unit, m in zip(found.index.units, found.modules, strict=True) if unit.name == ROOT)
        self._names = {id(module): name or ROOT for name, module in root.named_modules()}
        self._unit_of = {id(module): unit.index for unit, module in zip(found.index.units, found.modules, strict=True)}
        for unit, module in zip(found.index.units, found.modules, strict=True):
            if unit.block is not None:
                self._unit_of.update((id(part), unit.index) for part in module.modules())
        self._bundle_of = {m.storage.untyped._cdata: m.index for m in residency.bundles}
        self._saw_aside = False
        self._starts: dict[int, list[tuple[int, int]]] = {b.index: [] for b in layout.bundles}
        for parameter, place in layout.places.items():
            self._starts[place.bundle].append((place.offset * layout.itemsize, parameter))
        for starts in self._starts.values():
            starts.sort()

    def check(self, func: Any, tensors: Sequence[torch.Tensor]) -> None:
        for tensor in tensors:
            if tensor.layout is not torch.strided or not tensor.numel():
                continue
            bundle = self._bundle_of.get(tensor.untyped_storage()._cdata)
            if bundle is not None:
                parameter = self._parameter(bundle, tensor)
                if not self._hooks.at_work(parameter):
                    self._read_by_another(func, parameter, bundle, edited=tensor is tensors[0] and _edits(func))

    def _parameter(self, bundle: int, view: torch.Tensor) -> int:
        """That a view of a bundle's storage begins in."""
        starts = self._starts[bundle]
        found = bisect_right(starts, view.storage_offset() * view.itemsize, key=lambda each: each[0]) - 1
        return starts[max(found, 0)][1]

    def _read_by_another(self, func: Any, parameter: int, bundle: int, *, edited: bool) -> None:
        reading = self._hooks.calls.open
        reader, hook = self._reader()
        name = self._names.get(id(reader)) if reader is not None else None
        where = f"{func} reads parameter {self._index.parameters[parameter].name} outside the unit that owns it"
        if name is not None:
            where += f", in module {name}"
        if edited:
            raise HiddenUseError(f"{where}, and edits it: edit parameters inside engine.summon(write=True)")
        if self._progress.in_backward:
            owner = self._index.units[self._hooks.users[parameter][0]].name
            raise HiddenUseError(
                f"{where}, in a backward pass in which module {owner} was not seen to be at work: what a module makes has to "
                f"be seen ({SEEN}), and weights are read in forward, or inside engine.summon()"
            )
        own = self._unit_of.get(id(reader), NO_UNIT)
        if not reading or (hook and own != NO_UNIT and not any(call.unit == own for call in reading)):
            if self._residency.bundles[bundle].state is ParameterState.RESIDENT:
                return  # a look at what is there
            raise HiddenUseError(f"{where}, before or after its forward: read it in a forward, or inside engine.summon()")
        unit = next(call.unit for call in reversed(reading) if call.unit != NO_UNIT)
        held = bundle in self._layout.bundles_of_unit.get(unit, ())
        late = not self._hooks.is_active(unit)
        changes = not held or bundle in self._layout.in_place  # of parameters in place one unit is known to read each
        if changes:
            reading_module, read = name or self._index.units[unit].name, self._index.parameters[parameter].name
            self._agreement.reads(f"module {reading_module} reads parameter {read}")
        try:
            if late:
                self._residency.fetch(bundle)  # it is held as soon as the unit enters
            elif not held:
                self._residency.hold([bundle], ("forward", unit))
        except OutOfMemoryError as error:
            words = f"{where}, for which there is no room: {error}"
            raise OutOfMemoryError(words, tier=error.tier, need=error.need, have=error.have) from error
        if changes:
            self._layout.add_user(bundle, unit)
            in_place = self._gradients.in_place
            in_place.allow(in_place.allowed - {bundle})
            self._planner.uses_changed(moments=late and self._progress.in_step and not self._progress.aside)
        self._hooks.add_use(unit, parameter)

    def watches(self) -> bool:
        """Where it costs time to be told: now is a time to. Each kind of step is seen once, the first evaluation,
        and the next whole step after a gradient that nobody was seen to have read the parameter for."""
        if self._cursor.plan is None or self._progress.doubtful:
            return True
        first, self._saw_aside = self._progress.aside and not self._saw_aside, self._saw_aside or self._progress.aside
        return first

    def _reader(self) -> tuple[nn.Module | None, bool]:
        """The module whose code is running, and whether that is a hook of its."""
        frame: FrameType | None = sys._getframe(1)
        while frame is not None:
            found = frame.f_locals.get("self")
            if isinstance(found, nn.Module) and id(found) in self._names:
                return found, frame.f_code.co_filename == nn.Module._call_impl.__code__.co_filename
            frame = frame.f_back
        return None, False


def _edits(func: Any) -> bool:
    return bool(func._schema.name.endswith("_"))
