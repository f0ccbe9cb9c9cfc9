"""One step of H3T as the paper's implementation runs it: operations on three streams, in its order, for the simulator to time.

Note [Segments] (paper, section 3.2.3, figure 4, appendix A)
    A segment is the computation of a layer with what runs beside it: in forward segment i the post-process of layer i-1 (its
    hidden state is offloaded) and the preparation of layer i+1 (its shard is prefetched, then gathered); in backward segment i
    the post-process of layer i+1 (its gradients are scattered, then offloaded) and the preparation of layer i-1 (hidden state,
    shard, gather). A short segment lies before the first layer, one at the turn, one behind the last backward. Neither
    post-process nor preparation begins before its segment does. Economical: post-process is queued first, else preparation.

A shard rests on the device unless prefetching is lazy, and what is on its way out takes memory until it is gone: those are
the paper's rules. What this project's runtime does instead is in the docstring of `systems.strategies.h3t`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field

from systems.planning import hardware
from systems.planning.clock.clocks import BusySpan
from systems.planning.clock.rates import Costs, Rates, default_queues
from systems.planning.clock.simulator import clocked
from systems.planning.hardware import HardwareProfile, SourcedNumber
from systems.planning.layout import Bundle, FlatSpace, Layout, Parameter, Segment, pack
from systems.planning.plan import LaneKind
from systems.planning.step.derived_waits import with_waits
from systems.planning.step.operations import ScheduledOperation, Work
from systems.planning.strategy import PlanningContext
from systems.strategies.h3t.switches import Switches

RANKS, ITEM = 2, 2
LAYER = 1 << 20  # parameters; a layer's hidden state is as large as its shard times hidden_s / prefetch_s
ADAM_BYTES = 24  # master and both moments of a parameter, read and written
PLENTY = 1e18
CALCULATION, LINK, HOST_LINK, HOST = "calculation", "NVLink", "PCI-E", "CPU"


@dataclass(frozen=True)
class Lengths:
    """Seconds of one operation of one layer, alone. Without a link of their own, gather and scatter go at the rate of PCI-E.

    edge_s: computation before the first layer, and at the turn.
    """

    forward_s: float = 3e-3
    backward_s: float = 6e-3
    edge_s: float = 2e-3
    prefetch_s: float = 2e-3
    offload_s: float = 2e-3
    collective_s: float = 1e-3
    hidden_s: float = 1e-3
    update_s: float = 2e-3


@dataclass(frozen=True)
class Case:
    """switches: of every layer. link: the GPUs have NVLink."""

    switches: Switches
    layers: int = 3
    link: bool = True
    lengths: Lengths = Lengths()


@dataclass(frozen=True)
class Shown:
    """An operation that was timed. segment: its number in the step. name: as in figure 7f. layer: from 1, 0 for none."""

    stream: str
    name: str
    layer: int
    segment: int
    start_s: float
    end_s: float


@dataclass(frozen=True)
class Diagram:
    """operations: of one steady step, in the order they were queued in. peak_bytes: on the device, by the paper's rules."""

    case: Case
    operations: tuple[Shown, ...]
    step_time_s: float
    peak_bytes: int

    @property
    def forward_segments(self) -> range:
        return range(1, self.case.layers + 1)

    @property
    def backward_segments(self) -> range:
        return range(self.case.layers + 2, 2 * self.case.layers + 2)


def drawn(case: Case) -> Diagram:
    """The case, timed by the simulator."""
    step = _DrawnStep(case)
    step.build()
    profile = machine(case)
    context = PlanningContext(1 << 50, 1 << 50, itemsize=ITEM, ranks=RANKS, accumulate=1, seed=0)
    costs = Costs(_layout(case.layers), context, Rates(profile, RANKS), {**default_queues(), **streams(case.link)})
    timed = clocked(with_waits(step.operations), step.segment + 1, costs)
    spans = {operation.ticket: span for operation, span in timed.operations}
    shown = [
        Shown(costs.queues[o.lane], *step.names[o.ticket], o.moment, spans[o.ticket].start_s, spans[o.ticket].end_s)
        for o in step.operations
        if o.lane is not None
    ]
    return Diagram(case, tuple(shown), timed.step_time_s, _peak(step.buffers, spans))


def streams(link: bool) -> Mapping[LaneKind, str]:
    """Lanes onto the paper's streams: copies in both directions share one, which is also the collectives' without a link."""
    collectives = LINK if link else HOST_LINK
    copies = {LaneKind.H2D: HOST_LINK, LaneKind.D2H: HOST_LINK}
    own = {LaneKind.COMPUTE: CALCULATION, LaneKind.CPU: HOST}
    return {**own, **copies, LaneKind.GATHER: collectives, LaneKind.REDUCE: collectives}


