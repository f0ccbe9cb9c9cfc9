"""Other optimizers than Adam: no strategy changes a bit, they are what they are called, and take the memory that they say."""

from __future__ import annotations

import copy
import re
from collections.abc import Iterable, Mapping
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import systems
from systems import checkpoint
from systems.checkpoint import CheckpointError
from systems.errors import UnsupportedError
from systems.optimizers.lion import Lion, LionSettings
from systems.optimizers.sgd import SgdSettings
from systems.planning.disk_layout import disk_bytes
from systems.planning.layout import PAGE
from systems.planning.step.timeline import timeline
from systems.planning.strategy import PlanningContext
from systems.ranks.loopback import as_threads
from systems.settings import AdamSettings, Hyperparameters
from tests.systems.every import STRATEGIES
from tests.systems.models_plain import CASES, build
from tests.systems.models_small import build as small
from tests.systems.models_small import tokens
from tests.systems.running import (
    RESIDENT,
    Run,
    adam_states,
    assert_equal,
    host_need,
    managed,
    one_step,
    parameters_of,
    settings,
    start,
    train,
    waiting,
)
from tests.systems.setups import SYSTEMS, Setup, budget_of, in_turn
from tests.systems.test_ahead import counted, ran_ahead
from tests.systems.test_ahead import trained as trained_ahead
from tests.systems.test_ordering import sleeps
from tests.systems.test_ranks import assert_is_one_rank, loss_of, make, on_ranks

LOSS = CASES["stack"].loss
OWN: Mapping[str, Hyperparameters] = {
    "sgd": SgdSettings(lr=0.05, weight_decay=0.01),
    "momentum": SgdSettings(lr=0.05, momentum=0.9),
    "nesterov": SgdSettings(lr=0.05, momentum=0.9, nesterov=True, weight_decay=0.01),
    "dampening": SgdSettings(lr=0.05, momentum=0.9, dampening=0.3),
    "lion": LionSettings(lr=1e-3, weight_decay=0.1),
}
KEPT = {"sgd": 0, "momentum": 4, "nesterov": 4, "dampening": 4, "lion": 4}  # bytes of state a parameter
ON_DISK = [name for name in STRATEGIES if name != "h3t"]  # of which a whole layer takes more of the host than there is here
SETUPS = [
    Setup("opt"),
    Setup("gpt2", "full", accumulate=2, clip=0.5),
    Setup("opt", sharing="half-frozen", dtype="bf16", clip=0.5),
]


def torch_one(hyper: Hyperparameters, parameters: Iterable[Any]) -> torch.optim.Optimizer:
    kind: Any = Lion if isinstance(hyper, LionSettings) else torch.optim.SGD
    made: torch.optim.Optimizer = kind(parameters, **vars(hyper))
    return made


def in_two_groups(hyper: Hyperparameters, model: nn.Module) -> torch.optim.Optimizer:
    """The second half of the parameters at twice the rate."""
    every = list(model.parameters())
    half = len(every) // 2
    return torch_one(hyper, [{"params": every[:half]}, {"params": every[half:], "lr": 2 * hyper.lr}])


@cache
def expected_of(name: str, setup: Setup) -> Run:
    return setup.run(RESIDENT, optimizer=OWN[name])


# ---- no bit changes


@pytest.mark.parametrize(
    ("system", "name", "setup"),
    in_turn(SYSTEMS, [(name, setup) for setup in SETUPS for name in OWN], each=3),
    ids=str,
)
@pytest.mark.one_in(7)
def test_every_strategy_has_the_bits_of_resident(system: str, name: str, setup: Setup) -> None:
    chosen, options = SYSTEMS[system]
    run = setup.run(chosen, budget_of(setup, "half"), options, optimizer=OWN[name])
    assert_equal(expected_of(name, setup), run)
    assert run.per_step[-1]["h2d_bytes"] > 0
    assert any(bool(state.exp_avg.any()) for state in run.adam.values()) is bool(KEPT[name])


def test_optimizers_differ() -> None:
    """Or the tests above compare nothing."""
    runs = [expected_of(name, SETUPS[1]) for name in OWN]
    assert len({tuple(run.losses) for run in runs}) == len(runs)


