"""What every engine does to a model that it takes: refuses mixed dtypes, makes first values, moves buffers to the device."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager

import torch
from torch import nn

from systems.device.device import Device
from systems.errors import UnsupportedError
from systems.recipe.model.parameters import ManagedParameter, set_data
from systems.recipe.model.units import COMPUTED, FoundModel, loses
from systems.settings import TORCH_DTYPE, Settings


def refuse_mixed_dtypes(found: FoundModel, dtype: str) -> None:
    """UnsupportedError for weights that their author keeps in a wider dtype than the engine would compute them in.

    A model that is all in fp32 is one for mixed precision: its masters are what it came with. One that has several dtypes, or
    fp64, means what it says. Batch norms are refused where their weights would be of another dtype than their averages.
    """
    engine = TORCH_DTYPE[dtype]
    given = [p.dtype for p in (*found.parameters, *found.carried.values()) if p.dtype in COMPUTED]
    for described, parameter in zip(found.index.parameters, found.parameters, strict=True):
        if not loses(parameter.dtype, engine):
            continue
        if parameter.dtype == torch.float64:
            raise UnsupportedError(
                f"parameter {described.name} is in {parameter.dtype}, and master weights are in fp32: call model.float() "
                "before initialize"
            )
        other = next((each for each in given if each != parameter.dtype), None)
        if other is not None:
            raise UnsupportedError(
                f"parameter {described.name} is in {parameter.dtype} beside others in {other}, and would be computed in "
                f"{dtype}: give dtype fp32, which holds both, or convert it before initialize (model.to({engine})), which "
                "has fp32 master weights all the same"
            )
    for described, owners in zip(found.index.parameters, found.owners, strict=True):
        averages = any(isinstance(m, nn.modules.batchnorm._BatchNorm) and m.running_mean is not None for m, _ in owners)
        if averages and dtype != "fp32":
            raise UnsupportedError(
                f"parameter {described.name} is of a batch norm, whose running averages stay in fp32, and torch has no batch "
                f"norm with {dtype} weights beside them: use dtype fp32, or a norm without running averages"
            )


def initial_values(found: FoundModel, settings: Settings) -> Callable[[int, torch.Tensor], None]:
    """Fills a parameter's first fp32 value."""
    names = [p.name for p in found.index.parameters]
    given = settings.initial_weights
    if given is None:
        for name, parameter in zip(names, found.parameters, strict=True):
            if parameter.is_meta:
                raise UnsupportedError(
                    f"parameter {name} has no values (it is on the meta device): give a folder that has them with `weights`, "
                    "also where a checkpoint is loaded afterwards, or a model with values"
                )

    def fill(number: int, out: torch.Tensor) -> None:
        parameter = found.parameters[number]
        if given is not None:
            given(names[number], out)
        else:
            out.copy_(parameter.detach())

    return fill


@contextmanager
def keeping_values(model: nn.Module) -> Iterator[None]:
    """Around the making of an engine: its model keeps what it came with, and is as it was if that fails."""
    kept = [
        (module, attribute, parameter, parameter.data, parameter.grad)
        for module in model.modules()
        for attribute, parameter in module._parameters.items()
        if parameter is not None and not isinstance(parameter, ManagedParameter)  # of another engine, which is refused
    ]
    try:
        yield
    except BaseException:
        for module, attribute, parameter, data, gradient in kept:
            module._parameters[attribute] = parameter
            set_data(parameter, data)
            parameter.grad = gradient
        raise


def place_buffers(model: nn.Module, device: torch.device) -> int:
    """Move buffers to the compute device, dtypes untouched, one object however many names. Returns their bytes."""
    moved: dict[int, torch.Tensor] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is None:
                continue
            if buffer.is_meta:
                raise UnsupportedError(
                    f"buffer {name} of {type(module).__name__} is on the meta device: give it values, or build the model "
                    "without torch.device('meta')"
                )
            if id(buffer) not in moved:
                moved[id(buffer)] = buffer.to(device)
            module._buffers[name] = moved[id(buffer)]
    return sum(map(_bytes_of, moved.values()))


def place_beside(model: nn.Module, found: FoundModel, device: Device) -> None:
    """What has a place on the compute device without an engine's doing: buffers, and units.py's Note [Carried along]."""
    nbytes = place_buffers(model, device.torch_device)
    for name, parameter in found.carried.items():
        if parameter.is_meta:
            raise UnsupportedError(f"parameter {name} is {parameter.dtype} on the meta device: give it values")
        parameter.data = parameter.data.to(device.torch_device)
        nbytes += _bytes_of(parameter)
        if parameter.layout is torch.strided:
            device.meter.exempt(parameter.untyped_storage())
    device.account.add_other(nbytes, "buffers")


def _bytes_of(buffer: torch.Tensor) -> int:
    if buffer.layout is torch.strided:
        return buffer.untyped_storage().nbytes()
    sparse = buffer.to_sparse_coo()
    return sparse._indices().nbytes + sparse._values().nbytes
