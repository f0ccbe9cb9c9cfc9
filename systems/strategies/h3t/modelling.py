"""From what was profiled to the cost model of the solvers, under the rules of the substrate."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, replace

from systems.planning.clock.rates import Rates
from systems.planning.hardware import HardwareProfile
from systems.planning.layout import Layout
from systems.planning.plan import LaneKind
from systems.planning.policy.windows import Window, windows
from systems.planning.step.timeline import MemTimeline
from systems.planning.strategy import PlanningContext
from systems.strategies.h3t.costs import (
    PAPER,
    PAPER_WITHOUT_LINK,
    SUBSTRATE,
    SUBSTRATE_OF_RANKS,
    LayerCosts,
    ModelCosts,
    Rules,
)
from systems.strategies.h3t.layers import layer_of_bundle
from systems.strategies.h3t.profiling import MeasuredLayers


@dataclass(frozen=True)
class Modeller:
    """unit_name: for messages. paper: costs by the paper's rules."""

    layout: Layout
    context: PlanningContext
    hardware: HardwareProfile
    blocks: frozenset[int]
    unit_name: Callable[[int], str]
    paper: bool = False

    @property
    def rules(self) -> Rules:
        """The paper's rules, where they are asked for, and two that hold here in any case: a hidden state leaves only where its
        layer rematerialises, and a shard that rests is moved behind its update, for which the next step's first segment waits.
        """
        if self.paper:
            link = self.context.ranks == 1 or self.hardware.device_link_bytes_per_s is not None
            return replace(PAPER if link else PAPER_WITHOUT_LINK, needs_remat=True, renews=True)
        return SUBSTRATE if self.context.ranks == 1 else SUBSTRATE_OF_RANKS

    def costs(self, measured: MeasuredLayers, memory: MemTimeline, on_device: frozenset[int]) -> ModelCosts:
        """memory: of a plan with every switch on in which a layer has the device without its neighbours' parameters.
        on_device: bundles that stay there, updated. Layers in order of forward.
        """
        trace = measured.base
        calls = sorted(((unit, list(windows(trace, unit))) for unit in measured.layers), key=lambda each: each[1][0].enter)
        layers = [self._layer(measured, memory, on_device, unit, found) for unit, found in calls]
        firsts = [found[0] for _, found in calls]
        layers = [self._with_gap(layer, memory, firsts, i) for i, layer in enumerate(layers)]
        total, seconds = memory.device_total_bytes, trace.compute_time_s
        first, last = firsts[0], firsts[-1]
        return ModelCosts(
            tuple(layers),
            self.rules,
            start_s=sum(seconds[: first.enter]),
            turn_s=sum(seconds[last.exit : last.back]),
            end_s=sum(seconds[first.done :]),
            start_bytes=max(max(total[: first.enter], default=0), max(total[first.done :])),
        )

    def _layer(
        self, measured: MeasuredLayers, memory: MemTimeline, on_device: frozenset[int], unit: int, calls: list[Window]
    ) -> LayerCosts:
        trace, total = measured.base, memory.device_total_bytes
        seconds, rates, layout = trace.compute_time_s, Rates(self.hardware, self.context.ranks), self.layout
        mine = [b for b, owner in layer_of_bundle(self.layout, self.blocks).items() if owner == unit and b not in on_device]
        learning = [b for b in mine if layout.bundles[b].trainable]
        moved, trained = (sum(map(layout.bundle_bytes, each)) for each in (mine, learning))
        own, own_trained = (sum(map(layout.shard_bytes, each)) for each in (mine, learning))
        hidden = dict(trace.input_bytes).get(unit, 0)
        forward_s, ranks = sum(seconds[calls[0].enter : calls[0].exit]), self.context.ranks

        def copy_s(size: float, rate: float) -> float:
            return size / rate + self.hardware.copy_overhead_s(size) if size else 0.0

        def collective_s(bundles: list[int], lane: LaneKind) -> float:
            return sum(layout.bundle_bytes(b) - layout.shard_bytes(b) for b in bundles) / rates.link.rate(lane)

        return LayerCosts(
            self.unit_name(unit),
            forward_s=forward_s,
            backward_s=max(sum(seconds[calls[0].back : calls[0].done]) - forward_s, 0.0),
            prefetch_s=copy_s(own, rates.h2d),
            gather_s=collective_s(mine, LaneKind.GATHER),
            reduce_s=collective_s(learning, LaneKind.REDUCE),
            offload_s=copy_s(own_trained, rates.d2h),
            hidden_out_s=copy_s(hidden, rates.d2h),
            hidden_in_s=copy_s(hidden, rates.h2d),
            parameter_bytes=moved if ranks == 1 else moved + own,  # with the shard beside it that came first
            resting_bytes=own,
            intermediate_bytes=measured.kept[unit],
            hidden_bytes=hidden if unit in trace.offloaded else 0,
            forward_bytes=max(max(total[w.enter : w.exit]) for w in calls) - moved,
            backward_bytes=max(max(total[w.back : w.done + 1]) for w in calls) - moved,
            lingering_bytes=trained if self.rules.lingers else 0,
        )

    def _with_gap(self, layer: LayerCosts, memory: MemTimeline, calls: list[Window], i: int) -> LayerCosts:
        total = memory.device_total_bytes
        if i == len(calls) - 1:
            between = total[calls[i].exit : calls[i].back]
        else:
            between = (*total[calls[i].exit : calls[i + 1].enter], *total[calls[i + 1].done : calls[i].back])
        return LayerCosts(**{**vars(layer), "gap_bytes": max(between, default=0)})