@pytest.mark.parametrize(("system", "name"), in_turn(STRATEGIES, [(name,) for name in OWN], each=2))
@pytest.mark.one_in(3)
def test_updates_run_ahead_of_the_norm(system: str, name: str) -> None:
    given: dict[str, Any] = {"clip": 1e6, "optimizer": OWN[name], "accumulate": 2 if name == "nesterov" else 1}
    run = trained_ahead(STRATEGIES[system], jitter=sleeps(1, 2e-4), **given)
    assert_equal(trained_ahead(RESIDENT, **given), run)
    engine: Any = run.engine
    assert set(ran_ahead(engine)) == engine.cursor.plan.ahead != frozenset(), "void: nothing ran ahead"
    assert counted(run) == (0, 0)
    assert run.memory.host_second_version_bytes


@pytest.mark.parametrize("name", OWN)
@pytest.mark.one_in(2)
def test_what_ran_ahead_in_vain_is_dropped(name: str) -> None:
    """The norm is above the limit in every step, and the update is taken again with the right factor."""
    given: dict[str, Any] = {"clip": 1e-3, "optimizer": OWN[name]}
    assert_equal(trained_ahead(RESIDENT, **given), trained_ahead(STRATEGIES["elixir"], **given))


@pytest.mark.parametrize(("system", "name"), in_turn(ON_DISK, [(name,) for name in OWN], each=2))
@pytest.mark.one_in(6)
def test_states_on_a_disk(system: str, name: str, tmp_path: Path) -> None:
    setup = SETUPS[1]
    chosen, options = STRATEGIES[system], waiting(STRATEGIES[system].Options())
    given: dict[str, Any] = {"device_memory": budget_of(setup, "half"), "recompute": "full", "clip": 0.5, "accumulate": 2}
    given |= {"optimizer": OWN[name], "dtype": setup.dtype}
    need = host_need(chosen, setup.build(), options, **given)
    engine = start(chosen, setup.build(), settings(**given, host_memory=int(0.85 * need), disk=tmp_path), options)
    layout = managed(engine).layout
    assert layout.on_disk, "void: the host held everything"
    run = train(engine, tokens(3, 2))
    assert_equal(expected_of(name, setup), run)
    away = sum(layout.shard_numel(bundle) for bundle in layout.on_disk)
    assert run.memory.disk_peak_bytes == disk_bytes(layout) >= (4 + KEPT[name]) * away
    assert 0 < run.per_step[-1]["disk_read_bytes"] <= (4 + KEPT[name]) * away


@cache
def on_one_rank(name: str) -> Run:
    engine = start(RESIDENT, make("opt"), settings(accumulate=2, clip=0.5, optimizer=OWN[name]))
    return train(engine, tokens(3, 2), loss_of("opt"))


@cache
def residents_on_two_ranks(name: str) -> Run:
    """Of several micro-batches, each is summed over ranks first, which no run of one rank does."""
    return on_ranks(RESIDENT, "opt", 2, 2, clip=0.5, optimizer=OWN[name])[0]


@pytest.mark.parametrize(("system", "name"), in_turn(["resident", *STRATEGIES], [(name,) for name in OWN], each=2))
@pytest.mark.one_in(9)
def test_two_ranks_have_the_bits_of_one(system: str, name: str) -> None:
    accumulate = 2 if name in ("momentum", "lion") and system != "resident" else 1
    expected = copy.copy(on_one_rank(name) if accumulate == 1 else residents_on_two_ranks(name))
    chosen = RESIDENT if system == "resident" else STRATEGIES[system]
    peak = expected.memory.device_peak_bytes or 0
    given: dict[str, Any] = {} if system == "resident" else {"device_memory": int(0.7 * peak)}
    assert_is_one_rank(expected, on_ranks(chosen, "opt", 2, accumulate, clip=0.5, optimizer=OWN[name], **given))


@pytest.mark.parametrize("system", [RESIDENT, STRATEGIES["elixir"]], ids=lambda system: system.name)
def test_ranks_with_other_optimizers_are_told_so(system: Any) -> None:
    for differs in (OWN["lion"], OWN["momentum"]):
        def work(ranks: Any, other: Hyperparameters = differs) -> None:
            asked = settings(ranks=2, optimizer=other if ranks.rank else OWN["sgd"])
            system.initialize(small("opt"), asked, system.Options(), ranks=ranks)

        with pytest.raises(UnsupportedError, match=r"optimizer is .*Sgd.* on rank 0 and .* on rank 1"):
            as_threads(2, work)


