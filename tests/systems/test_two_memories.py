"""A model that fits neither the host nor the device, but both together, trains as the reference does."""

from __future__ import annotations

from functools import cache
from typing import Any

import pytest

from systems.device.memory.pool import Pool
from systems.errors import BudgetError
from systems.planning.plan import Tier
from tests.systems.every import MANAGED
from tests.systems.models_small import tokens
from tests.systems.running import AMPLE, assert_equal, managed, one_step, replace, settings, start, waiting
from tests.systems.setups import Setup, budget_of, in_turn, reference

ALL = {name: (system, system.Options()) for name, system in MANAGED.items()}
SETUPS = [
    Setup("opt", "full"),
    Setup("gpt2", "none", accumulate=2, clip=0.5),
    Setup("opt", sharing="half-frozen", dtype="bf16"),
]


@cache
def host_bytes(setup: Setup, system: str) -> int:
    """What the host holds when it may hold everything."""
    chosen, options = ALL[system]
    run = setup.run(chosen, budget_of(setup, "half"), waiting(options))
    assert run.memory.host_peak_bytes is not None
    return run.memory.host_peak_bytes


@pytest.mark.parametrize(
    ("system", "setup"),
    in_turn(ALL, [(setup,) for setup in SETUPS]),
    ids=lambda value: value if isinstance(value, str) else f"{value.model}-{value.accumulate}-{value.sharing}",
)
@pytest.mark.one_in(3)
def test_losses_and_states_are_the_references(system: str, setup: Setup) -> None:
    chosen, options = ALL[system]
    host = int(host_bytes(setup, system) * 0.7)
    run = setup.run(chosen, budget_of(setup, "above"), options, host_memory=host)
    assert_equal(run, reference(setup))
    assert run.memory.host_peak_bytes is not None and run.memory.host_peak_bytes <= host


@pytest.mark.parametrize("system", ALL)
@pytest.mark.one_in(2)
def test_what_stays_on_the_device_never_moves(system: str) -> None:
    setup = Setup("opt", "full")
    chosen, options = ALL[system]
    host = int(host_bytes(setup, system) * 0.7)
    given = settings(host_memory=host, device_memory=budget_of(setup, "above"), recompute="full")
    engine = start(chosen, setup.build(), given, options)
    settled = [b for b in managed(engine).layout.bundles if not b.movable and b.trainable]
    assert settled, "void: the host held everything"
    for batch in tokens(3, 1):
        for bundle in settled:
            states = [managed(engine).store.segments[s].state for s in bundle.segments]
            assert all(state.tier is Tier.DEVICE for state in states)
            assert managed(engine).residency.bundles[bundle.index].block is not None
        one_step(engine, batch)
    engine.close()


@pytest.mark.parametrize("system", ALL)
def test_neither_memory_has_room(system: str) -> None:
    setup = Setup("opt", "full")
    chosen, options = ALL[system]
    host = int(host_bytes(setup, system) * 0.5)
    tight = settings(host_memory=host, device_memory=budget_of(setup, "tight"), recompute="full")
    with pytest.raises(BudgetError, match="raise `host_memory` or `device_memory`") as refused:
        start(chosen, setup.build(), tight, options)
    assert refused.value.tier == "host"
    assert refused.value.need > refused.value.have == host
    start(chosen, setup.build(), replace(tight, device_memory=AMPLE), options).close()


def test_a_device_that_refuses_halfway_leaves_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    """An allocator may refuse what the account has room for; the first segments' state is there by then."""
    setup, pools = Setup("opt", "full"), []
    chosen, options = ALL["elixir"]
    allocate, granted = Pool.allocate, 0

    def refuse(self: Pool, nbytes: int, label: str) -> Any:
        nonlocal granted
        granted += label.startswith("optimizer state")
        pools.append(self)
        return None if granted > 1 else allocate(self, nbytes, label)

    monkeypatch.setattr(Pool, "allocate", refuse)
    given = settings(host_memory=int(host_bytes_of(setup) * 0.6), device_memory=AMPLE, recompute="full")
    with pytest.raises(BudgetError, match="stays on the device"):
        start(chosen, setup.build(), given, options)
    assert pools[-1].live_bytes == 0


def host_bytes_of(setup: Setup) -> int:
    """Of parameters and states, without padding: 4 for the slot and 12 for the states, in fp32."""
    return 16 * sum(p.numel() for p in setup.build().parameters())
