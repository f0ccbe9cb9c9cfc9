"""What moves, to the byte (invariant 9)."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import pytest
import torch

from models import registry as models_registry
from models.loss import token_loss
from systems.planning.layout import Layout
from systems.planning.plan import OpKind, Plan, Tier
from systems.planning.step.demand import demand_of
from systems.planning.step.operations import LaneOperation, Work
from systems.planning.step.profiles import gradient_profile
from systems.planning.step.residence import Residence
from systems.substrate.engine import ManagedEngine
from tests.systems.running import Run, elixir, settings
from tests.systems.setups import SYSTEMS, Setup, budget_of, in_turn, reference

SETUPS = [
    Setup("opt"),
    Setup("gpt2", "full", 1, "untied", "bf16"),
    Setup("opt", "non-reentrant", 2, "tied", "bf16", clip=0.5),
    Setup("gpt2", "none", 2, "tied", "fp32"),
]
KEEPING = ("elixir", "angel-ptm")  # optimizer states on the device, where there is room


@dataclass
class Steady:
    """The last step, which ran by `plan` from beginning to end."""

    run: Run
    layout: Layout
    plan: Plan
    h2d: int
    d2h: int

    @property
    def engine(self) -> ManagedEngine:
        assert isinstance(self.run.engine, ManagedEngine)
        return self.run.engine

    def bytes_of(self, kind: OpKind) -> int:
        return sum(self.layout.bundle_bytes(p.operation.bundle) for p in self.plan.operations if p.operation.kind is kind)

    @property
    def gradient_bytes(self) -> int:
        """Of what the host updates, once a micro-batch."""
        on_host = [b for b in self.layout.bundles if self.plan.optimizer_tier[b.segments[0]] is Tier.HOST and b.trainable]
        return sum(self.layout.bundle_bytes(b.index) for b in on_host) * self.engine.settings.accumulate


def steady(setup: Setup, system: str, budget: int) -> Steady:
    chosen, options = SYSTEMS[system]
    run = setup.run(chosen, budget, options)
    assert isinstance(run.engine, ManagedEngine)
    plan, last = run.engine.cursor.plan, run.per_step[-1]
    assert plan is not None
    assert not any(last[k] for k in ("on_demand_fetches", "evictions", "fallbacks", "retraces")), "void: not a steady step"
    return Steady(run, run.engine.layout, plan, last["h2d_bytes"], last["d2h_bytes"])


def name_of(value: Any) -> str:
    if isinstance(value, Setup):
        return f"{value.model}-{value.recompute}-{value.accumulate}-{value.sharing}-{value.dtype}"
    return str(value)


def setups() -> Any:
    return pytest.mark.parametrize("setup", SETUPS, ids=name_of)


def padding_bytes(setup: Setup, run: Run) -> int:
    """What starting each parameter at 256 bytes costs in parameters, gradients, master, moments and accumulator."""
    assert isinstance(run.engine, ManagedEngine)
    itemsize, accumulator = run.engine.layout.itemsize, 4 if setup.accumulate > 1 else 0
    total = 0
    for segment in run.engine.layout.segments:
        each = 2 * itemsize + 12 + accumulator if segment.space.trainable else itemsize
        total += (segment.numel - segment.used) * each
    return total


def open_range_bytes(run: Run) -> int:
    """With several micro-batches gradients on the device go through ranges: the most that are open at a time."""
    assert isinstance(run.engine, ManagedEngine)
    engine, context = run.engine, run.engine.strategy._context  # type: ignore[attr-defined]
    ((trace, plan),) = engine.planner.plans.values()
    assert plan is not None
    demand = demand_of(engine.layout, trace, context)
    residence = Residence.of(engine.layout, context, plan.optimizer_tier, plan.update_rule)
    return max(gradient_profile(demand, residence))


@pytest.mark.parametrize(
    ("system", "setup"),
    in_turn(KEEPING, [(setup,) for setup in (*SETUPS, Setup("gpt2", "none", 1, "half-frozen"))], each=3),
    ids=name_of,
)
@pytest.mark.one_in(6)
def test_with_resident_s_memory_nothing_moves_after_the_warm_up(system: str, setup: Setup) -> None:
    theirs = reference(setup).memory.device_peak_bytes or 0
    ample = setup.run(SYSTEMS[system][0], options=SYSTEMS[system][1])
    extra = padding_bytes(setup, ample) + open_range_bytes(ample)
    found = steady(setup, system, theirs + extra + 1)
    for step in found.run.per_step[1:]:
        assert step["h2d_bytes"] == step["d2h_bytes"] == 0
    assert abs((found.run.memory.device_peak_bytes or 0) - theirs) <= 0.05 * theirs
    assert extra <= (0.01 if setup.accumulate == 1 else 0.06) * theirs


@pytest.mark.parametrize(("system", "setup"), in_turn(KEEPING, [(setup,) for setup in SETUPS], each=2), ids=name_of)
@pytest.mark.one_in(2)
def test_a_master_shard_spares_every_write_but_the_gradient(system: str, setup: Setup) -> None:
    found = steady(setup, system, budget_of(setup, "tight"))
    assert found.d2h == found.gradient_bytes > 0
    assert found.h2d == found.bytes_of(OpKind.FETCH) > 0
    assert found.bytes_of(OpKind.WRITE_BACK) == 0


@setups()
@pytest.mark.one_in(3)
def test_h3t_moves_gradients_what_it_fetches_and_hidden_states(setup: Setup) -> None:
    """The host holds a master shard, so nothing else is written; a hidden state crosses once a direction and micro-batch."""
    found = steady(setup, "h3t", budget_of(setup, "tight"))
    traces = found.engine.planner.plans.values()
    (sizes,) = [dict(trace.input_bytes) for trace, plan in traces if plan is found.plan]
    hidden = sum(sizes.get(unit, 0) for unit in found.plan.offload_inputs or ()) * setup.accumulate
    assert found.run.per_step[-1].get("activation_offload_bytes", 0) == 2 * hidden
    assert found.d2h == found.gradient_bytes + hidden > 0
    assert found.h2d == found.bytes_of(OpKind.FETCH) + hidden > 0
    assert found.bytes_of(OpKind.WRITE_BACK) == 0


@pytest.mark.parametrize(("setup", "share"), [*zip(SETUPS, (0.3, 0.2, 0.15, 0.35), strict=True)], ids=name_of)
@pytest.mark.one_in(2)
def test_without_one_evictions_are_written_back(setup: Setup, share: float) -> None:
    """share: of resident's peak, so little that parameters have to go during forward."""
    found = steady(setup, "elixir write-back", int(share * (reference(setup).memory.device_peak_bytes or 0)))
    written = found.bytes_of(OpKind.WRITE_BACK)
    assert found.d2h == found.gradient_bytes + written
    assert written > 0
    assert found.h2d == found.bytes_of(OpKind.FETCH)
    assert found.bytes_of(OpKind.DROP) == 0


