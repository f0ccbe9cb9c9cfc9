"""How parameters are cut into movable blocks: what a strategy decides once, before training.

Note [Parameters, segments, bundles]
    ModelIndex   the parameters and units of a model, found by the substrate: what a strategy lays out
    FlatSpace    parameters with the same (dtype, data-parallel group, trainable); never share a segment with others
    Segment      a contiguous range of a flat space, sharded evenly over its group; the optimizer works on it
    Bundle       segments that must be contiguous for compute; it is fetched and released as one
All offsets and lengths are elements. Master weights, moments and gradient of a segment share its offsets.
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from itertools import chain

from systems.ranks.group_names import REPLICA, WORLD

ALIGN_BYTES = 256
TENSOR_BYTES = 512  # of which torch's CUDA allocator gives a tensor whole ones
PAGE = 4096  # bytes of host memory, of which a mapping has whole ones


def align_elements(itemsize: int) -> int:
    """Elements to which each parameter's start is rounded up, so that it begins on a 256-byte boundary."""
    return ALIGN_BYTES // itemsize


def round_up(value: int, multiple: int) -> int:
    return -(-value // multiple) * multiple


@dataclass(frozen=True)
class Parameter:
    """One parameter, counted once however many names or users it has. users: units whose forward reads it, in order.

    group: the ranks that hold it together; see Note [Experts in groups] in systems/ranks/group_names.py.
    """

    index: int
    name: str
    shape: tuple[int, ...]
    numel: int
    trainable: bool
    users: tuple[str, ...]
    group: str = WORLD


@dataclass(frozen=True)
class Unit:
    """A module whose parameters are fetched together. block: its number in the ModuleList, None outside one."""

    index: int
    name: str
    parameters: tuple[int, ...]
    block: int | None


@dataclass(frozen=True)
class ModelIndex:
    """Parameters in model order and units in module order (not call order: that is the trace's)."""

    parameters: tuple[Parameter, ...]
    units: tuple[Unit, ...]

    @property
    def blocks(self) -> frozenset[int]:
        """Indices of the units that are elements of a ModuleList."""
        return frozenset(unit.index for unit in self.units if unit.block is not None)

    def numel(self, *, trainable_only: bool = False) -> int:
        return sum(p.numel for p in self.parameters if p.trainable or not trainable_only)


@dataclass(frozen=True)
class FlatSpace:
    """group: name of the data-parallel group whose ranks share the segments; ranks: its size. scattered: each of them keeps and
    updates a part of every segment; else all of them keep all, and make the same updates.
    """

    group: str
    ranks: int
    trainable: bool
    scattered: bool = True

    @property
    def alone(self) -> bool:
        """There is one rank in all."""
        return self.ranks == 1 and self.group != REPLICA


@dataclass(frozen=True)
class Placement:
    """Where a parameter, or a piece of it, lies in a segment. start: the piece's first element in the parameter.

    A parameter may go on from one segment into the next of its bundle: its pieces lie one behind the other, without a gap.
    """

    parameter: int
    offset: int
    numel: int
    start: int = 0

    @property
    def here(self) -> slice:
        """Its elements in the segment."""
        return slice(self.offset, self.offset + self.numel)

    @property
    def piece(self) -> slice:
        """Its elements in the parameter."""
        return slice(self.start, self.start + self.numel)


@dataclass(frozen=True)
class Place:
    """Where a whole parameter lies in its bundle."""

    bundle: int
    offset: int
    numel: int


@dataclass(frozen=True)
class Segment:
    """numel includes padding, which may lie anywhere between placements, and divides by the ranks of its space."""

    index: int
    space: FlatSpace
    numel: int
    placements: tuple[Placement, ...]

    @property
    def used(self) -> int:
        return sum(p.numel for p in self.placements)

    @property
    def shard_numel(self) -> int:
        return self.numel // self.space.ranks if self.space.scattered else self.numel

    def part(self, rank: int) -> slice:
        """Elements of the segment that are that rank's even part of it."""
        numel = self.numel // self.space.ranks
        return slice(rank * numel, (rank + 1) * numel)

    def own(self, rank: int) -> slice:
        """Elements of the segment that are that rank's shard."""
        return self.part(rank) if self.space.scattered else slice(0, self.numel)

    def shard(self, rank: int) -> tuple[Placement, ...]:
        """What lies in that rank's shard, by its offsets there. A parameter without elements is in the first one."""
        return self._within(rank, self.part(rank).start) if self.space.scattered else self.placements

    def counted(self, rank: int) -> tuple[Placement, ...]:
        """The same, but where every rank has all, of its even part alone: each element is one rank's."""
        return self.shard(rank) if self.space.scattered else self._within(rank, 0)

    def _within(self, rank: int, origin: int) -> tuple[Placement, ...]:
        """What lies in a rank's even part, by its offsets from the origin."""
        if self.space.ranks == 1:
            return self.placements
        own, found = self.part(rank), []
        for p in self.placements:
            begin, end = max(p.offset, own.start), min(p.offset + p.numel, own.stop)
            if begin < end:
                found.append(Placement(p.parameter, begin - origin, end - begin, p.start + begin - p.offset))
            elif not p.numel and not rank:
                found.append(Placement(p.parameter, 0, 0))
        return tuple(found)


@dataclass(frozen=True)
class Bundle:
    """units: indices of the units that read any of its parameters. movable: False keeps it on the device for good. scattered:
    see FlatSpace. reads: elements of the parameters that each of the units reads, as tensors of their own, where it is known.
    """

    index: int
    segments: tuple[int, ...]
    units: tuple[int, ...]
    numel: int
    trainable: bool
    movable: bool = True
    scattered: bool = True
    reads: tuple[int, ...] = ()

    def read_by(self, unit: int) -> int:
        """Elements of the parameters that the unit reads, as tensors of their own; all where it is not known."""
        return dict(zip(self.units, self.reads, strict=False)).get(unit, self.numel)


ADAM = ("exp_avg", "exp_avg_sq")  # its moments


@dataclass(frozen=True)
class Layout:
    """itemsize: bytes of a parameter as computed with (2 for bf16 and fp16, 4 for fp32).

    in_place: bundles whose gradients may be written over their own parameters on the device, for each parameter has one
    user only; the others have a range of their own.
    max_staleness: of what the host updates, which then has buffers for it; None: see Strategy.max_staleness.
    on_disk: trained bundles whose master weights and moments have their home on the disk, not on the host.
    unit_names: as the model calls them, by unit; none in layouts of no model.
    moments: names of what the optimizer keeps of trained parameters in fp32 beside their master weights: see
    PlanningContext.
    """

    itemsize: int
    segments: tuple[Segment, ...]
    bundles: tuple[Bundle, ...]
    in_place: frozenset[int] = frozenset()
    on_disk: frozenset[int] = frozenset()
    unit_names: tuple[str, ...] = ()
    moments: tuple[str, ...] = ADAM
    max_staleness: int | None = None

    def named(self, index: ModelIndex) -> Layout:
        """With the names of the model's units."""
        return replace(self, unit_names=tuple(unit.name for unit in index.units))

    def unit_name(self, unit: int) -> str:
        return self.unit_names[unit] if unit < len(self.unit_names) else f"unit {unit}"

    @cached_property
    def bundle_names(self) -> tuple[str, ...]:
        """Of the units that read each bundle: the first, and the last if there are several."""
        ends = ((b.units[0], b.units[-1]) if b.units else () for b in self.bundles)
        return tuple(" .. ".join(dict.fromkeys(map(self.unit_name, units))) for units in ends)

    @classmethod
    def of(
        cls,
        index: ModelIndex,
        itemsize: int,
        bundles: Iterable[Sequence[Segment]],
        *,
        unmovable: Collection[int] = (),
        in_place: Collection[int] = (),
    ) -> Layout:
        """A layout of bundles that are given by their segments, of one space each; both are numbered in the order given.

        unmovable, in_place: numbers of bundles.
        """
        unit_of = {unit.name: unit.index for unit in index.units}
        segments: list[Segment] = []
        made: list[Bundle] = []
        for number, given in enumerate(bundles):
            mine = [replace(s, index=len(segments) + i) for i, s in enumerate(given)]
            segments += mine
            reads = Counter[int]()
            for p in chain.from_iterable(s.placements for s in mine):
                size = round_up(p.numel, TENSOR_BYTES // itemsize)
                reads.update(dict.fromkeys((unit_of[user] for user in index.parameters[p.parameter].users), size))
            numel, trainable = sum(s.numel for s in mine), mine[0].space.trainable
            numbers, scattered = tuple(s.index for s in mine), mine[0].space.scattered
            units = tuple(sorted(reads))
            movable, read = number not in unmovable, tuple(min(numel, reads[unit]) for unit in units)
            made.append(Bundle(number, numbers, units, numel, trainable, movable, scattered, read))
        return cls(itemsize, tuple(segments), tuple(made), frozenset(in_place))

    @cached_property
    def bundles_of_unit(self) -> dict[int, tuple[int, ...]]:
        """Unit index to the bundles its forward reads, in bundle order."""
        found: dict[int, list[int]] = {}
        for bundle in self.bundles:
            for unit in bundle.units:
                found.setdefault(unit, []).append(bundle.index)
        return {unit: tuple(bundles) for unit, bundles in found.items()}

    def add_user(self, bundle: int, unit: int) -> None:
        """A step has shown that the unit reads the bundle too: the one thing of a layout that is learned, in place."""
        mine = self.bundles[bundle]
        changed = replace(mine, units=tuple(sorted({*mine.units, unit})), reads=())
        object.__setattr__(self, "bundles", (*self.bundles[:bundle], changed, *self.bundles[bundle + 1 :]))
        object.__setattr__(self, "in_place", self.in_place - {bundle})
        for derived in ("bundles_of_unit", "bundle_names"):
            self.__dict__.pop(derived, None)

    @cached_property
    def bundle_of_segment(self) -> tuple[int, ...]:
        owner = {s: b.index for b in self.bundles for s in b.segments}
        return tuple(owner[s.index] for s in self.segments)

    @cached_property
    def places(self) -> dict[int, Place]:
        """By parameter. ValueError where the pieces of one have a gap or lie in several bundles."""
        found: dict[int, Place] = {}
        for bundle in self.bundles:
            start = 0
            for s in bundle.segments:
                for piece in self.segments[s].placements:
                    before = found.get(piece.parameter, Place(bundle.index, start + piece.offset, 0))
                    if (before.bundle, before.offset + before.numel) != (bundle.index, start + piece.offset) or (
                        piece.start != before.numel
                    ):
                        raise ValueError(f"parameter {piece.parameter} does not go on where it ended, in segment {s}")
                    found[piece.parameter] = replace(before, numel=before.numel + piece.numel)
                start += self.segments[s].numel
        return found

    @cached_property
    def bundle_of_parameter(self) -> dict[int, int]:
        return {p: place.bundle for p, place in self.places.items()}

    def bundle_bytes(self, bundle: int) -> int:
        return self.bundles[bundle].numel * self.itemsize

    def shard_numel(self, bundle: int) -> int:
        """Elements of a bundle that a rank has at home."""
        return sum(self.segments[s].shard_numel for s in self.bundles[bundle].segments)

    def shard_bytes(self, bundle: int) -> int:
        """The same in bytes, as computed with."""
        return self.shard_numel(bundle) * self.itemsize

    @cached_property
    def movable_bytes(self) -> int:
        """Of parameters that may leave the device."""
        return sum(self.bundle_bytes(b.index) for b in self.bundles if b.movable)

    @cached_property
    def largest_movable_bytes(self) -> int:
        """Bytes of the largest bundle that moves; 0 if none does."""
        return max((self.bundle_bytes(b.index) for b in self.bundles if b.movable), default=0)

    @property
    def param_bytes(self) -> int:
        """Bytes of all parameters as computed with, padding included."""
        return sum(b.numel for b in self.bundles) * self.itemsize


def space_of(layout: Layout, bundle: int) -> FlatSpace:
    """What the segments of a bundle have in common."""
    return layout.segments[layout.bundles[bundle].segments[0]].space


def pack(parameters: Iterable[Parameter], *, space: FlatSpace, itemsize: int, index: int = 0) -> Segment:
    """Lay `parameters` one behind the other, each start aligned, into one segment; no wasted tail but the alignment.

    index: `Layout.of` numbers them itself.
    """
    align = align_elements(itemsize)
    placements, offset = [], 0
    for parameter in parameters:
        placements.append(Placement(parameter.index, offset, parameter.numel))
        offset = round_up(offset + parameter.numel, align)
    return Segment(index, space, round_up(offset, align * space.ranks), tuple(placements))
