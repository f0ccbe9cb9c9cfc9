"""How long a run likely takes of which nothing like it was run: by its device, the size of its model and the work of its steps.

START_S and the rates are fitted to the kept records: on a GPU nine in ten of those of this project's own systems took between a
third and three times the guess. A run that was made says more: harness/sweep.py asks here last.
"""

from __future__ import annotations

from contextlib import suppress
from functools import lru_cache

from harness.spec import RunSpec
from models import registry as models_registry
from systems import registry
from systems.errors import UnavailableError
from systems.face import Abilities
from systems.registry import split_assignments

EMULATED = "cpu-emulated"  # device label
UNKNOWN_S = 120.0  # of a model whose size is not known
START_S, EMULATED_START_S = 25.0, 5.0  # a process, its imports and its device
PACKAGE_S = 60.0  # more, for a package that trains: its imports and kernels
BUILD_S = 2.5e-9  # a parameter: values, buffers and the way to the device
FLOPS_PER_S, EMULATED_FLOPS_PER_S = 7e14, 1.5e10  # of forward and backward, 6 a parameter and token


def guessed_s(spec: RunSpec, device: str) -> float:
    """Seconds of one run. device: the label of its records."""
    emulated, can = device == EMULATED, _abilities(spec.system)
    start = EMULATED_START_S if emulated else START_S
    if can.package is not None:
        start += PACKAGE_S
    if not can.model:
        return start
    parameters = _parameters(spec.model, spec.set)
    if parameters is None or spec.batch_size is None or spec.seq_len is None:
        return UNKNOWN_S
    with suppress(OverflowError):
        return start + _steps_s(spec, parameters, emulated=emulated)
    return UNKNOWN_S


def _steps_s(spec: RunSpec, parameters: int, *, emulated: bool) -> float:
    """Building it and its steps. Raises OverflowError for sizes that no float has."""
    assert spec.batch_size is not None and spec.seq_len is not None
    flops = 6.0 * parameters * spec.batch_size * spec.seq_len * spec.accumulate * spec.resolve_steps()[0]
    if emulated:  # whose ranks share the cores
        return flops * spec.ranks / EMULATED_FLOPS_PER_S
    return parameters * BUILD_S + flops / FLOPS_PER_S


def _abilities(system: str) -> Abilities:
    try:
        return registry.face(system).abilities
    except (UnavailableError, ValueError):
        return Abilities()


@lru_cache(maxsize=256)
def _parameters(model: str, changes: tuple[str, ...]) -> int | None:
    """None: of a folder or a function, which would have to be read, or of no model at all."""
    if models_registry.is_external(model):
        return None
    try:
        return models_registry.parameter_count(models_registry.resolve(model, split_assignments("set", changes)))
    except ValueError:
        return None
