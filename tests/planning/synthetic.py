"""Small models, layouts and traces for planning tests: units forward in order, then backward in reverse."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

from hypothesis import strategies as st

from systems.planning.layout import Bundle, FlatSpace, Layout, ModelIndex, Parameter, Unit, pack
from systems.planning.plan import OpKind, PlannedOperation
from systems.planning.step.demand import Demand
from systems.planning.strategy import PlanningContext
from systems.planning.trace import Moment, Phase, Trace

ITEMSIZE = 2
PLENTY = 1 << 50


def context(
    *, device: int = PLENTY, accumulate: int = 1, ranks: int = 1, seed: int = 0, itemsize: int = ITEMSIZE
) -> PlanningContext:
    return PlanningContext(
        device_budget=device, host_budget=PLENTY, itemsize=itemsize, ranks=ranks, accumulate=accumulate, seed=seed
    )


def layout_of(
    bundles: Sequence[tuple[int, Sequence[int]]],
    *,
    frozen: frozenset[int] = frozenset(),
    unmovable: frozenset[int] = frozenset(),
    ranks: int = 1,
) -> Layout:
    """Bundles given as (elements in multiples of 128, units that use them), one segment and one parameter each."""
    segments, made = [], []
    for index, (size, units) in enumerate(bundles):
        trainable = index not in frozen
        numel = size * 128
        parameter = Parameter(index, f"p{index}", (numel,), numel, trainable, tuple(map(str, units)))
        segment = pack([parameter], index=index, space=FlatSpace("world", ranks, trainable), itemsize=ITEMSIZE)
        segments.append(segment)
        made.append(Bundle(index, (index,), tuple(sorted(set(units))), segment.numel, trainable, index not in unmovable))
    return Layout(ITEMSIZE, tuple(segments), tuple(made))


def trace_of(
    layout: Layout,
    *,
    order: Sequence[int] | None = None,
    accumulate: int = 1,
    activation: int = 0,
    seconds: float = 1e-3,
    unused: frozenset[int] = frozenset(),
) -> Trace:
    """order: units in order of their forward, repeats allowed. activation: bytes that every unit leaves for its
    backward.

    unused: units that are only in the forward. Gradients are measured exactly, as autograd would make them.
    """
    units = list(order if order is not None else sorted(layout.bundles_of_unit))
    moments, other, kept, produced = [Moment(Phase.STEP_BEGIN)], [0], [0], [0]
    flushes: list[tuple[int, ...]] = [()]
    made: set[int] = set()

    def add(phase: Phase, unit: int = -1, micro: int = 0, *, live: int = 0, flush: tuple[int, ...] = ()) -> None:
        moments.append(Moment(phase, unit, micro))
        flushes.append(flush)
        new, transient, peak = 0, 0, 0
        if phase is Phase.BACKWARD_ENTER:
            for bundle in layout.bundles_of_unit[unit]:
                if layout.bundles[bundle].trainable:
                    size = layout.segments[layout.bundles[bundle].segments[0]].used * layout.itemsize
                    transient, peak = max(transient, size), max(peak, new + size)
                    if bundle not in made:
                        made.add(bundle)
                        new += size
        other.append(live + transient)
        kept.append(live + peak)
        produced.append(new)

    for micro in range(accumulate):
        live = 0
        for unit in units:
            live += activation
            add(Phase.FORWARD_ENTER, unit, micro, live=live)
            add(Phase.FORWARD_EXIT, unit, micro, live=live)
        left = [u for u in units if u not in unused]
        for unit in reversed(units):
            if unit not in unused:
                add(Phase.BACKWARD_ENTER, unit, micro, live=live)
                left.pop()
                done = [b for b in layout.bundles_of_unit[unit] if not set(layout.bundles[b].units) & set(left)]
                live -= activation
                add(
                    Phase.BACKWARD_EXIT,
                    unit,
                    micro,
                    live=live,
                    flush=tuple(b for b in done if layout.bundles[b].trainable),
                )
        add(Phase.BACKWARD_END, micro=micro)
    add(Phase.STEP_END, micro=accumulate)
    return Trace(tuple(moments), tuple(other), (seconds,) * len(moments), tuple(flushes), tuple(kept), tuple(produced))


@dataclass(frozen=True)
class Case:
    """A layout, a trace of it and the context without a budget."""

    layout: Layout
    trace: Trace
    context: PlanningContext


@st.composite
def cases(draw: st.DrawFn, *, ranks: bool | Sequence[int] = False) -> Case:
    """Bundles of one or two neighbouring units, tied ones, frozen ones, units called twice or left out of backward.

    ranks: how many there may be; True is one or two, False one.
    """
    units = draw(st.integers(1, 6))
    bundles: list[tuple[int, list[int]]] = []
    for unit in range(units):
        for _ in range(draw(st.integers(1, 2))):
            shared = [unit + 1] if unit + 1 < units and draw(st.booleans()) else []
            bundles.append((draw(st.integers(1, 9)), [unit, *shared]))
    if units > 1 and draw(st.booleans()):
        bundles.append((draw(st.integers(1, 9)), [0, units - 1]))
    indices = st.integers(0, len(bundles) - 1)
    frozen = draw(st.frozensets(indices, max_size=3))
    unmovable = draw(st.frozensets(indices, max_size=1))
    world = draw(st.sampled_from((1, 2) if ranks is True else ranks)) if ranks else 1
    layout = layout_of(bundles, frozen=frozen, unmovable=unmovable, ranks=world)
    accumulate = draw(st.sampled_from([1, 2]))
    order = list(range(units))
    if draw(st.booleans()):
        order.append(draw(st.integers(0, units - 1)))
    unused = draw(st.frozensets(st.integers(0, units - 1), max_size=1)) if units > 1 else frozenset()
    activation = draw(st.integers(0, 4)) * 256
    trace = trace_of(layout, order=order, accumulate=accumulate, activation=activation, unused=unused)
    return Case(layout, trace, context(accumulate=accumulate, ranks=world))


def model_of(
    units: Sequence[tuple[int | None, Sequence[int]]],
    *,
    tied: Sequence[tuple[int, Sequence[int]]] = (),
    frozen: frozenset[int] = frozenset(),
    groups: Mapping[int, str] | None = None,
) -> ModelIndex:
    """units: (block number or None, elements of each parameter). tied: (elements, units that share it), placed first.

    frozen and groups go by parameter index.
    """
    parameters: list[Parameter] = []
    owned: list[list[int]] = [[] for _ in units]

    def add(numel: int, users: Sequence[int]) -> None:
        index = len(parameters)
        for user in users:
            owned[user].append(index)
        names = tuple(f"unit{user}" for user in users)
        group = (groups or {}).get(index, "world")
        parameters.append(Parameter(index, f"p{index}", (numel,), numel, index not in frozen, names, group))

    for numel, users in tied:
        add(numel, users)
    for number, (_, sizes) in enumerate(units):
        for numel in sizes:
            add(numel, [number])
    found = tuple(Unit(number, f"unit{number}", tuple(owned[number]), block) for number, (block, _) in enumerate(units))
    return ModelIndex(tuple(parameters), found)


def transformer(blocks: int, width: int, *, vocabulary: int = 257, positions: int = 64) -> ModelIndex:
    """OPT-like: tied embedding and head, positions, blocks of 16 parameters, a last norm."""
    block = [width] * 2 + [width * width, width] * 4 + [width] * 2 + [4 * width * width, 4 * width]
    block += [4 * width * width, width]
    units: list[tuple[int | None, list[int]]] = [(None, []), (None, [positions * width])]
    units += [(number, block) for number in range(blocks)]
    units += [(None, [width, width]), (None, [])]
    return model_of(units, tied=[(vocabulary * width, [0, len(units) - 1])])


@st.composite
def models(draw: st.DrawFn, *, largest: int = 1500, groups: bool = False) -> ModelIndex:
    """Blocks of a few sizes between modules of their own, tied and frozen parameters. largest: elements of a block's parameter.

    groups: a few parameters are in a data-parallel group of their own.
    """
    kinds = [draw(st.lists(st.integers(1, largest), min_size=1, max_size=4)) for _ in range(draw(st.integers(1, 2)))]
    units: list[tuple[int | None, list[int]]] = [(None, draw(st.lists(st.integers(1, largest), max_size=2)))]
    for number in range(draw(st.integers(1, 6))):
        units.append((number, draw(st.sampled_from(kinds))))
    units.append((None, draw(st.lists(st.integers(1, 900), min_size=1, max_size=2))))
    ties = st.lists(st.integers(0, len(units) - 1), min_size=2, max_size=3, unique=True)
    tied = draw(st.lists(st.tuples(st.integers(1, 3000), ties), max_size=2))
    count = len(tied) + sum(len(sizes) for _, sizes in units)
    frozen = draw(st.frozensets(st.integers(0, count - 1), max_size=count // 2))
    apart = draw(st.frozensets(st.integers(0, count - 1), max_size=2)) if groups else frozenset[int]()
    return model_of(units, tied=tied, frozen=frozen, groups=dict.fromkeys(apart, "expert"))


def uneven_room(demand: Demand, sizes: Mapping[int, int], spare: int) -> list[int]:
    """Bytes per moment, never less than what is held. spare: lines of 256 bytes."""
    held = [sum(sizes[b] for b in bundles) for bundles in demand.held]
    return [max(h, max(held) * (m % 3) // 3) + spare * 256 * (m % 2) for m, h in enumerate(held)]


def check_moves(
    demand: Demand,
    sizes: Mapping[int, int],
    room: Sequence[int],
    planned: Sequence[PlannedOperation],
    start: frozenset[int],
) -> None:
    """A step's operations never pass the room, have there what is held, and end the step as it began."""
    resident = set(start)
    operations: dict[int, list[PlannedOperation]] = {}
    for p in planned:
        operations.setdefault(p.trigger, []).append(p)
    for moment in range(len(demand)):
        resident -= set(demand.stale[moment])
        for p in sorted(operations.get(moment, []), key=lambda p: p.priority):
            bundle = p.operation.bundle
            if p.operation.kind is OpKind.FETCH:
                assert bundle not in resident
                resident.add(bundle)
                assert sum(sizes[b] for b in resident) <= room[moment]
            else:
                resident.remove(bundle)
        assert set(demand.held[moment]) <= resident
        assert sum(sizes[b] for b in resident) <= room[moment]
    assert resident == start