# ---- from and to a torch optimizer


def begin(system: str, model: nn.Module, optimizer: Any, **given: Any) -> Any:
    chosen, options = {"resident": (RESIDENT, None), **SYSTEMS}[system]
    budget = {} if system == "resident" else {"device_memory": 260_000}
    return start(chosen, model, settings(optimizer=optimizer, **budget | given), options)


def steps_of(model: nn.Module, optimizer: torch.optim.Optimizer, ids: torch.Tensor) -> list[float]:
    """In plain PyTorch."""
    losses = []
    for batch in ids:
        loss = LOSS(model, batch[0], batch[:, :, 1:].numel())
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


class PlainLion(torch.optim.Optimizer):
    """Algorithm 2 of the paper, line by line, in double precision but for what is kept.

    unsure: where rounding decides the sign.
    """

    def __init__(self, params: Iterable[Any], **given: Any) -> None:
        super().__init__(params, given)
        self.unsure = dict[torch.Tensor, torch.Tensor]()

    @torch.no_grad()
    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            beta1, beta2 = group["betas"]
            for p in group["params"]:
                m = self.state[p].setdefault("m", torch.zeros_like(p)).double()
                theta, g = p.double(), p.grad.double()
                c = beta1 * m + (1 - beta1) * g
                self.unsure[p] = c.abs() < 1e-6 * (beta1 * m.abs() + (1 - beta1) * g.abs())
                theta = theta - group["lr"] * (torch.sign(c) + group["weight_decay"] * theta)
                self.state[p]["m"] = (beta2 * m + (1 - beta2) * g).float()
                p.copy_(theta)


@pytest.mark.parametrize("name", [name for name in OWN if name != "lion"])
@pytest.mark.one_in(2)
def test_resident_is_torch_s_own_to_1e_6(name: str) -> None:
    """20 steps, two groups, a rate that falls."""
    plain, ours, ids = build("stack"), build("stack"), tokens(20, 1)
    reference, optimizer = (in_two_groups(OWN[name], model) for model in (plain, ours))
    pair = [torch.optim.lr_scheduler.LinearLR(each, 1.0, 0.1, total_iters=20) for each in (reference, optimizer)]
    losses: list[list[float]] = [[], []]
    with begin("resident", ours, optimizer) as engine:
        for batch in ids:
            losses[0] += steps_of(plain, reference, batch[None])
            losses[1].append(one_step(engine, batch, LOSS))
            for schedule in pair:
                schedule.step()
    assert losses[0] == pytest.approx(losses[1], abs=1e-6)
    for one, other in zip(plain.parameters(), ours.parameters(), strict=True):
        assert torch.allclose(one, other, rtol=0, atol=1e-6)


def test_resident_s_lion_is_the_paper_s_to_1e_6() -> None:
    """20 steps as above, each from the same values: a sign that rounding decides would part the two for good."""
    plain, ours, ids = build("stack"), build("stack"), tokens(20, 1)
    groups, optimizer = (in_two_groups(OWN["lion"], model) for model in (plain, ours))
    reference = PlainLion(groups.param_groups)
    pair = [torch.optim.lr_scheduler.LinearLR(each, 1.0, 0.1, total_iters=20) for each in (reference, optimizer)]
    with begin("resident", ours, optimizer) as engine:
        for batch in ids:
            before = [value.detach().clone() for value in plain.parameters()]
            assert steps_of(plain, reference, batch[None]) == pytest.approx([one_step(engine, batch, LOSS)], abs=1e-6)
            for value, first in zip(plain.parameters(), before, strict=True):
                assert not torch.equal(value, first)
            with engine.summon() as values, torch.no_grad():
                for name, value in plain.named_parameters():
                    unsure = reference.unsure[value]
                    assert unsure.sum() <= 1 and torch.allclose(value[~unsure], values[name][~unsure], rtol=0, atol=1e-6)
                    value.copy_(values[name])
            for schedule in pair:
                schedule.step()
    assert not torch.allclose(next(plain.parameters()), next(build("stack").parameters()), rtol=0, atol=1e-3)


