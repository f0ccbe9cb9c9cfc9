"""Every system that tests run over: the strategies that the registry finds, the oracle, and a strategy that evicts at random.

Tests ask here, so that a new strategy is in all of them from its first day and edits none. What has a page, a profile or a
chunk says in Options.for_small_models which values suit models of a few hundred kilobytes; here these are the defaults.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from types import MappingProxyType
from typing import Any, get_args

from pydantic import BaseModel, create_model

from systems import registry
from systems.baselines.resident import SYSTEM as RESIDENT
from systems.errors import UnavailableError
from systems.substrate.system import ManagedSystem
from tests.random_eviction import RandomEviction, RandomOptions

RANDOM = ManagedSystem(RandomEviction)


def for_small_models(system: ManagedSystem) -> ManagedSystem:
    """The same strategy, whose options are those for small models where none are given."""
    options = system.Options
    given: Mapping[str, Any] = getattr(options, "for_small_models", {})
    if not given:
        return system
    fields: dict[str, Any] = {name: (options.model_fields[name].rebuild_annotation(), value) for name, value in given.items()}
    small = create_model(f"Small{options.__name__}", __base__=options, **fields)
    return ManagedSystem(type(f"Small{system.strategy.__name__}", (system.strategy,), {"Options": small}))


def _strategies() -> Iterator[tuple[str, ManagedSystem]]:
    """One that does not load is left out: tests/systems/test_registry.py says why it does not."""
    for name, entry in registry.find().items():
        if entry.exposes == "STRATEGY":
            try:
                system = registry.get(name, {name: entry})
            except UnavailableError:
                continue
            assert isinstance(system, ManagedSystem)
            yield name, for_small_models(system)


STRATEGIES: Mapping[str, ManagedSystem] = MappingProxyType(dict(_strategies()))
MANAGED: Mapping[str, ManagedSystem] = MappingProxyType({**STRATEGIES, "random": RANDOM})
SYSTEMS: Mapping[str, Any] = MappingProxyType({"resident": RESIDENT, **MANAGED})


def allows(system: Any, option: str, value: Any) -> bool:
    """Whether the option is there and a choice that has this value."""
    field = system.Options.model_fields.get(option)
    return field is not None and value in get_args(field.annotation)


def with_option(option: str, value: Any, systems: Mapping[str, Any] = MANAGED) -> dict[str, tuple[Any, BaseModel]]:
    """The systems that have such a choice, each with options that make it."""
    found = {name: system for name, system in systems.items() if allows(system, option, value)}
    return {name: (system, system.Options(**{option: value})) for name, system in found.items()}


def _ways() -> Iterator[tuple[str, tuple[ManagedSystem, BaseModel]]]:
    for name, system in MANAGED.items():
        yield name, (system, system.Options())
        if allows(system, "variant", "write-back"):
            yield f"{name} write-back", (system, system.Options(variant="write-back"))
    yield "random write-back", (RANDOM, RandomOptions(write_back=True, chunk_parameters=5))


# Each with its options, and again where evictions can be written back.
WAYS: Mapping[str, tuple[ManagedSystem, BaseModel]] = MappingProxyType(dict(_ways()))
