"""Training under a system equals training with everything on the device, bit for bit (invariants 1 and 2)."""

from __future__ import annotations

from itertools import product
from typing import Any, ClassVar

import pytest
from pydantic import BaseModel

from systems.planning.layout import Layout, ModelIndex
from systems.strategies.elixir.options import ElixirOptions
from systems.strategies.elixir.strategy import Elixir
from systems.substrate.system import ManagedSystem
from tests.random_eviction import RandomEviction, RandomOptions
from tests.systems.every import MANAGED
from tests.systems.pairwise import pairs_of, pairwise
from tests.systems.running import RANDOM, assert_equal, elixir
from tests.systems.setups import SHARE, SYSTEMS, Setup, budget_of, reference

FACTORS: dict[str, tuple[Any, ...]] = {
    "recompute": ("none", "full", "reentrant", "non-reentrant"),
    "sharing": ("tied", "untied", "half-frozen"),
    "level": tuple(SHARE),
    "model": ("opt", "gpt2"),
    "accumulate": (1, 2),
    "dtype": ("fp32", "bf16"),
    "clip": (0.0, 0.5),
}
COVER = pairwise({"system": tuple(MANAGED), **FACTORS})


def check(system: str, level: str, **given: Any) -> None:
    setup = Setup(**given)
    expected = reference(setup)
    chosen, options = SYSTEMS[system]
    run = setup.run(chosen, budget_of(setup, level), options)
    assert_equal(expected, run)
    if level == "tight":
        moved = sum(run.per_step[-1][key] for key in ("h2d_bytes", "d2h_bytes"))
        assert moved >= parameter_bytes(run) / 2, "void: hardly anything moved in the last step"


def parameter_bytes(run: Any) -> int:
    itemsize = 4 if run.engine.settings.dtype == "fp32" else 2
    return sum(p.numel() for p in run.parameters.values()) * itemsize


def name_of(row: dict[str, Any]) -> str:
    return "-".join(str(value) for value in row.values())


def test_the_cover_covers() -> None:
    met = set().union(*map(pairs_of, COVER))
    for one, other in product(FACTORS, repeat=2):
        for left, right in product(FACTORS[one], FACTORS[other]) if one < other else ():
            assert ((one, left), (other, right)) in met
    assert all((("level", level), ("system", system)) in met for level in SHARE for system in MANAGED)
    assert len(COVER) < 4 * len(MANAGED) + 4  # there are four ways to recompute


@pytest.mark.parametrize("row", COVER, ids=name_of)
@pytest.mark.one_in(21)
def test_equals_resident(row: dict[str, Any]) -> None:
    check(**row)


class ElixirLayout(RandomEviction):
    """Elixir's chunks, evicted at random and without a plan."""

    name: ClassVar[str] = "elixir-layout"

    def layout(self, index: ModelIndex) -> Layout:
        return Elixir(ElixirOptions(), self._context).layout(index)


def test_no_policy_changes_a_bit() -> None:
    """Invariant 2: one layout under every policy, and every layout under one."""
    setup = Setup("gpt2", "full", 1, "tied", "bf16", clip=0.5)
    ways: list[tuple[Any, BaseModel]] = [(elixir(), ElixirOptions(prefetch=depth)) for depth in (0, 5)]
    ways += [(elixir(), ElixirOptions(variant="write-back")), (elixir(), ElixirOptions(chunk_max=1 << 15))]
    ways += [(ManagedSystem(ElixirLayout), RandomOptions())]
    ways += [(RANDOM, RandomOptions(chunk_parameters=size)) for size in (1, 8)]
    for number, (system, options) in enumerate(ways):
        run = setup.run(system, budget_of(setup, "tight"), options, seed=number)
        assert_equal(reference(setup), run)
        assert run.per_step[-1]["h2d_bytes"] > 0


@pytest.mark.slow
@pytest.mark.parametrize("system", MANAGED)
@pytest.mark.parametrize("sharing", FACTORS["sharing"])
@pytest.mark.parametrize("recompute", FACTORS["recompute"])
@pytest.mark.parametrize("model", FACTORS["model"])
def test_equals_resident_in_every_combination(model: str, recompute: str, sharing: str, system: str) -> None:
    for level, accumulate, dtype in product(*(FACTORS[f] for f in ("level", "accumulate", "dtype"))):
        check(system, level, model=model, recompute=recompute, sharing=sharing, accumulate=accumulate, dtype=dtype, clip=0.5)
