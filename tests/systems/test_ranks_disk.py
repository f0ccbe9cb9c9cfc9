"""Optimizer states of several ranks on a disk, each one's files its own, and bundles that stay on the device for good."""

from __future__ import annotations

import os
from functools import cache
from pathlib import Path
from typing import Any

import pytest
import torch

from systems import checkpoint
from systems.errors import UnsupportedError
from systems.planning.disk_layout import disk_bytes
from systems.system import Engine
from tests.planning.races import find_races
from tests.systems.every import STRATEGIES
from tests.systems.running import AMPLE, managed, parameters_of
from tests.systems.test_ordering import as_issued
from tests.systems.test_ranks import Asked, assert_equal, on_ranks, resident, tight
from tests.systems.test_ranks_saved import on_ranks as each_rank
from tests.systems.test_ranks_saved import train

DISK = 1 << 28
CASES = [Asked("stack", 2), Asked("gpt2", 2, 2, "bf16"), Asked("opt", 3, clip=0.5)]
CHOSEN = ("angel-ptm", "elixir", "patrickstar")  # H3T's inputs wait on the host, and a host that is short has no room for them
PAIRS = [(strategy, CASES[(number + shift) % 3]) for number, strategy in enumerate(CHOSEN) for shift in (0, 1)]
PAIRS[-1] = ("patrickstar", CASES[1])  # a group of stack's chunks is all of it, which has room on two devices


@cache
def short_of_host(strategy: str, asked: Asked, share: float) -> int:
    """Bytes of a host, of what all ranks take that may take all they want."""
    budget = tight(asked.model, asked.size)
    found = on_ranks(STRATEGIES[strategy], *asked[:3], device_memory=budget, **given(asked))
    return int(share * sum(mine.memory.host_peak_bytes or 0 for mine in found))


def given(asked: Asked) -> dict[str, Any]:
    return {"dtype": asked.dtype, "clip": asked.clip, "host_memory": AMPLE}


@pytest.mark.parametrize(("strategy", "asked"), PAIRS)
@pytest.mark.parametrize("with_disk", [True, False], ids=["disk", "none"])
@pytest.mark.one_in(11)
def test_no_bit_changes_where_the_host_is_short(strategy: str, asked: Asked, with_disk: bool, tmp_path: Path) -> None:
    """What has no room goes to the disk, or stays on the device for good where there is none."""
    more: dict[str, Any] = {**given(asked), "host_memory": short_of_host(strategy, asked, 0.8)}
    if with_disk:
        more |= {"disk": tmp_path, "disk_memory": DISK}
    expected = resident(*asked[:4], asked.clip, "none")
    budget = tight(asked.model, asked.size)
    found = on_ranks(STRATEGIES[strategy], *asked[:3], jitter=True, device_memory=budget, log_events=True, **more)
    for one, other in zip(expected, found, strict=True):
        engine = managed(other.engine)
        assert_equal(one, other)
        assert not find_races(as_issued(engine.log.operations))
        assert other.memory.disk_peak_bytes == disk_bytes(engine.layout)
        assert (other.memory.host_peak_bytes or 0) <= more["host_memory"] // asked.size
        if with_disk:
            assert engine.layout.on_disk, "void: the host held everything"
            assert other.counters["disk_read_bytes"] > 0
        else:
            assert any(not b.movable for b in engine.layout.bundles), "void: the host held everything"
        for name, parameter in engine.module.named_parameters():
            assert torch.equal(parameter.detach(), other.parameters[name].to(parameter.dtype))
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("strategy", ["angel-ptm", "elixir"])
def test_a_checkpoint_goes_to_a_disk_and_comes_from_one(strategy: str, tmp_path: Path) -> None:
    host, folder = short_of_host(strategy, Asked("stack", 2), 0.8), tmp_path / "here"
    os.mkdir(tmp_path / "states")

    def save(engine: Engine) -> dict[str, torch.Tensor]:
        assert managed(engine).layout.on_disk, "void: the host held everything"
        train(engine, "stack", 0, 2, 2)
        checkpoint.save(engine, folder)
        train(engine, "stack", 2, 4, 2)
        return parameters_of(engine)

    def load(engine: Engine) -> dict[str, torch.Tensor]:
        checkpoint.load(engine, folder)
        train(engine, "stack", 2, 4, 2)
        return parameters_of(engine)

    more: dict[str, Any] = {"host_memory": host, "disk": tmp_path / "states", "disk_memory": DISK}
    straight, again = each_rank(strategy, "stack", 2, save, **more), each_rank(strategy, "stack", 2, load, **more)
    for one, other in zip(straight, again, strict=True):
        assert all(torch.equal(value, other[name]) for name, value in one.items())


def test_what_is_free_on_the_disk_is_what_the_least_of_all_ranks_sees(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """It changes from one look to the next, and all ranks have to plan with the same."""
    from systems.substrate import system

    host = short_of_host("elixir", Asked("stack", 2), 0.8)
    seen = iter(range(DISK, 2 * DISK))
    monkeypatch.setattr(system, "disk_budget", lambda settings: next(seen))
    found = on_ranks(STRATEGIES["elixir"], "stack", 2, device_memory=tight("stack", 2), host_memory=host, disk=tmp_path)
    budgets = {managed(mine.engine).strategy._context.disk_budget for mine in found}
    assert budgets == {DISK}


def test_a_folder_that_is_no_disk_is_refused(tmp_path: Path) -> None:
    with pytest.raises(UnsupportedError, match="is in memory"):
        on_ranks(STRATEGIES["elixir"], "stack", 2, disk=Path("/dev/shm"))
