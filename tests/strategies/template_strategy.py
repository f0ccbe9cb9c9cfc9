"""The shortest strategy that plans: a bundle a unit, streamed. Copy it to `systems/strategies/streamed.py` to begin another.

A strategy's module says here what of the paper is where, and where it departs from it:

| paper | here |
|---|---|
| layer | Unit, and the Bundle of its parameters |
| prefetching | option ahead; `policy.caching` |
"""

from __future__ import annotations

from typing import ClassVar

from pydantic import BaseModel, Field

from systems.planning.layout import Layout, ModelIndex
from systems.planning.plan import Plan
from systems.planning.policy.base import FittedStrategy
from systems.planning.policy.caching import CacheRequest, plan_cache
from systems.planning.policy.division import Division
from systems.planning.policy.options import InputsOptions
from systems.planning.policy.packing import bundle_a_unit


class StreamedOptions(InputsOptions):
    """ahead: bundles fetched ahead of their use, 0 for none."""

    ahead: int = Field(default=2, ge=0)


class Streamed(FittedStrategy):
    """Parameters come when they are used next and go when they are used last; every update is the host's."""

    name: ClassVar[str] = "streamed"
    summary: ClassVar[str] = "a bundle a unit, fetched ahead of its use, updated on the host"
    Options: ClassVar[type[BaseModel]] = StreamedOptions
    _options: StreamedOptions

    def cut(self, index: ModelIndex) -> Layout:
        return bundle_a_unit(index, self._context)

    def decide(self, division: Division) -> Plan:
        division.least()  # refuses a device that does not hold even one unit's parameters, gradients and activations
        settled = division.base  # what never moves
        cache = plan_cache(CacheRequest(division.demand, division.sizes(settled), division.room(settled), self._options.ahead))
        return division.plan(cache.operations, settled, cache.resident)


STRATEGY = Streamed
