"""What engines of several ranks hand out and take in: the same on all, equal to one rank's, bit for bit."""

from __future__ import annotations

import copy
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from systems import export
from systems.errors import BudgetError, UnsupportedError
from systems.ranks.loopback import as_threads
from systems.ranks.ranks import Ranks
from systems.system import Engine
from tests.systems.every import STRATEGIES
from tests.systems.models_small import build, tokens
from tests.systems.running import AMPLE, adam_states, one_step, parameters_of, settings, start
from tests.systems.test_export import Odd, loss_of
from tests.systems.test_export import odd as odd_of_one_rank
from tests.systems.test_optimizer_states import adam
from tests.systems.test_ranks_saved import SYSTEMS

SIZE, LITTLE = 3, 400_000


def odd() -> Odd:
    """Without running averages, which would be each rank's own."""
    model = odd_of_one_rank()
    model.register_module("norm", nn.Identity())
    return model


MATCHED = "<All keys matched successfully>"


def with_ranks(system: str, work: Callable[[Engine, Any], Any], make: Callable[[], nn.Module] = odd, **given: Any) -> list[Any]:
    """What `work` returns or raises on each rank, called with its engine and its optimizer."""
    models = [make() for _ in range(SIZE)]
    optimizers = [adam(model) for model in models]
    budget = AMPLE if system == "resident" else LITTLE

    def run(ranks: Ranks) -> Any:
        optimizer = optimizers[ranks.rank]
        asked = settings(ranks=SIZE, optimizer=optimizer, host_memory=AMPLE, **{"device_memory": budget, **given})
        engine = SYSTEMS[system].initialize(models[ranks.rank], asked, SYSTEMS[system].Options(), ranks=ranks)
        with engine:
            try:
                return work(engine, optimizer)
            except Exception as error:  # noqa: BLE001 - every rank's is looked at
                return error

    return as_threads(SIZE, run)


def step(engine: Engine, number: int = 0) -> None:
    """The same batch on every rank."""
    one_step(engine, tokens(4, 1)[number] % 50, loss_of)


def same_everywhere(found: list[dict[str, Any]]) -> dict[str, Any]:
    first, *others = found
    for other in others:
        assert list(first) == list(other)
        assert all(torch.equal(value, other[name]) for name, value in first.items() if isinstance(value, torch.Tensor))
    return first


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_state_dict_is_whole_on_every_rank(system: str) -> None:
    def work(engine: Engine, optimizer: Any) -> tuple[dict[str, Any], dict[str, Any], dict[str, torch.Tensor]]:
        step(engine)
        return engine.state_dict(), engine.state_dict(dtype="bf16"), parameters_of(engine)

    found = with_ranks(system, work)
    whole, _ = same_everywhere([each for each, _, _ in found]), same_everywhere([each for _, each, _ in found])
    for name, value in found[0][2].items():
        assert torch.equal(whole[name], value) and torch.equal(found[1][1][name], value.to(torch.bfloat16))
    fresh = odd()
    fresh.counter.spread = torch.zeros(16)
    assert str(fresh.load_state_dict(dict(whole))) == MATCHED
    assert whole["head.weight"].data_ptr() == whole["embedding.weight"].data_ptr()


def edit(engine: Engine, factor: float) -> None:
    with engine.summon(write=True) as values:
        for name, value in values.items():
            if value.is_floating_point():
                value.mul_(factor)
            else:
                values[name] = value + 5


@cache
def edited_on_one_rank() -> dict[str, torch.Tensor]:
    """Parameters after a step, an edit and a step, each rank's micro-batch being the same."""
    model = odd()
    with start(SYSTEMS["resident"], model, settings(accumulate=SIZE, optimizer=adam(model))) as engine:
        for number in range(2):
            one_step(engine, (tokens(4, 1)[number] % 50).expand(SIZE, -1, -1), summed)
            if number == 0:
                edit(engine, 0.5)
        return parameters_of(engine)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.one_in(2)
