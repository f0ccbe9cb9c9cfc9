"""Buffers of a model keep their types, values, sharing and persistence while it is built and counted (case C22)."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from models import flops, registry


class Net(nn.Module):
    """A table that must stay fp32 and out of files, a counter, a mask, and one buffer under two names."""

    inv_freq: torch.Tensor
    seen: torch.Tensor
    mask: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.embed = nn.Embedding(300, 8)
        self.head = nn.Linear(8, 300)
        self.register_buffer("inv_freq", 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8), persistent=False)
        self.register_buffer("seen", torch.tensor(7))
        self.register_buffer("mask", torch.tensor([True, False] * 4))
        self.register_buffer("alias", self.mask)

    def forward(self, input_ids: torch.Tensor) -> torch.Tensor:
        places = torch.arange(input_ids.shape[1], device=input_ids.device).outer(self.inv_freq)
        self.seen += 1
        return self.head(self.embed(input_ids).masked_fill(self.mask, 0.0) + torch.cat([places, places], dim=-1))


def test_counting_leaves_buffers_as_they_are() -> None:
    net = Net()
    before = {name: (buffer.data_ptr(), buffer.clone()) for name, buffer in net.named_buffers(remove_duplicate=False)}
    assert flops.count(net, batch_size=2, seq_len=4096).forward.other == 2 * 2 * 4096 * 8 * 300
    for name, buffer in net.named_buffers(remove_duplicate=False):
        assert buffer.data_ptr() == before[name][0] and torch.equal(buffer, before[name][1]), name
    assert net.alias is net.mask and net.seen.dtype == torch.int64 and net.mask.dtype == torch.bool
    assert "inv_freq" not in net.state_dict()


def test_a_rotary_table_is_there_and_fp32_for_one_layer_of_4096_tokens(tmp_path: Path) -> None:
    from transformers import LlamaConfig

    LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=1, num_attention_heads=4,
        max_position_embeddings=4096,
    ).save_pretrained(tmp_path)  # fmt: skip
    shape = registry.resolve(str(tmp_path))
    shape.check_run(batch_size=1, seq_len=4096)
    tables = {n: b for n, b in registry.build(shape).named_buffers() if n.endswith("inv_freq")}
    assert tables
    for table in tables.values():
        assert table.dtype == torch.float32 and not table.is_meta
        torch.testing.assert_close(table, 1.0 / 10000 ** (torch.arange(0, 8, 2) / 8))


@pytest.mark.parametrize("name", ["bert-tiny", "albert-tiny"])
def test_position_numbers_are_there_and_not_in_files(name: str) -> None:
    model: Any = registry.build(registry.resolve(name))
    buffers = {n.rpartition(".")[2]: b for n, b in model.named_buffers()}
    assert torch.equal(buffers["position_ids"], torch.arange(128).view(1, -1)) and not buffers["token_type_ids"].any()
    assert not [n for n in model.state_dict() if n.endswith("_ids")]
