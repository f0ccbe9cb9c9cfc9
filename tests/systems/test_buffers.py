"""Buffers keep their types, values, names and place while a system trains the model in bf16 (case C22)."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any

import pytest
import torch
from torch import nn

import systems
from systems.recipe.model.wider_buffers import explain_types
from systems.system import Engine
from tests.systems.every import STRATEGIES
from tests.systems.models_small import tokens

WIDTH, HEADS, VOCABULARY, LENGTH = 64, 4, 257, 16
SYSTEMS: Mapping[str, dict[str, Any]] = {
    "resident": {},
    "elixir": {},
    "elixir under half the memory": {"system": "elixir", "device_memory": "430KiB"},
}


class Rotary(nn.Module):
    """Turns pairs of features by an angle that grows with the position: wrong far out if its table is not fp32."""

    inv_freq: torch.Tensor
    calls: torch.Tensor
    mask: torch.Tensor

    def __init__(self, length: int) -> None:
        super().__init__()
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, WIDTH, 2) / WIDTH), persistent=False)
        self.register_buffer("calls", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mask", torch.ones(length, length, dtype=torch.bool).tril())

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls += 1
        angle = torch.arange(x.shape[1], device=x.device).float().outer(self.inv_freq)
        one, other = x.float().chunk(2, dim=-1)
        turned = torch.cat([one * angle.cos() - other * angle.sin(), one * angle.sin() + other * angle.cos()], dim=-1)
        return turned.to(x.dtype)


class Block(nn.Module):
    def __init__(self, rotary: Rotary) -> None:
        super().__init__()
        self.norm = nn.LayerNorm(WIDTH)
        self.mix = nn.Linear(WIDTH, 3 * WIDTH)
        self.out = nn.Linear(WIDTH, WIDTH)
        self.rotary = rotary

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        query, key, value = self.mix(self.norm(x)).chunk(3, dim=-1)
        q, k, v = (t.unflatten(-1, (HEADS, -1)).transpose(1, 2) for t in (self.rotary(query), self.rotary(key), value))
        length = x.shape[1]
        mixed = nn.functional.scaled_dot_product_attention(q, k, v, attn_mask=self.rotary.mask[:length, :length])
        return x + self.out(mixed.transpose(1, 2).flatten(2))


class Model(nn.Module):
    """Two blocks that share one rotary module, a tied head, and a buffer under a second name."""

    alias: torch.Tensor

    def __init__(self, layers: int = 2, length: int = LENGTH) -> None:
        super().__init__()
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.rotary = Rotary(length)
        self.blocks = nn.ModuleList([Block(self.rotary) for _ in range(layers)])
        self.head = nn.Linear(WIDTH, VOCABULARY, bias=False)
        self.head.weight = self.embed.weight
        self.register_buffer("alias", self.rotary.mask)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids)
        for block in self.blocks:
            x = block(x)
        return self.head(x)


def build(**shape: int) -> Model:
    torch.manual_seed(0)
    return Model(**shape)


def loss(call: Callable[..., torch.Tensor], ids: torch.Tensor) -> torch.Tensor:
    logits = call(ids)[:, :-1].float().flatten(0, 1)
    return nn.functional.cross_entropy(logits, ids[:, 1:].flatten(), reduction="mean")


def start(case: str, model: nn.Module, **more: Any) -> Engine:
    given: dict[str, Any] = {"system": case, "device_memory": "1GiB", "host_memory": "1GiB", "device": "cpu", "dtype": "bf16"}
    return systems.initialize(model, **(given | dict(SYSTEMS[case]) | more))


def train(case: str, steps: int = 5) -> tuple[list[float], dict[str, torch.Tensor], Model, int]:
    """Losses, masters, the model after training and the bytes that moved to the device in the last two steps."""
    model, losses = build(), []
    with start(case, model) as engine:
        for step, ids in enumerate(tokens(steps, 1)[:, 0]):
            if step == steps - 2:
                engine.drain()
                before = engine.counters()["h2d_bytes"]
            value = loss(engine, ids)
            engine.backward(value)
            engine.step()
            losses.append(value.item())
        engine.drain()
        with engine.summon() as values:
            parameters = {name: value.clone() for name, value in values.items()}
        moved = engine.counters()["h2d_bytes"] - before
    return losses, parameters, model, moved


@pytest.mark.parametrize("case", SYSTEMS)
def test_buffers_are_as_they_were_and_training_equals_resident(case: str) -> None:
    losses, parameters, model, moved = train(case)
    before = build()
    rotary = model.rotary
    assert (rotary.inv_freq.dtype, rotary.calls.dtype, rotary.mask.dtype) == (torch.float32, torch.int64, torch.bool)
    assert torch.equal(rotary.inv_freq, before.rotary.inv_freq)
    assert torch.equal(rotary.mask, before.rotary.mask)
    assert int(rotary.calls) == 5 * 2 * 2  # steps, blocks, query and key
    assert model.alias is rotary.mask
    assert all(block.rotary is rotary for block in model.blocks)
    assert set(rotary.state_dict()) == {"calls", "mask"}

    expected, oracle, _, _ = train("resident")
    assert losses == expected
    assert all(torch.equal(parameters[name], oracle[name]) for name in oracle)
    assert (moved > 0) == ("half" in case)


@pytest.mark.parametrize("case", ["resident", "elixir"])
def test_a_table_is_right_at_the_last_of_4096_positions(case: str) -> None:
    """In bf16 the angle of position 4095 would be off by several turns."""
    ids = torch.randint(0, VOCABULARY, (1, 4096), generator=torch.Generator().manual_seed(1))
    with torch.no_grad():
        plain = build(layers=1, length=4096)
        for parameter in plain.parameters():
            parameter.data = parameter.data.to(torch.bfloat16)
        expected = plain(ids)[0, -1]
        with start(case, build(layers=1, length=4096)) as engine:
            assert torch.equal(engine(ids)[0, -1], expected)


class Placed(nn.Module):
    """Adds a table of positions to its embeddings, as transformers' XGLM and M2M100 do."""

    table: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.embed = nn.Embedding(VOCABULARY, WIDTH)
        self.register_buffer("table", torch.randn(LENGTH, WIDTH), persistent=False)
        self.blocks = nn.ModuleList(nn.Sequential(nn.LayerNorm(WIDTH), nn.Linear(WIDTH, WIDTH)) for _ in range(2))
        self.head = nn.Linear(WIDTH, VOCABULARY)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        x = self.embed(input_ids) + self.table
        for block in self.blocks:
            x = x + block(x)
        return self.head(x)


