"""A budget in which nothing fits: what is said names who tells the least, and what that is told is enough."""

from __future__ import annotations

from typing import Any

import pytest
import torch
import transformers

import systems
from harness.spec import in_flags
from systems.errors import BudgetError, OutOfMemoryError
from systems.messages import LEAST_OF_A_BATCH

SIZES: dict[str, Any] = {"n_layer": 6, "n_embd": 128, "n_head": 4, "vocab_size": 384, "n_positions": 64, "use_cache": False}
NO_DROPOUT = {"attn_pdrop": 0.0, "resid_pdrop": 0.0, "embd_pdrop": 0.0}  # whose masks are larger on the emulated device
CONFIG = transformers.GPT2Config(**SIZES, **NO_DROPOUT, bos_token_id=None, eos_token_id=None)
BATCH: dict[str, Any] = {"batch_size": 2, "seq_len": 32}
SYSTEMS = ("elixir", "patrickstar", "angel-ptm", "h3t", "resident")


def steps(system: str, device_memory: int | str, count: int = 3) -> None:
    """Of a small GPT-2 in an own loop."""
    torch.manual_seed(0)
    model = transformers.GPT2LMHeadModel(CONFIG).train()
    optimizer = torch.optim.AdamW(model.parameters())
    tokens = torch.arange(64).view(BATCH["batch_size"], BATCH["seq_len"])
    settings: dict[str, Any] = {"system": system, "device": "cpu", "device_memory": device_memory}
    engine = systems.initialize(model, optimizer=optimizer, **settings)
    try:
        for _ in range(count):
            engine.backward(engine(input_ids=tokens, labels=tokens).loss)
            engine.step()
    finally:
        engine.close()


@pytest.mark.parametrize("system", SYSTEMS)
def test_a_refusal_before_any_step_names_who_knows_the_least(system: str) -> None:
    with pytest.raises(BudgetError, match=f"activations come on top.*{LEAST_OF_A_BATCH}") as told:
        steps(system, "300KiB")
    assert "(harness plan tells the least that a batch fits in)" in in_flags(str(told.value))


@pytest.mark.parametrize("system", ["elixir", "patrickstar"])
def test_so_does_the_end_of_a_first_step(system: str) -> None:
    with pytest.raises(OutOfMemoryError, match=LEAST_OF_A_BATCH):
        steps(system, "2MiB", count=1)


@pytest.mark.parametrize("system", ["elixir", "h3t", "resident"])
def test_what_it_tells_is_enough(system: str) -> None:
    found = systems.estimate(CONFIG, system=system, device="cpu", hardware="h100-80g-x1", device_memory="300KiB", **BATCH)
    least = found.rows[0].least_device_bytes
    assert least is not None
    steps(system, least)
