"""What packages hold by their memory rules, beside recorded runs of them, and in `harness plan --system all`."""

from __future__ import annotations

import json
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import systems
from harness import cli
from systems.errors import UnsupportedError
from systems.planning.allowance import CUDA
from systems.prediction.estimate import own_loss
from systems.prediction.forecast import Observations
from systems.prediction.memory_rules import RULE, RULES, RuledNeed, ruled_needs
from tests.prediction.test_forecast import observations, question

ROOT = Path(__file__).resolve().parents[2]
HOST = (1.0, 1.2)  # of a recorded peak to the rule: what the process holds beside model states
DEVICE = (0.95, 1.2)  # the same; our loss is observed, whose buffers another kernel may need less of


@cache
def records() -> tuple[dict[str, Any], ...]:
    """Of packages that have a rule."""
    found = [json.loads(path.read_text()) for path in sorted((ROOT / "results").glob("*-offload-*.json"))]
    return tuple(record for record in found if record["spec"]["system"] in RULES)


def ruled(record: dict[str, Any]) -> RuledNeed:
    spec, resolved, memory = record["spec"], record["resolved"], record["memory"]
    about = question(
        "h200-141g-x1",
        device_memory=memory["device_budget_bytes"] or 1 << 37,
        host_memory=memory["host_budget_bytes"],
        batch_size=resolved["batch_size"],
        seq_len=resolved["seq_len"],
        recompute=spec["recompute"],
        dtype=spec["dtype"],
        allowance=CUDA,
    )
    assert spec["set"] == [] and spec["ranks"] == 1 and spec["accumulate"] == 1
    return {one.system: one for one in ruled_needs(about, observations(spec["model"]))}[spec["system"]]


@pytest.mark.parametrize("record", records(), ids=lambda record: record["run_id"])
def test_a_rule_is_near_what_was_recorded(record: dict[str, Any]) -> None:
    """A run that was refused said what is said here."""
    found = ruled(record)
    if record["status"] == "refused":
        assert not found.fits and found.host.need_bytes == record["reason"]["need"] > found.host.have_bytes
        return
    assert record["status"] == "ok" and found.fits
    memory = record["memory"]
    low, high = HOST
    assert low <= memory["host_peak_bytes"] / found.host.need_bytes <= high
    low, high = DEVICE
    assert low <= memory["device_allocated_peak_bytes"] / found.device.need_bytes <= high


def test_there_are_records_of_each_rule() -> None:
    assert {record["spec"]["system"] for record in records()} == set(RULES)
    assert "refused" in {record["status"] for record in records()}


@pytest.mark.parametrize("ranks", [1, 2, 4])
def test_ranks_share_states_and_what_does_not_fit_says_so(ranks: int) -> None:
    about = question("h100-80g-x4", ranks=ranks, device_memory=1 << 34, allowance=CUDA)
    for one in ruled_needs(about, observations("opt-tiny")):
        assert one.fits and one.device.need_bytes == sum(one.device.parts.values())
        alone = RULES[one.system](observations("opt-tiny").of(about)[0], question(allowance=CUDA), False)[0]
        assert 0.9 * alone <= one.host.need_bytes <= 3 * alone  # in all; pinned buffers of powers of two, and of each its own
    small = question("h100-80g-x4", ranks=ranks, device_memory=1 << 20, host_memory=1 << 20, allowance=CUDA)
    assert [one.fits for one in ruled_needs(small, observations("opt-tiny"))] == [False] * len(RULES)


def test_no_rule_speaks_of_the_emulated_device_or_of_another_optimizer_than_adam() -> None:
    assert ruled_needs(question(), observations("opt-tiny")) == []
    assert ruled_needs(question(allowance=CUDA, moments=()), observations("opt-tiny")) == []
    half = ruled_needs(question(allowance=CUDA, dtype="fp16"), observations("opt-tiny"))
    assert {one.system for one in half} == set(RULES) - {"fsdp2-offload"}


class Scaled(nn.Module):
    """A parameter without a dimension, as a temperature is."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(64, 32), nn.Linear(32, 64)
        self.scale = nn.Parameter(torch.ones(()))

    def forward(self, tokens: torch.Tensor) -> Any:
        return self.head(self.embedding(tokens)) * self.scale


def test_a_package_that_does_not_take_the_model_has_no_row() -> None:
    found = ruled_needs(question(allowance=CUDA), Observations(Scaled(), own_loss(Scaled())))
    assert {one.system for one in found} == set(RULES) - {"fsdp2-offload"}
    with pytest.raises(UnsupportedError, match=r"parameter scale has none: give it the shape \(1,\)"):
        systems.initialize(Scaled(), system="fsdp2-offload", device="cpu", host_memory="1GiB")


def test_they_are_rows_of_all_systems(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--system", "all", "--model", "opt-tiny", "--hardware", "h100-80g-x1"]
    assert cli.main(words) == 0
    out, shown = capsys.readouterr()
    told = json.loads(out)
    assert {one["system"] for one in told["memory_rules"]} == set(RULES)
    assert not {one["system"] for one in told["ranking"]} & set(RULES)
    for one in told["memory_rules"]:
        assert one["fits"] and one["what"] == RULE and one["tiers"].keys() == {"device", "host"}
        (row,) = (line for line in shown.splitlines() if one["system"] in line)
        assert RULE in row and "yes" in row
    assert cli.main([*words, "--device", "cpu"]) == 0
    assert json.loads(capsys.readouterr().out)["memory_rules"] == []
