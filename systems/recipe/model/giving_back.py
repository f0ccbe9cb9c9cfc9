"""What a closing engine leaves: a model with its values, buffers where they came from, or one that says what it lacks."""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Sequence
from typing import Any

import torch
from torch import nn

from systems.errors import BudgetError, UnsupportedError
from systems.export import check_host
from systems.recipe.model.parameters import data_of, set_data, take_gradient
from systems.sizes import format_size
from systems.state_dicts import refuse_loading, refuse_state_dict

ADVICE = "build the model anew, give it to systems.initialize, and call systems.load_checkpoint"


def leave_without(model: nn.Module, why: str, advice: str = ADVICE) -> None:
    """A model whose weights are gone says so in its forward, in that of each module in it that has parameters, and to who asks
    for its state_dict(), loads one or saves it. So do its copies.
    """
    refuse = _Gone(f"{why}: {advice}")
    for module in model.modules():
        if module is model or any(True for _ in module.parameters(recurse=False)):
            module.register_forward_pre_hook(refuse, prepend=True)
    refuse_state_dict(model, f"{why}: {advice}")
    refuse_loading(model.modules(), refuse.load)


class _Gone:
    """A hook before a forward, and before a state dict is loaded."""

    def __init__(self, words: str) -> None:
        self._words = words

    def __call__(self, module: nn.Module, args: Any) -> None:
        raise RuntimeError(self._words)

    def load(self, module: nn.Module, *given: Any) -> None:
        raise UnsupportedError(self._words)

    def __deepcopy__(self, memo: dict[int, Any]) -> _Gone:
        return self

    def __reduce__(self) -> Any:
        raise UnsupportedError(self._words)


def remember_buffers(model: nn.Module, carried: Collection[nn.Parameter]) -> Callable[[], None]:
    """Returns what brings them, and parameters that are carried along, back to where they are now, as they are then."""
    homes = [(parameter, parameter.device) for parameter in carried]
    devices = {
        (module, name): buffer.device
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is not None
    }

    def bring_back() -> None:
        moved: dict[int, torch.Tensor] = {}
        with contextlib.suppress(Exception):  # of a device that failed, which was told
            for parameter, device in homes:
                set_data(parameter, data_of(parameter).to(device))
            for (module, name), device in devices.items():
                buffer = module._buffers.get(name)
                if buffer is not None and buffer.device != device:
                    if id(buffer) not in moved:
                        moved[id(buffer)] = buffer.to(device)
                    module._buffers[name] = moved[id(buffer)]

    return bring_back


def check_fresh(need: int, room: int) -> None:
    """BudgetError where the host, by its budget (room) or as it is, has none for values that are on the device alone."""
    if need > room:
        raise BudgetError(
            f"{format_size(need)} of host memory for weights that were on the device alone, "
            f"{format_size(max(room, 0))} are there",
            tier="host",
            need=need,
            have=max(room, 0),
        )
    check_free(need)


def check_room(pieces: Sequence[Sequence[torch.Tensor]], room: int) -> None:
    """BudgetError where values that lie in several pieces cannot be copied into one."""
    need = sum(piece.nbytes for each in pieces if len(each) > 1 for piece in each)
    if need > room:
        raise BudgetError(
            f"{format_size(need)} of host memory for weights that lie in pieces, {format_size(max(room, 0))} are there",
            tier="host",
            need=need,
            have=max(room, 0),
        )


def on_the_host(values: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    """Copies of those that are elsewhere. BudgetError, before any is made, where the host has no room for them."""
    need = sum(value.nbytes for value in values if value.device.type != "cpu")
    if need:
        check_free(need)
    return [value.to("cpu") for value in values]


def check_free(need: int) -> None:
    """Of the machine's memory."""
    check_host(need, "close", "make room, or save a checkpoint before")


def give(
    parameters: Sequence[nn.Parameter], pieces: Sequence[Sequence[torch.Tensor]], shapes: Sequence[tuple[int, ...]]
) -> None:
    """All of them or none. shapes: a user may have changed a parameter's own in place."""
    values = [each[0] if len(each) == 1 else torch.cat(list(each)) for each in pieces]
    for parameter, value, shape in zip(parameters, values, shapes, strict=True):
        take_gradient(parameter)
        set_data(parameter, value.view(shape))