def test_our_lion_steps_by_itself_with_the_engine_s_bits() -> None:
    plain, ours = build("stack"), build("stack")
    steps_of(plain, Lion(plain.parameters(), **vars(OWN["lion"])), tokens(4, 1))
    with begin("resident", ours, OWN["lion"]) as engine:
        for batch in tokens(4, 1):
            one_step(engine, batch, LOSS)
    assert all(torch.equal(one, other) for one, other in zip(plain.parameters(), ours.parameters(), strict=True))


@pytest.mark.parametrize(("system", "name"), in_turn(["resident", *SYSTEMS], [(name,) for name in OWN], each=2))
@pytest.mark.one_in(3)
def test_from_torch_to_an_engine_and_back(system: str, name: str) -> None:
    """Two steps in plain PyTorch and two in an engine are as four in PyTorch, by the way of the optimizer's own state_dict."""
    hyper = OWN[name]
    model, whole = build("stack"), build("stack")
    before, of_whole = torch_one(hyper, model.parameters()), torch_one(hyper, whole.parameters())
    steps_of(model, before, tokens(4, 1)[:2])
    steps_of(whole, of_whole, tokens(4, 1))
    optimizer = torch_one(hyper, model.parameters())
    with begin(system, model, optimizer) as engine:
        optimizer.load_state_dict(copy.deepcopy(before.state_dict()))
        for batch in tokens(4, 1)[2:]:
            one_step(engine, batch, LOSS)
        found = optimizer.state_dict()
        assert not optimizer.state, "no second copy is kept"
    wanted = of_whole.state_dict()
    assert found["state"].keys() == {n for n, each in wanted["state"].items() if any(v is not None for v in each.values())}
    for number, mine in found["state"].items():
        assert list(mine) == list(wanted["state"][number]) and len(mine) == KEPT[name] // 4
        for part, value in mine.items():
            assert torch.allclose(value, wanted["state"][number][part], rtol=0, atol=1e-6)
    assert all(torch.allclose(p, q, atol=1e-6) for p, q in zip(model.parameters(), whole.parameters(), strict=True))


@pytest.mark.parametrize(
    ("entry", "says"),
    [
        ({"momentum_buffer": torch.zeros(3)}, "has momentum_buffer of shape (3,)"),
        ({"exp_avg": torch.zeros(48)}, "has exp_avg: torch's SGD keeps momentum_buffer"),
        ({"momentum_buffer": torch.full((48,), torch.nan)}, "has a momentum_buffer that is not finite"),
    ],
)
def test_a_state_of_another_optimizer_is_refused(entry: dict[str, torch.Tensor], says: str) -> None:
    model = build("stack")
    vector = next(n for n, p in enumerate(model.parameters()) if p.shape == (48,))
    optimizer = torch_one(OWN["momentum"], model.parameters())
    with begin("elixir", model, optimizer) as engine:
        with pytest.raises(UnsupportedError, match=re.escape(says)):
            optimizer.load_state_dict({**optimizer.state_dict(), "state": {vector: entry}})
        one_step(engine, tokens(1, 1)[0], LOSS)


# ---- checkpoints


@cache
def unbroken(name: str) -> tuple[list[float], dict[str, torch.Tensor], Any]:
    with begin("resident", build("stack"), OWN[name]) as engine:
        losses = [one_step(engine, batch, LOSS) for batch in tokens(4, 1)]
        return losses, parameters_of(engine), adam_states(engine)