@setups()
def test_without_a_plan_traffic_is_what_was_fetched_and_the_gradients(setup: Setup) -> None:
    chosen, options = SYSTEMS["random"]
    run = setup.run(chosen, budget_of(setup, "above"), options)
    assert isinstance(run.engine, ManagedEngine)
    layout = run.engine.layout
    trainable = sum(layout.bundle_bytes(b.index) for b in layout.bundles if b.trainable)
    for step in run.per_step[1:]:
        assert step["d2h_bytes"] == trainable * setup.accumulate
        assert step["h2d_bytes"] == trainable, "each bundle once: what the host updated has to come back"


def test_compute_does_not_wait_for_the_gradient_that_has_just_left() -> None:
    """What a layer's gradient takes over was sent off two layers before or earlier, although the pool is full."""
    layers, chosen = 8, elixir()
    sizes = {"num_layers": layers, "hidden_size": 64, "ffn_size": 256, "vocab_size": 256, "max_positions": 64}
    shape = models_registry.resolve("opt-tiny", sizes)
    asked = settings(
        dtype="bf16",
        device_memory=1 << 20,
        recompute="full",
        log_events=True,
        initial_weights=models_registry.initial_weights(shape, 1),
    )
    engine = chosen.initialize(models_registry.build(shape), asked, chosen.Options(nonfinite="stop"))
    assert isinstance(engine, ManagedEngine)
    ids, already = torch.randint(0, 256, (2, 64), generator=torch.Generator().manual_seed(0)), 0
    for _ in range(3):
        already = len(engine.log.operations)
        engine.backward(token_loss(engine, {"input_ids": ids, "labels": ids}, ids.numel(), objective="causal"))
        engine.step()
    engine.drain()
    engine.close()
    operations = engine.log.operations
    named = {o.ticket: o.what for o in operations if isinstance(o.what, LaneOperation)}
    sent = {ticket: what.bundle for ticket, what in named.items() if what.kind is Work.OFFLOAD}
    begun = [o for o in operations[already:] if o.label.startswith("gradient of bundle") and o.label.endswith("begins")]
    bundles = len(engine.layout.bundles)
    assert len(begun) == bundles, "void: gradients stay on the device"

    apart = [sent[ticket] - int(o.label.split()[3]) for o in begun for ticket in o.waits if ticket in sent]
    assert min(apart, default=bundles) >= 2 * bundles // layers
