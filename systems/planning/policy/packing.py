"""Which parameters may lie together: by their users, and for chunks of one searched size, with the sizes to test.

Packing changes only where a chunk is just full, so that the best of all possible sizes is the smallest allowed one or a sum
of neighbouring parameters. How a chunk is filled, and what a size costs, is the strategy's own.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Self

from pydantic import BaseModel, ConfigDict, model_validator

from systems.planning.layout import FlatSpace, Layout, ModelIndex, Parameter, align_elements, pack, round_up
from systems.planning.strategy import PlanningContext
from systems.sizes import Size

MAX_CANDIDATES = 256


class ChunkRange(BaseModel):
    """What a user may say of the sizes to test: bytes of a parameter chunk as computed with; None leaves it to the search."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    chunk_min: Size | None = None
    chunk_max: Size | None = None
    chunk_step: Size | None = None

    @model_validator(mode="after")
    def _range(self) -> Self:
        if self.chunk_min is not None and self.chunk_max is not None and self.chunk_min > self.chunk_max:
            raise ValueError(f"chunk_min {self.chunk_min} is above chunk_max {self.chunk_max}: swap or widen them")
        for name in ("chunk_max", "chunk_step"):
            if getattr(self, name) == 0:
                raise ValueError(f"{name} is 0: leave it out or give a size such as 64MiB")
        return self

    def within(self, low: int, whole: int, itemsize: int) -> tuple[int, int]:
        """Smallest and largest size to test, in elements: the user's, or `low` to `whole` where nothing was said."""
        given_low, given_high = (
            None if given is None else max(align_elements(itemsize), given // itemsize)
            for given in (self.chunk_min, self.chunk_max)
        )
        if given_high is not None:
            return (min(low, given_high) if given_low is None else given_low), given_high
        return (low, max(low, whole)) if given_low is None else (given_low, max(given_low, whole))


@dataclass(frozen=True)
class ParameterGroup:
    """A FlatSpace's parameters in model order. single: of one unit at most; shared: one tuple a set of several users."""

    space: FlatSpace
    single: tuple[Parameter, ...]
    shared: tuple[tuple[Parameter, ...], ...]


def group_parameters(index: ModelIndex, context: PlanningContext, *, scattered: bool = True) -> list[ParameterGroup]:
    """In model order of their first parameter."""
    spaces: dict[FlatSpace, list[Parameter]] = {}
    for parameter in index.parameters:
        spaces.setdefault(context.space_of(parameter, scattered=scattered), []).append(parameter)
    found = []
    for space, parameters in spaces.items():
        shared: dict[frozenset[str], list[Parameter]] = {}
        for parameter in parameters:
            if len(parameter.users) > 1:
                shared.setdefault(frozenset(parameter.users), []).append(parameter)
        single = tuple(p for p in parameters if len(p.users) <= 1)
        found.append(ParameterGroup(space, single, tuple(tuple(each) for each in shared.values())))
    return found


def by_users(index: ModelIndex, context: PlanningContext) -> list[tuple[FlatSpace, tuple[Parameter, ...]]]:
    """Parameters of the same space and the same units, in model order of the first of them."""
    found: dict[tuple[FlatSpace, frozenset[str]], list[Parameter]] = {}
    for p in index.parameters:
        found.setdefault((context.space_of(p), frozenset(p.users)), []).append(p)
    return [(space, tuple(parameters)) for (space, _), parameters in found.items()]


def bundle_a_unit(index: ModelIndex, context: PlanningContext) -> Layout:
    """One segment each; what a unit has frozen, and what several units share, are bundles of their own."""
    bundles = by_users(index, context)
    packed = ([pack(parameters, space=space, itemsize=context.itemsize)] for space, parameters in bundles)
    return Layout.of(index, context.itemsize, packed)


def candidate_sizes(
    groups: Sequence[Sequence[int]], low: int, high: int, given: ChunkRange, context: PlanningContext
) -> list[int]:
    """Chunk sizes to test, ascending, in elements: with a step given exactly the range, else every size that matters in it.

    groups: each group's single-use parameters' padded sizes in model order. None that is too small for a parameter, unless
    all are: then that parameter cannot be in a chunk.
    """
    unit = align_elements(context.itemsize) * context.ranks
    step = given.chunk_step
    if step is not None:
        width = max(unit, round_up(step // context.itemsize, unit))
        found = {round_up(low + i * width, unit) for i in range((high - low) // width + 1)}
    else:
        sums = (sums_of_neighbours(sizes, low, high) for sizes in groups)
        found = {round_up(size, unit) for each in sums for size in each} | {round_up(low, unit)}
    largest = max((size for sizes in groups for size in sizes), default=unit)
    sizes = sorted(found)
    sizes = [s for s in sizes if s >= min(largest, sizes[-1])]
    if step is None and len(sizes) > MAX_CANDIDATES:
        sizes = [sizes[i * (len(sizes) - 1) // (MAX_CANDIDATES - 1)] for i in range(MAX_CANDIDATES)]
    return sizes


def sums_of_neighbours(sizes: Sequence[int], low: int, high: int) -> set[int]:
    """Sums of neighbouring sizes between low and high. Equal neighbourhoods (blocks) are walked once."""
    found: set[int] = set()
    seen: set[tuple[int, ...]] = set()
    for start in range(len(sizes)):
        total, end = 0, start
        while end < len(sizes) and total + sizes[end] <= high:
            total += sizes[end]
            end += 1
        neighbours = tuple(sizes[start:end])
        if neighbours in seen:
            continue
        seen.add(neighbours)
        total = 0
        for size in neighbours:
            total += size
            if total >= low:
                found.add(total)
    return found