@pytest.mark.parametrize(("system", "name"), in_turn(SYSTEMS, [(name,) for name in OWN], each=2))
@pytest.mark.one_in(8)
def test_a_checkpoint_goes_on_under_another_system(system: str, name: str, tmp_path: Path) -> None:
    for number, (one, other) in enumerate((("resident", system), (system, "resident"))):
        losses = []
        for part, chosen in ((slice(0, 2), one), (slice(2, 4), other)):
            with begin(chosen, build("stack", seed=0 if chosen == one else 1), OWN[name]) as engine:
                if chosen == other:
                    systems.load_checkpoint(engine, tmp_path / str(number))
                losses += [one_step(engine, batch, LOSS) for batch in tokens(4, 1)[part]]
                systems.save_checkpoint(engine, tmp_path / str(number))
                values, states = parameters_of(engine), adam_states(engine)
        expected, weights, moments = unbroken(name)
        assert losses == expected
        assert all(torch.equal(value, values[key]) for key, value in weights.items())
        for key, (first, second, steps) in moments.items():
            theirs = states[key]
            assert torch.equal(first, theirs.exp_avg) and torch.equal(second, theirs.exp_avg_sq) and steps == theirs.steps


REFUSALS = [
    ("lion", "momentum", "has the moments of lion, this engine trains with sgd"),
    ("adamw", "lion", "has the moments of adamw, this engine trains with lion"),
    ("momentum", "adamw", "has the moments of sgd, this engine trains with adamw"),
    ("sgd", "momentum", "lacks momentum_buffer of "),
    ("momentum", "sgd", "has momentum_buffer of [^ ]*, which sgd as it is here does not keep"),
]


@pytest.mark.parametrize(("saved", "trains", "says"), REFUSALS)
def test_a_checkpoint_of_another_optimizer_is_refused(saved: str, trains: str, says: str, tmp_path: Path) -> None:
    hypers: dict[str, Any] = {**OWN, "adamw": AdamSettings()}
    with begin("elixir", build("stack"), hypers[saved]) as engine:
        one_step(engine, tokens(1, 1)[0], LOSS)
        systems.save_checkpoint(engine, tmp_path / "kept")
    with begin("resident", build("stack", seed=1), hypers[trains]) as engine:
        before = parameters_of(engine)
        with pytest.raises(CheckpointError, match=says):
            systems.load_checkpoint(engine, tmp_path / "kept")
        assert all(torch.equal(value, before[name]) for name, value in parameters_of(engine).items())


@pytest.mark.parametrize("name", ["sgd", "lion", "adamw"])
def test_adam_s_manifest_is_as_ever_and_others_name_theirs(name: str, tmp_path: Path) -> None:
    hypers: dict[str, Any] = {**OWN, "adamw": AdamSettings()}
    with begin("resident", build("stack"), hypers[name]) as engine:
        systems.save_checkpoint(engine, tmp_path / "kept")
    text = (tmp_path / "kept" / checkpoint.MANIFEST).read_text()
    assert (f'"optimizer": "{name}"' in text) is (name != "adamw") and ('"optimizer"' in text) is (name != "adamw")


# ---- what is refused


class Sgd2(torch.optim.SGD):
    pass


def mixed(model: nn.Module) -> torch.optim.Optimizer:
    others: Any = list(model.parameters())
    one = others.pop(0)
    return torch.optim.SGD([{"params": [one], "momentum": 0.9}, {"params": others}], lr=0.1)


@pytest.mark.parametrize(
    ("make_optimizer", "says"),
    [
        (lambda m: torch.optim.Adagrad(m.parameters()), r"optimizer torch\.optim\.Adagrad is not supported: give "),
        (lambda m: torch.optim.RMSprop(m.parameters()), "torch.optim.RMSprop is not supported"),
        (lambda m: torch.optim.LBFGS(m.parameters()), "torch.optim.LBFGS is not supported"),
        (lambda m: torch.optim.NAdam(m.parameters()), "torch.optim.NAdam is not supported"),
        (
            lambda m: Sgd2(m.parameters(), lr=0.1),
            r"test_optimizers\.Sgd2 is not supported: give systems\.optimizers\.lion\.Lion, torch\.optim\.Adam, "
            r"torch\.optim\.AdamW or torch\.optim\.SGD, itself and no subclass",
        ),
        (lambda m: torch.optim.SGD(m.parameters(), lr=0.1, maximize=True), r"SGD\(maximize=True\) is not supported"),
        (mixed, "keeps momentum_buffer of a parameter, and .*momentum=0.0.* asks for no state"),
        (lambda m: "sgd", "optimizer is str: give a torch.optim.Optimizer"),
    ],
)
@pytest.mark.parametrize("system", ["resident", "elixir"])
def test_other_optimizers_are_refused_by_name(system: str, make_optimizer: Any, says: str) -> None:
    model = build("stack")
    before = [p.clone() for p in model.parameters()]
    with pytest.raises(UnsupportedError, match=says):
        begin(system, model, make_optimizer(model))
    assert all(torch.equal(p, q) for p, q in zip(model.parameters(), before, strict=True)), "the model is as it was"


