"""What an assignment of switches costs: time and memory of each layer's segments, given its neighbours' switches.

Note [Segments] (paper, section 3.2.3 and figures 4, 7 and 8)
    A segment is the computation of one layer with what runs beside it. In forward segment i: post-process of layer i-1 (its
    hidden state goes to the host) and preparation of layer i+1 (its shard is prefetched, its parameters are gathered). In
    backward segment i: post-process of layer i+1 (gradients are reduced, then offloaded) and preparation of layer i-1
    (hidden state, shard, gather). Beside the layers' own there are three short ones: before layer 1 (embedding), at the turn
    from forward to backward (head and loss), and after the last backward.
    With synchronisation a segment ends when all streams are done; without, the next computation waits only for what it
    needs, and a post-process may lag behind it.

Note [Two sets of rules]
    PAPER and PAPER_WITHOUT_LINK are the paper's machine: one stream for host copies in both directions, one for the link
    between GPUs or none of its own, a shard may rest on the device apart from the gathered parameters, and economical mode
    runs post-process before preparation on the stream that both use, so that their memory is not needed at once.
    SUBSTRATE is what this project's runtime does with a compiled plan: copies in each direction have a lane of their own, what
    rests on the device is the whole bundle, a copy that leaves frees its room at once (the next owner waits for it), and
    economical mode prepares a layer only when the layer before it is out of the way. SUBSTRATE_OF_RANKS: the same of several
    ranks, where what rests is a shard.

Arithmetic is numpy's: switches and costs may be single values or arrays that broadcast. Times in seconds, memory in bytes.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, fields
from typing import Any

import numpy as np

from systems.strategies.h3t.switches import NAMES, Bools


@dataclass(frozen=True)
class LayerCosts:
    """One layer on one device: what the profiler found of it.

    forward_s, backward_s: computation, without recomputation. prefetch_s: its shard to the device; gather_s, reduce_s: over
    the ranks; offload_s: its gradient's shard to the host; hidden_out_s, hidden_in_s: its hidden state.
    parameter_bytes: gathered; resting_bytes: what stays on the device between steps without lazy prefetching.
    intermediate_bytes: A_i; hidden_bytes: H_i. forward_bytes, backward_bytes: all that its segments need whatever the
    switches, but for parameters (in backward with gradients, A_i and H_i). lingering_bytes: gradients on their way out.
    gap_bytes: needed after this layer's forward, or before its backward, where other modules run.
    """

    name: str = field(default="", compare=False)
    forward_s: float = 0.0
    backward_s: float = 0.0
    prefetch_s: float = 0.0
    gather_s: float = 0.0
    reduce_s: float = 0.0
    offload_s: float = 0.0
    hidden_out_s: float = 0.0
    hidden_in_s: float = 0.0
    parameter_bytes: int = 0
    resting_bytes: int = 0
    intermediate_bytes: int = 0
    hidden_bytes: int = 0
    forward_bytes: int = 0
    backward_bytes: int = 0
    lingering_bytes: int = 0
    gap_bytes: int = 0


@dataclass(frozen=True)
class Rules:
    """See Note [Two sets of rules]. link: gathers and reductions have a stream of their own.

    needs_remat: a hidden state can only be offloaded where the layer rematerialises. renews: what rests on the device is moved
    there behind its update, once a step, and that is counted (figure 3a of the paper).
    """

    link: bool = True
    duplex: bool = False
    shards_rest: bool = True
    lingers: bool = True
    needs_remat: bool = False
    renews: bool = False


PAPER = Rules()
PAPER_WITHOUT_LINK = Rules(link=False)
SUBSTRATE = Rules(duplex=True, shards_rest=False, lingers=False, needs_remat=True)
SUBSTRATE_OF_RANKS = Rules(duplex=True, lingers=False, needs_remat=True)


@dataclass(frozen=True)
class ModelCosts:
    """The layers of a model in order of forward. fixed_s: time of a step outside all segments (the optimizer's).

    start_s, turn_s, end_s: computation before the first layer, between last forward and backward, and after the last
    backward. start_bytes: device memory of those at both ends. fixed_bytes: there at every moment.
    """

    layers: tuple[LayerCosts, ...]
    rules: Rules = PAPER
    start_s: float = 0.0
    turn_s: float = 0.0
    end_s: float = 0.0
    fixed_s: float = 0.0
    start_bytes: int = 0
    fixed_bytes: int = 0
    padded: tuple[Any, ...] = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        padded = (LayerCosts(), *self.layers, LayerCosts())
        columns = {
            f.name: np.array([getattr(layer, f.name) for layer in padded]) for f in fields(LayerCosts) if f.name != "name"
        }
        rows = (_CostRow({name: column[number] for name, column in columns.items()}) for number in range(len(padded)))
        object.__setattr__(self, "padded", tuple(rows))

    def layer(self, number: int) -> Any:
        """Costs of layer `number` (0 is the first; -1 and N are of no cost) as an object with the fields of LayerCosts."""
        return self.padded[number + 1]


class _CostRow:
    def __init__(self, values: Mapping[str, Any]) -> None:
        self.__dict__.update(values)


def on(rows: Bools) -> Any:
    """An object with the fields of Switches, each an array without the last axis of `rows`."""
    return _CostRow({name: rows[..., column] for column, name in enumerate(NAMES)})


class Clocks:
    """When each stream is free, and since when the next computation has what it needs."""

    def __init__(self, rules: Rules, start: Any = 0.0) -> None:
        self._rules = rules
        self._free = {"compute": start, "up": start, "down": start, "link": start}
        self.ready = start

    def _streams(self, name: str) -> tuple[str, ...]:
        copies = ("up", "down") if not self._rules.duplex else (name,)
        if name in ("up", "down"):
            return copies
        return ("link",) if self._rules.link else self._streams("up" if name == "gather" else "down")

    def run(self, stream: str, seconds: Any, after: Any) -> Any:
        """Queue work on a stream; when it is done. Work of no length waits for nobody."""
        names = self._streams(stream)
        start = np.maximum(self._free[names[0]], after)
        end = np.where(seconds > 0, start + seconds, after)
        for name in names:
            self._free[name] = np.where(seconds > 0, end, self._free[name])
        return end

    def segment(self, compute_s: Any, post: Any, preparation: Any, economical: Any, synchronise: Any) -> None:
        """post, preparation: (stream, seconds) one after the other. Ends with streams joined where `synchronise`."""
        begin = self._free["compute"]
        done = np.maximum(begin, self.ready) + compute_s
        other = self._copy()
        self._free["compute"] = other._free["compute"] = done
        self.ready = self._chain(preparation, begin)
        self._chain(post, begin)
        if self._rules.duplex:  # economical: prepared when the layer is out of the way, but for the hidden state
            other._chain(post, begin)
            hidden = other._chain([each for each in preparation if each[0] == "hidden"], begin)
            rest = [each for each in preparation if each[0] != "hidden"]
            other.ready = np.maximum(other._chain(rest, np.maximum(done, hidden)), hidden)
        else:
            posted = other._chain(post, begin)
            other.ready = other._chain(preparation, posted)
        self._choose(economical, other)
        self.join(synchronise)

    def _chain(self, work: Sequence[tuple[str, Any]], after: Any) -> Any:
        for stream, seconds in work:
            after = self.run("up" if stream == "hidden" else stream, seconds, after)
        return after

    def _copy(self) -> Clocks:
        other = Clocks(self._rules)
        other._free, other.ready = dict(self._free), self.ready
        return other

    def _choose(self, where: Any, other: Clocks) -> None:
        self._free = {name: np.where(where, other._free[name], mine) for name, mine in self._free.items()}
        self.ready = np.where(where, other.ready, self.ready)

    def join(self, where: Any) -> None:
        end = self.end
        self._free = {name: np.where(where, end, mine) for name, mine in self._free.items()}

    @property
    def end(self) -> Any:
        latest = self.ready
        for mine in self._free.values():
            latest = np.maximum(latest, mine)
        return latest


def _prefetches(rules: Rules, layer: Any, s: Any) -> list[tuple[str, Any]]:
    """Forward's preparation of a layer: its shard if none rests on the device, then the gather."""
    gathers = True if rules.shards_rest else s.lazy_prefetch
    return [("up", layer.prefetch_s * s.lazy_prefetch), ("gather", layer.gather_s * gathers)]


def _fetches_again(rules: Rules, layer: Any, s: Any) -> list[tuple[str, Any]]:
    """Backward's preparation of a layer."""
    copied = s.partition & s.lazy_prefetch if rules.shards_rest else s.partition
    hidden = ("hidden", layer.hidden_in_s * s.offload_hidden)
    return [hidden, ("up", layer.prefetch_s * copied), ("gather", layer.gather_s * s.partition)]


def renewal(rules: Rules, layer: Any, s: Any) -> Any:
    """Seconds for which a layer's shard is moved when all else of the step is done, if it rests and that counts."""
    return layer.prefetch_s * ~s.lazy_prefetch * rules.renews


def forward(clocks: Clocks, rules: Rules, layers: Any, switches: Any) -> None:
    """Forward segment. layers, switches: (previous, this, next)."""
    (before, layer, after), (s_before, s, s_after) = layers, switches
    post = [("down", before.hidden_out_s * s_before.offload_hidden)]
    clocks.segment(layer.forward_s, post, _prefetches(rules, after, s_after), s.economical_forward, s.synchronise)


def backward(clocks: Clocks, rules: Rules, layers: Any, switches: Any) -> None:
    (before, layer, after), (s_before, s, _) = layers, switches
    post = [("reduce", after.reduce_s), ("down", after.offload_s)]
    compute_s = layer.backward_s + layer.forward_s * s.rematerialise
    clocks.segment(compute_s, post, _fetches_again(rules, before, s_before), s.economical_backward, s.synchronise)


def start(clocks: Clocks, rules: Rules, seconds: float, layer: Any, s: Any) -> None:
    clocks.segment(seconds, [], _prefetches(rules, layer, s), s.economical_forward, s.synchronise)


def turn(clocks: Clocks, rules: Rules, seconds: float, layer: Any, s: Any) -> None:
    post = [("down", layer.hidden_out_s * s.offload_hidden)]
    clocks.segment(seconds, post, _fetches_again(rules, layer, s), s.economical_backward, s.synchronise)


def end(clocks: Clocks, seconds: float, layer: Any, s: Any) -> None:
    clocks.segment(seconds, [("reduce", layer.reduce_s), ("down", layer.offload_s)], [], s.economical_backward, s.synchronise)


@dataclass(frozen=True)
class LayerMemory:
    """Of layer i. delta: kept from its forward to its backward. resident: kept for good. peak: of its segments, above what
    the layers before it keep. lag: of its post-process, which without synchronisation the next segment has too.
    """

    delta: Any
    resident: Any
    peak: Any
    lag: Any


def memory(rules: Rules, layers: Any, switches: Any) -> LayerMemory:
    """layers, switches: (previous, this, next)."""
    (before, layer, after), (s_before, s, s_after) = layers, switches
    gathered, gathered_before, gathered_after = (
        each.parameter_bytes - each.resting_bytes * ~switch.lazy_prefetch
        for each, switch in ((layer, s), (before, s_before), (after, s_after))
    )
    saved = layer.intermediate_bytes * ~s.rematerialise
    delta = saved + layer.hidden_bytes * ~s.offload_hidden + gathered * ~s.partition
    if rules.lingers:
        left = before.hidden_bytes * s_before.offload_hidden + gathered_before * s_before.partition
        forwards = np.where(s.economical_forward, np.maximum(left, gathered_after), left + gathered_after)
        coming = before.hidden_bytes * s_before.offload_hidden + gathered_before * s_before.partition
        going = after.lingering_bytes
        backwards = np.where(s.economical_backward, np.maximum(going, coming), going + coming)
        lag = np.maximum(left, going)
    else:
        forwards = gathered_after * ~s.economical_forward
        backwards = gathered_before * s_before.partition * ~s.economical_backward
        lag = 0 * forwards
    ahead = np.maximum(gathered_after * ~s.economical_forward, gathered * (s.partition & ~s.economical_backward))
    gap = delta + layer.gap_bytes + ahead * (layer.gap_bytes > 0)
    peak = np.maximum(layer.forward_bytes + gathered + saved + forwards, layer.backward_bytes + gathered + backwards)
    return LayerMemory(delta, layer.resting_bytes * ~s.lazy_prefetch, np.maximum(peak, gap), lag)
