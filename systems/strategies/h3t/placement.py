"""Which layers have their optimizer states on the device: the first ones, with a share of all parameters, the fastest share.

The paper has all of the optimizer on the host (section 3.2.2), and so have variants global-offload and paper, but for what the
host has no memory for. Of one placement the fastest plan is that of the simulator. Between placements counts what becomes of
a plan behind the strategy: what the host updates runs ahead of the norm as far as there is memory, and a host may be slower
than its profile says, which updates on the device do not feel.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace

from systems.planning.layout import Layout
from systems.planning.policy.ahead import AheadChoice, weighed_s
from systems.planning.step.demand import demand_of
from systems.planning.step.residence import unmovable
from systems.planning.trace import Trace
from systems.strategies.h3t.candidates import Asked, Candidate, fastest

SHARES = (0.25, 0.5, 1.0)  # of all parameters: those of the bundles that are updated on the device


def placements(asked: Asked, layout: Layout, trace: Trace) -> list[frozenset[int]]:
    """Bundles that are updated on the device or never move. The first has of these only what never moves."""
    least = unmovable(layout)
    if asked.options.variant != "resident-optimizer" or asked.context.any_plan:
        return [least]
    demand = demand_of(layout, trace, asked.context)
    order = sorted(demand.gradient_spans, key=lambda bundle: (demand.next_use.after(bundle, -1), bundle))
    found = [least | _first(layout, order, share) for share in SHARES]
    return list(dict.fromkeys([least, *found]))


def _first(layout: Layout, order: Sequence[int], share: float) -> frozenset[int]:
    """Of that order as many as have this share of all parameters."""
    left, found = share * layout.param_bytes, set[int]()
    for bundle in order:
        left -= layout.bundle_bytes(bundle)
        if left < 0:
            break
        found.add(bundle)
    return frozenset(found)


def fastest_placement(asked: Asked, layout: Layout, found: Sequence[Candidate]) -> Candidate:
    """The fastest of each placement beside those of the others, as they will run."""
    placed = [[each for each in found if each.on_device == one] for one in dict.fromkeys(each.on_device for each in found)]
    finalists = [fastest(layout, each) for each in placed]
    if len(finalists) == 1:
        return finalists[0]
    return fastest(layout, finalists, [_as_run_s(asked, layout, each) for each in finalists])


def _as_run_s(asked: Asked, layout: Layout, each: Candidate) -> float:
    context = replace(asked.context, hardware=asked.hardware)
    allowed = None if asked.options.run_ahead else frozenset[int]()
    return weighed_s(AheadChoice(each.plan, layout, each.trace, context, asked.blocks, allowed))