@pytest.mark.parametrize("system", ["resident", "elixir"])
def test_momentum_neither_comes_nor_goes_later(system: str) -> None:
    model = build("stack")
    optimizer = torch_one(OWN["sgd"], model.parameters())
    with begin(system, model, optimizer) as engine:
        one_step(engine, tokens(1, 1)[0], LOSS)
        engine.backward(LOSS(engine, tokens(1, 1)[0][0], 30))
        optimizer.param_groups[0]["momentum"] = 0.9
        with pytest.raises(UnsupportedError, match=r"keeps no state of a parameter, and .* asks for momentum_buffer"):
            engine.step()
        optimizer.param_groups[0]["momentum"] = 0.0
        engine.step()


# ---- bytes


@pytest.mark.parametrize(("system", "name"), in_turn(STRATEGIES, [(name,) for name in OWN], each=2))
def test_host_memory_is_what_the_states_take(system: str, name: str) -> None:
    """fp32 weights: 4 bytes a parameter for the slot, 4 for the master weight, then the optimizer's."""
    options = waiting(STRATEGIES[system].Options())
    with start(STRATEGIES[system], build("stack"), settings(optimizer=OWN[name]), options) as engine:
        ours = managed(engine)
        numel = sum(ours.layout.shard_numel(b.index) for b in ours.layout.bundles)
        parts = 2 + KEPT[name] // 4
        assert ours.store.host.live == parts * -(-4 * numel // PAGE) * PAGE


@pytest.mark.parametrize(
    ("system", "disk", "name"),
    in_turn([(n, disk) for n in STRATEGIES for disk in (False, True) if n in ON_DISK or not disk], [(n,) for n in OWN], each=2),
)
@pytest.mark.one_in(10)
def test_a_run_takes_what_its_plan_says(system: str, disk: bool, name: str, tmp_path: Path) -> None:
    """Host, disk, and no more of the device; second versions included."""
    chosen, setup = STRATEGIES[system], SETUPS[0]
    given: dict[str, Any] = {"device_memory": budget_of(setup, "half"), "optimizer": OWN[name], "clip": 1e6}
    if disk:
        options = waiting(chosen.Options())
        given |= {"host_memory": int(0.85 * host_need(chosen, setup.build(), options, **given)), "disk": tmp_path}
    engine = managed(start(chosen, setup.build(), settings(**given)))
    for batch in tokens(5, 1):
        one_step(engine, batch)
    engine.drain()
    plan = engine.cursor.plan
    assert plan is not None and (disk or plan.ahead)
    trace, _ = engine.planner.plans[plan.signature]
    context = PlanningContext(
        device_budget=engine.device.plannable_bytes,
        host_budget=engine.settings.host_memory or 0,
        itemsize=4,
        ranks=1,
        accumulate=1,
        seed=0,
        moments=tuple(engine.layout.moments),
    )
    predicted, memory = timeline(engine.layout, trace, plan, context), engine.memory()
    assert len(context.moments) == KEPT[name] // 4
    assert memory.disk_peak_bytes == max(predicted.disk_bytes) and bool(memory.disk_peak_bytes) is disk
    ends = 2 * len(engine.layout.segments) * (3 + KEPT[name] // 4)  # of what has left for the device, in pages
    assert 0 <= engine.store.host.live - max(predicted.host_bytes) <= PAGE * ends
    assert (memory.device_model_peak_bytes or 0) <= max(predicted.device_pool_peak_bytes)
    engine.close()


@pytest.mark.parametrize("name", OWN)
def test_resident_takes_what_the_states_take(name: str) -> None:
    with begin("resident", build("stack"), OWN[name], dtype="bf16") as engine:
        numel = sum(p.numel() for p in engine.parameters)
        assert engine.device.account.pool == (2 + 4 + KEPT[name]) * numel