@pytest.mark.parametrize("system", ["resident", *STRATEGIES])
def test_a_table_that_is_added_is_named_and_a_converted_model_trains(system: str) -> None:
    """torch says that types differ, and not whose they are."""
    given: dict[str, Any] = {"system": system, "device": "cpu", "device_memory": "2MiB", "dtype": "bf16"}
    ids = tokens(3, 1)[:, 0]
    with systems.initialize(Placed(), **given) as engine, pytest.raises(RuntimeError) as differs:
        loss(engine, ids[0])
    [note] = differs.value.__notes__
    assert "table (float32)" in note and "model.to(torch.bfloat16)" in note and "\n" not in note

    def losses(name: str) -> list[float]:
        found = []
        with systems.initialize(Placed().to(torch.bfloat16), **{**given, "system": name}) as engine:
            assert engine.module.table.dtype is torch.bfloat16
            for batch in ids:
                value = loss(engine, batch)
                engine.backward(value)
                engine.step()
                found.append(value.item())
        return found

    assert losses(system) == losses("resident")


def test_other_errors_have_no_note() -> None:
    plain = nn.Sequential(nn.Linear(4, 4))
    for model, error in (
        (Placed(), RuntimeError("shapes cannot be multiplied")),
        (Placed(), ValueError("a dtype")),
        (plain, RuntimeError("mixed dtype")),
        (Placed().to(torch.bfloat16), RuntimeError("mixed dtype")),
    ):
        explain_types(error, model, torch.bfloat16)
        assert not hasattr(error, "__notes__")