def machine(case: Case) -> HardwareProfile:
    """One on which every operation alone takes as long as the case says."""
    lengths, shard = case.lengths, LAYER // RANKS
    plenty = ("both_ways", "node_copy", "node_both_ways", "host_dram", "device_dram")
    speeds = {f"{name}_bytes_per_s": PLENTY for name in plenty}
    speeds["h2d_bytes_per_s"] = shard * ITEM / lengths.prefetch_s
    speeds["d2h_bytes_per_s"] = shard * ITEM / lengths.offload_s
    speeds["cpu_adam_bytes_per_s"] = RANKS * shard * (ADAM_BYTES + 2 * ITEM) / lengths.update_s
    speeds |= {"copy_latency_s": 1e-9, "unit_event_s": 1e-9}
    chosen = "chosen for the drawing"
    figures: dict[str, SourcedNumber | None] = {n: SourcedNumber(value=v, source=chosen) for n, v in speeds.items()}
    link = SourcedNumber(value=shard * ITEM / lengths.collective_s, source="chosen for the drawing")
    return hardware.load("h3t-a100-40g-x8").model_copy(
        update={**figures, "device_link_bytes_per_s": link if case.link else None}
    )


def _layout(layers: int) -> Layout:
    space = FlatSpace("world", RANKS, True)
    parameters = [Parameter(i, f"layer{i}", (LAYER,), LAYER, True, (f"layer{i}",)) for i in range(layers)]
    segments: list[Segment] = [pack([p], index=p.index, space=space, itemsize=ITEM) for p in parameters]
    bundles = tuple(Bundle(s.index, (s.index,), (s.index,), s.numel, True) for s in segments)
    return Layout(ITEM, tuple(segments), bundles)


@dataclass(frozen=True)
class _HeldMemory:
    """Device memory from the start of one operation to the end of another. None: from the step's begin, or to its end."""

    nbytes: int
    first: int | None
    last: int | None


def _peak(buffers: Sequence[_HeldMemory], spans: Mapping[int, BusySpan]) -> int:
    changes: list[tuple[float, int]] = []
    for buffer in buffers:
        begin = 0.0 if buffer.first is None else spans[buffer.first].start_s
        changes.append((begin, buffer.nbytes))
        if buffer.last is not None:
            changes.append((spans[buffer.last].end_s, -buffer.nbytes))
    now = peak = 0
    for _, change in sorted(changes):  # at the same time what is freed comes first
        now += change
        peak = max(peak, now)
    return peak


