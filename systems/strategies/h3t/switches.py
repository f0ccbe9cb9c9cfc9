"""The seven switches of a layer (paper, section 3.2 and appendix A) as data, and the sets that the solvers search."""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass, fields
from itertools import product

import numpy as np

Bools = np.ndarray


@dataclass(frozen=True)
class Switches:
    """What one layer does. In this order an assignment of a model is an array of bools [layers, 7].

    rematerialise: throw intermediate activations A_i away in forward, compute them again in backward.
    offload_hidden: the hidden state H_i waits for its backward on the host.
    partition: gathered parameters are released between forward and backward.
    lazy_prefetch: no copy rests on the device from one step to the next.
    economical_forward, economical_backward: a layer's post-process goes before the preparation of the next.
    synchronise: the layer's segments wait for all streams.
    """

    rematerialise: bool = False
    offload_hidden: bool = False
    partition: bool = False
    lazy_prefetch: bool = False
    economical_forward: bool = False
    economical_backward: bool = False
    synchronise: bool = False

    def row(self) -> tuple[bool, ...]:
        return tuple(getattr(self, name) for name in NAMES)


NAMES = tuple(field.name for field in fields(Switches))
COMMUNICATION = tuple(map(NAMES.index, ("offload_hidden", "partition", "lazy_prefetch")))  # R: all that neighbours care about
ALL_ON = Switches(*(True,) * len(NAMES))
EVERY = tuple(Switches(*row) for row in product((False, True), repeat=len(NAMES)))  # |S| = 128
SYNCHRONISED = tuple(s for s in EVERY if s.synchronise)  # |S| = 64, for dynamic programming


@dataclass(frozen=True)
class Assignment:
    """A solver's result: one entry a layer. runtime_s, memory_bytes: by the cost model, not measured."""

    switches: tuple[Switches, ...]
    runtime_s: float
    memory_bytes: int
    solver: str

    def ratios(self) -> dict[str, float]:
        """Per switch the share of layers that have it on."""
        layers = max(1, len(self.switches))
        return {name: sum(getattr(s, name) for s in self.switches) / layers for name in NAMES}


def array_of(switches: Iterable[Switches]) -> Bools:
    """Bools [..., 7]."""
    return np.array([s.row() for s in switches], dtype=bool).reshape(-1, len(NAMES))


def switches_of(rows: Bools) -> tuple[Switches, ...]:
    return tuple(Switches(*map(bool, row)) for row in rows)


def communication(choices: Sequence[Switches]) -> np.ndarray:
    """Per choice its member of R as a number from 0 to 7."""
    rows = array_of(choices)
    return rows[:, COMMUNICATION] @ (1 << np.arange(len(COMMUNICATION)))