def test_what_rank_0_edits_is_taken_over_on_all(system: str) -> None:
    """Parameters and buffers; the next step is as if one rank had edited them. What the others edit is dropped."""

    def work(engine: Engine, optimizer: Any) -> tuple[dict[str, torch.Tensor], ...]:
        step(engine)
        before = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
        edit(engine, 0.5 if engine.ranks.rank == 0 else 100.0)
        after = {name: buffer.clone() for name, buffer in engine.module.named_buffers()}
        step(engine, 1)
        return parameters_of(engine), before, after

    found = with_ranks(system, work)
    trained = same_everywhere([each for each, _, _ in found])
    assert all(torch.equal(trained[name], value) for name, value in edited_on_one_rank().items())
    before, after = found[0][1], same_everywhere([each for _, _, each in found])
    assert torch.equal(after["counter.spread"], before["counter.spread"] * 0.5)
    assert int(after["seen"]) == int(before["seen"]) + 5 == 6


def summed(model: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
    """Each of several equal micro-batches with the weight that a rank gives its only one."""
    return loss_of(model, ids, count // SIZE)


@pytest.mark.parametrize("system", ["elixir", "resident"])
def test_an_edit_that_one_rank_cannot_hand_in_is_told_on_all(system: str) -> None:
    def misshapen(engine: Engine) -> None:
        with engine.summon(write=True) as values:
            if engine.ranks.rank == 0:
                values["head.weight"] = torch.zeros(3)

    def broken_off(engine: Engine) -> None:
        with engine.summon(write=True) as values:
            values["head.weight"].zero_()
            if engine.ranks.rank == 1:
                raise ValueError("mine alone")

    def work(engine: Engine, optimizer: Any) -> tuple[str, str, bool]:
        before = parameters_of(engine)
        with pytest.raises(ValueError, match="summon: embedding.weight|summon: head.weight") as one:
            misshapen(engine)
        with pytest.raises(ValueError, match="mine alone") as other:
            broken_off(engine)
        after = parameters_of(engine)
        step(engine)
        return str(one.value), str(other.value), all(torch.equal(value, after[name]) for name, value in before.items())

    found = with_ranks(system, work)
    assert all(unchanged for _, _, unchanged in found)
    assert [one.startswith("rank 0: ") for one, _, _ in found] == [False, True, True]
    assert [other for _, other, _ in found] == ["rank 1: mine alone", "mine alone", "rank 1: mine alone"]


CLOSED = [*((name, 1_500_000) for name in STRATEGIES), *((name, AMPLE) for name in SYSTEMS)]


@pytest.mark.parametrize(("system", "memory"), CLOSED)
@pytest.mark.one_in(8)
def test_values_at_close_are_whole_on_every_rank(system: str, memory: int) -> None:
    """In the engine's dtype, also of what was updated on the device alone."""
    models, kept = list[nn.Module](), list[dict[str, torch.Tensor]]()

    def work(engine: Engine, optimizer: Any) -> None:
        for ids in tokens(3, 1):
            one_step(engine, ids)
        models.append(engine.module)
        kept.append(parameters_of(engine))

    assert with_ranks(system, work, lambda: build("opt"), dtype="bf16", device_memory=memory) == [None] * SIZE
    for model, values in zip(models, kept, strict=True):
        for name, parameter in model.named_parameters():
            assert torch.equal(parameter.detach(), values[name].to(parameter.dtype))


def test_an_edit_past_the_engine_on_one_rank_is_undone_at_close() -> None:
    """Without the others, who saw none."""
    models = list[nn.Module]()

    def work(engine: Any, optimizer: Any) -> dict[str, torch.Tensor]:
        step(engine)
        engine.drain()
        models.append(engine.module)
        values = parameters_of(engine)
        if engine.ranks.rank == 1:
            with torch.no_grad():
                engine.module.blocks[0].weight.mul_(2)
            with pytest.raises(UnsupportedError, match="was edited in place"):
                engine.close()
        return values

    for system in ("elixir", "patrickstar"):
        models.clear()
        for model, values in zip(models, with_ranks(system, work), strict=False):
            assert all(torch.equal(each.detach(), values[name]) for name, each in model.named_parameters())


def test_close_without_values_and_after_an_error_waits_for_nobody() -> None:
    def work(engine: Engine, optimizer: Any) -> None:
        step(engine)
        engine.close(keep=False)

    assert with_ranks("elixir", work) == [None] * SIZE


def test_no_room_on_one_rank_is_told_on_all(monkeypatch: pytest.MonkeyPatch) -> None:
    """Of a host whose memory all three share."""

    def work(engine: Engine, optimizer: Any) -> None:
        engine.state_dict()

    monkeypatch.setattr(export, "free_host_memory", lambda: 10)
    for error in with_ranks("elixir", work):
        assert isinstance(error, BudgetError) and error.tier == "host" and "10B are free" in str(error)
        assert error.need > SIZE * 4 * sum(p.numel() for p in odd().parameters())


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.one_in(3)
def test_rank_0_alone_writes_what_transformers_reads(system: str, tmp_path: Path) -> None:
    def work(engine: Engine, optimizer: Any) -> dict[str, torch.Tensor]:
        one_step(engine, tokens(4, 1)[0])
        if engine.ranks.rank == 0:
            writing.append(engine.module)
        engine.save_pretrained(tmp_path / "here", dtype="bf16")
        return parameters_of(engine)

    writing = list[Any]()
    values = same_everywhere(with_ranks(system, work, lambda: build("gpt2"), device_memory=AMPLE))
    read = transformers.AutoModelForCausalLM.from_pretrained(tmp_path / "here", dtype="bfloat16").state_dict()
    assert all(torch.equal(read[name], value.to(torch.bfloat16)) for name, value in values.items())
    assert sorted(path.name for path in tmp_path.iterdir()) == ["here"]


def test_what_rank_0_cannot_write_is_told_on_all(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")

    def work(engine: Engine, optimizer: Any) -> None:
        engine.save_pretrained(tmp_path / "file")

    for error in with_ranks("elixir", work, lambda: build("gpt2"), device_memory=AMPLE):
        assert isinstance(error, ValueError) and "file is a file: name a folder" in str(error)


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.one_in(2)
def test_an_optimizer_s_state_is_whole_on_every_rank_and_goes_back(system: str) -> None:
    def work(engine: Engine, optimizer: Any) -> tuple[Any, Any, Any]:
        step(engine)
        saved = optimizer.state_dict()
        before = adam_states(engine)
        step(engine, 1)
        optimizer.load_state_dict(saved)
        return saved, before, adam_states(engine)

    (first, _, _), *_ = found = with_ranks(system, work)
    for saved, before, after in found:
        assert saved["param_groups"] == first["param_groups"] and saved["state"].keys() == first["state"].keys()
        for number, entry in first["state"].items():
            assert all(torch.equal(each, saved["state"][number][key]) for key, each in entry.items())
        assert before.keys() == after.keys()
        for name, (one, other, steps) in before.items():
            assert torch.equal(one, after[name].exp_avg) and torch.equal(other, after[name].exp_avg_sq)
            assert steps == after[name].steps == 1


@pytest.mark.parametrize(
    ("spoil", "told"),
    [
        (lambda saved: saved["state"][0]["exp_avg"].fill_(torch.nan), "has a exp_avg that is not finite"),
        (lambda saved: saved["state"][0]["exp_avg"].fill_(1.0), "is not the same on ranks 0 and 1"),
        (lambda saved: saved["param_groups"][0]["params"].pop(), "has groups of"),
    ],
)
def test_an_optimizer_s_state_that_one_rank_refuses_is_nobody_s(spoil: Callable[[Any], Any], told: str) -> None:
    def work(engine: Engine, optimizer: Any) -> tuple[str, bool]:
        step(engine)
        saved, before = copy.deepcopy(optimizer.state_dict()), adam_states(engine)
        if engine.ranks.rank == 1:
            spoil(saved)
        with pytest.raises(ValueError, match="optimizer.load_state_dict") as refused:
            optimizer.load_state_dict(saved)
        after = adam_states(engine)
        return str(refused.value), all(torch.equal(each.exp_avg, after[name].exp_avg) for name, each in before.items())

    found = with_ranks("elixir", work)
    assert all(unchanged for _, unchanged in found)
    assert told in found[0][0] and told in found[1][0]
    assert found[0][0].startswith("rank 1: ") or "ranks 0 and 1" in told