@dataclass
class _DrawnStep:
    """Queues the operations of one step. See Note [Segments]. Layers count from 0 here."""

    case: Case
    operations: list[ScheduledOperation] = field(default_factory=list)
    names: dict[int, tuple[str, int]] = field(default_factory=dict)
    buffers: list[_HeldMemory] = field(default_factory=list)
    segment: int = 0
    _since: dict[str, int] = field(default_factory=dict)

    @property
    def _hidden_bytes(self) -> int:
        return int(LAYER // RANKS * ITEM * self.case.lengths.hidden_s / self.case.lengths.prefetch_s)

    def build(self) -> None:
        layers, lengths, s = self.case.layers, self.case.lengths, self.case.switches
        self.buffers += [_HeldMemory(self._sizes["shard"], None, None)] * (0 if s.lazy_prefetch else layers)
        self._segment([], self._prepared(0, again=False), s.economical_forward, [("edge", 0, lengths.edge_s)])
        for i in range(layers):
            ahead = self._prepared(i + 1, again=False) if i + 1 < layers else []
            behind = [("hidden out", i - 1)] if i and s.offload_hidden else []
            self._segment(behind, ahead, s.economical_forward, [("forward", i, lengths.forward_s)])
        behind = [("hidden out", layers - 1)] if s.offload_hidden else []
        turn = [("edge", 0, lengths.edge_s)]
        self._segment(behind, self._prepared(layers - 1, again=True), True, turn)  # what comes back has left before
        for i in reversed(range(layers)):
            ahead = self._prepared(i - 1, again=True) if i else []
            behind = [("scatter", i + 1), ("offload", i + 1)] if i + 1 < layers else []
            again = [("forward again", i, lengths.forward_s)] if s.rematerialise else []
            self._segment(behind, ahead, s.economical_backward, [*again, ("backward", i, lengths.backward_s)])
        self._segment([("scatter", 0), ("offload", 0)], [], s.economical_backward, [])
        for i in range(layers):
            self._queue("optimize", i)
        for i in range(layers if not s.lazy_prefetch else 0):
            self._queue("prefetch", i)

    def _prepared(self, i: int, *, again: bool) -> list[tuple[str, int]]:
        """again: for its backward."""
        s = self.case.switches
        hidden = ["hidden in"] if again and s.offload_hidden else []
        gathered = ["gather"] if s.partition or not again else []
        prefetched = ["prefetch"] if s.lazy_prefetch and gathered else []
        return [(name, i) for name in (*hidden, *prefetched, *gathered)]

    def _segment(
        self,
        behind: list[tuple[str, int]],
        ahead: list[tuple[str, int]],
        economical: bool,
        computes: list[tuple[str, int, float]],
    ) -> None:
        for name, i in [*behind, *ahead] if economical else [*ahead, *behind]:
            self._queue(name, i)
        for name, i, seconds in computes:
            self._compute(name, i, seconds, last=name == computes[-1][0])
        if self.case.switches.synchronise:
            self.operations.append(ScheduledOperation(len(self.operations), self.segment, Work.BARRIER, None))
        self.segment += 1

    def _compute(self, name: str, i: int, seconds: float, *, last: bool) -> None:
        reads: tuple[str, ...] = () if name == "edge" else (f"param:{i}", f"hidden:{i}")
        writes: tuple[str, ...] = (f"begin:{self.segment + 1}",) if last else ()
        if name == "backward":
            writes = (*writes, f"grad:{i}")
        elif name == "forward" or (name == "edge" and not self.segment):
            writes = (*writes, f"hidden:{i + 1 if name == 'forward' else 0}")
        ticket = self._add(name, i, Work.COMPUTE, LaneKind.COMPUTE, reads=reads, writes=writes, seconds=seconds)
        self._account(name, i, ticket)

    def _queue(self, name: str, i: int) -> None:
        begin, shard, whole = f"begin:{self.segment}", LAYER // RANKS * ITEM, LAYER * ITEM
        kind, lane, size, read, written = {
            "prefetch": (Work.FETCH, LaneKind.H2D, shard, f"slot:{i}", f"shard:{i}"),
            "gather": (Work.GATHER, LaneKind.GATHER, whole, f"shard:{i}", f"param:{i}"),
            "scatter": (Work.REDUCE, LaneKind.REDUCE, whole, f"grad:{i}", f"grad:{i}"),
            "offload": (Work.OFFLOAD, LaneKind.D2H, shard, f"grad:{i}", f"slot:{i}"),
            "hidden out": (Work.OFFLOAD_INPUT, LaneKind.D2H, self._hidden_bytes, f"hidden:{i}", f"host:{i}"),
            "hidden in": (Work.FETCH_INPUT, LaneKind.H2D, self._hidden_bytes, f"host:{i}", f"hidden:{i}"),
            "optimize": (Work.UPDATE, LaneKind.CPU, 0, f"slot:{i}", f"slot:{i}"),
        }[name]
        reads = (read,) if lane is LaneKind.CPU else (read, begin)
        self._account(name, i, self._add(name, i, kind, lane, size=size, reads=reads, writes=(written,)))

    def _add(
        self,
        name: str,
        i: int,
        kind: Work,
        lane: LaneKind,
        *,
        reads: tuple[str, ...],
        writes: tuple[str, ...],
        size: int = 0,
        seconds: float = 0.0,
    ) -> int:
        ticket = len(self.operations)
        bundle = -1 if kind is Work.COMPUTE else i
        self.names[ticket] = (name, 0 if name == "edge" else i + 1)
        self.operations.append(
            ScheduledOperation(
                ticket, self.segment, kind, lane, bundle, bytes=size, seconds=seconds, reads=reads, writes=writes
            )
        )
        return ticket

    def _account(self, name: str, i: int, ticket: int) -> None:
        """What begins, or ends, to take device memory with this operation."""
        for what in self._begins(name, i):
            self._since.setdefault(what, ticket)
        for what in self._ends(name, i):
            if what in self._since:
                self.buffers.append(_HeldMemory(self._sizes[what.split(":")[0]], self._since.pop(what), ticket))

    @property
    def _sizes(self) -> dict[str, int]:
        """Bytes. A layer's intermediate activations are drawn as large as its parameters."""
        whole = LAYER * ITEM
        return {"shard": whole // RANKS, "param": whole, "grad": whole, "kept": whole, "hidden": self._hidden_bytes}

    def _begins(self, name: str, i: int) -> tuple[str, ...]:
        s = self.case.switches
        if name == "edge":
            return () if self.segment else ("hidden:0",)
        if name == "forward":
            return (f"hidden:{i + 1}",) if s.rematerialise else (f"hidden:{i + 1}", f"kept:{i}")
        if name == "prefetch" and not s.lazy_prefetch:
            return ()  # into the shard that rests there
        made = {"prefetch": "shard", "gather": "param", "hidden in": "hidden", "forward again": "kept", "backward": "grad"}
        return (f"{made[name]}:{i}",) if name in made else ()

    def _ends(self, name: str, i: int) -> tuple[str, ...]:
        if name == "forward":
            return (f"param:{i}", f"shard:{i}") if self.case.switches.partition else ()
        if name == "backward":
            return (f"param:{i}", f"shard:{i}", f"hidden:{i}", f"kept:{i}")
        gone = {"hidden out": "hidden", "offload": "grad"}
        return (f"{gone[name]}:{i}",) if name in gone else ()
