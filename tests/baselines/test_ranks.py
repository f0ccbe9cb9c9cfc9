"""Baselines on several ranks: the sums of the reference recipe, the same values on all of them, a share of the memory each."""

from __future__ import annotations

import math
import os
from collections.abc import Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from torch import nn

from systems import registry
from systems.baselines.external import deepspeed_global, extensions
from systems.baselines.external.deepspeed_config import configuration, host_need
from systems.baselines.external.process import PackageGroup, begin
from systems.baselines.external.shares import own_share, whole_value
from systems.baselines.external.weights import Masters, materialise
from systems.baselines.fsdp2_offload import share_numel
from systems.errors import UnsupportedError
from systems.ranks.loopback import as_threads
from systems.ranks.ranks import Ranks, SingleRank
from systems.recipe.model.units import find_units
from systems.settings import Settings
from systems.system import on_ranks
from tests.baselines.conftest import EXACT, TORCH, reference
from tests.baselines.test_deepspeed_config import BILLION, sizes, variant
from tests.baselines.training import STEPS, Job, Result, train_all

FP32 = (*map(Job, TORCH), Job("deepspeed-zero3"), Job("deepspeed-zero2-offload"))
BF16 = (
    Job("torch-ddp", dtype="bf16", recompute="none"),
    Job("torch-ddp", dtype="bf16", recompute="none", options=("weights=autocast",)),
    Job("fsdp2-offload", dtype="bf16", recompute="none"),
)
ONCE = (*(Job(system, accumulate=1) for system in TORCH), *(Job(system, model="frozen-middle") for system in TORCH))
FROZEN = tuple(Job(system, model="frozen-middle") for system in ("deepspeed-zero3", "deepspeed-zero2"))
DEEPSPEED_BF16 = tuple(Job(system, dtype="bf16", recompute="none") for system in ("deepspeed-zero3-offload", "deepspeed-zero2"))
MOST = (*map(Job, EXACT), *ONCE, *FROZEN, *DEEPSPEED_BF16)


def assert_is_the_reference(found: Result, expected: Result, *, exact: bool) -> None:
    """exact: fp32, in which the first step's losses are the same bits, before any kernel of Adam has rounded.

    Single elements may differ by more than the whole: those whose gradient is nothing but rounding, which Adam divides by its
    own size, and those behind a ReLU that one rounding opens and another shuts.
    """
    assert found.error is None and expected.error is None
    assert found.different == []
    assert all(torch.equal(found.start[name], value) for name, value in expected.start.items())
    tolerance = 1e-5 if exact else 2e-2
    assert found.losses == pytest.approx(expected.losses, rel=tolerance)
    assert [norm for norm in found.norms if norm is not None] == pytest.approx(expected.norms, rel=tolerance)
    assert found.eval_loss == pytest.approx(expected.eval_loss, rel=tolerance)
    assert found.skipped == [False] * STEPS
    if exact:
        assert found.losses[0] == expected.losses[0]
        way, off = _together(expected.end) - _together(expected.start), _together(found.end) - _together(expected.end)
        assert float(off.norm()) < 1e-3 * float(way.norm())
    assert all(torch.equal(found.exported[name], value) for name, value in found.end.items())
    assert all(torch.equal(found.after_lr_0[name], value) for name, value in found.end.items())
    assert "gather_bytes" not in found.counters and "reduce_bytes" not in found.counters
    assert all(torch.equal(found.written[name], value) for name, value in found.start.items())
    assert found.written_loss == pytest.approx(expected.written_loss, rel=tolerance)


def _together(values: Mapping[str, torch.Tensor]) -> torch.Tensor:
    return torch.cat([value.double().reshape(-1) for value in values.values()])


def compare(jobs: tuple[Job, ...], folder: Path, ranks: int) -> None:
    results = train_all([*dict.fromkeys(map(reference, jobs)), *jobs], folder, ranks=ranks)
    for job in jobs:
        assert_is_the_reference(results[job], results[reference(job)], exact=job.dtype == "fp32")


@pytest.mark.timeout(1500)  # as in test_parity.py
@pytest.mark.long
def test_two_ranks_are_two_of_the_reference(tmp_path: Path) -> None:
    compare(FP32 + BF16, tmp_path, 2)


@pytest.mark.slow
@pytest.mark.timeout(1500)
@pytest.mark.parametrize("ranks", [2, 3])
def test_every_baseline_on_ranks(ranks: int, tmp_path: Path) -> None:
    """Of three ranks none has an even share, and a third of a sum is rounded."""
    compare(FP32 + MOST, tmp_path, ranks)


@pytest.mark.slow
@pytest.mark.parametrize("system", TORCH)
def test_two_ranks_are_one_that_accumulates(system: str, tmp_path: Path) -> None:
    """Of the recipe, on the same batches."""
    (tmp_path / "one").mkdir()
    job = Job(system, accumulate=1)
    one = replace(reference(job), accumulate=2)
    found, expected = train_all([job], tmp_path, ranks=2)[job], train_all([one], tmp_path / "one")[one]
    assert found.losses == pytest.approx(expected.losses, rel=1e-5)
    assert found.norms == pytest.approx(expected.norms, rel=1e-5)


# ---- how they begin


def test_roundpipe_stays_at_one_rank() -> None:
    with pytest.raises(UnsupportedError, match="roundpipe runs on one rank so far"):
        on_ranks(registry.get("roundpipe"))
    ranked = {name for name in registry.find() if registry.get(name).abilities.ranks}
    assert {*TORCH, *EXACT, "deepspeed-superoffload", "deepspeed-infinity"} <= ranked


def _other_options(ranks: Ranks) -> None:
    system = registry.get("torch-ddp")
    options = registry.parse_options(system, ["weights=autocast"] if ranks.rank else [])
    begin(nn.Linear(1, 1), Settings(ranks=2), options, ranks, system.name)


def test_ranks_are_asked_alike() -> None:
    with pytest.raises(UnsupportedError, match="weights is 'masters' on rank 0 and 'autocast' on rank 1: give all ranks"):
        as_threads(2, _other_options)


def _first_values(ranks: Ranks) -> list[nn.Parameter]:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    for parameter in model.parameters():  # threads share torch's generator
        nn.init.constant_(parameter, 0.5)
    if ranks.rank == 1:
        model[1].bias.data.add_(1.0)  # type: ignore[operator]
    found = find_units(model)
    masters = Masters(found, Settings(dtype="fp32", ranks=2), ranks)
    parameters = materialise(found, masters, torch.float32)
    masters.check_alike()
    return parameters


def test_first_values_are_alike() -> None:
    with pytest.raises(UnsupportedError, match="the first values of 1.bias are not the same on ranks 0 and 1"):
        as_threads(2, _first_values)


def test_threads_have_no_group_for_a_package() -> None:
    with pytest.raises(UnsupportedError, match=r"torch.distributed, which is not initialized here: use processes"):
        as_threads(2, lambda ranks: PackageGroup({"cpu": "gloo"}, ranks))


class _Fourth(SingleRank):
    """The second of its host's two, of four."""

    def __init__(self) -> None:
        super().__init__()
        self.rank, self.size, self.local_rank, self.local_size = 3, 4, 1, 2


@pytest.fixture
def four_ranks(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """With a device each, as a process finds them."""
    monkeypatch.setattr(torch.distributed, "is_initialized", lambda: True)
    monkeypatch.setattr(torch.distributed, "get_world_size", lambda: 4)
    monkeypatch.setattr(torch.distributed, "get_backend_config", lambda: "cpu:gloo,cuda:nccl")
    monkeypatch.setattr(torch.cuda, "current_device", lambda: 1)
    return monkeypatch


def test_a_package_is_told_which_rank_it_is(four_ranks: pytest.MonkeyPatch) -> None:
    """The group that is there is taken and left; what the environment said before is said again."""
    names = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "LOCAL_SIZE")
    four_ranks.setenv("LOCAL_RANK", "7")
    before = [os.environ.get(name) for name in names]
    group = PackageGroup({"cuda": "nccl"}, _Fourth())
    assert [os.environ[name] for name in names] == ["3", "1", "4", "2"]
    four_ranks.setattr(torch.cuda, "current_device", lambda: 0)  # a process that sees its own device alone
    alone = PackageGroup({"cuda": "nccl"}, _Fourth())
    assert os.environ["LOCAL_RANK"] == "0"
    alone.close()
    group.close()
    group.close()
    assert [os.environ.get(name) for name in names] == before


def test_a_group_that_a_package_cannot_use(four_ranks: pytest.MonkeyPatch) -> None:
    with pytest.raises(UnsupportedError, match="torch.distributed runs 4 ranks here, this system wants one"):
        PackageGroup({"cpu": "gloo"}, SingleRank())
    four_ranks.setattr(torch.distributed, "get_backend_config", lambda: "cpu:gloo,cuda:gloo")
    with pytest.raises(UnsupportedError, match="has cpu:gloo,cuda:gloo, this system needs nccl: initialize it with backend="):
        PackageGroup({"cuda": "nccl"}, _Fourth())


# ---- what DeepSpeed is told


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> pytest.MonkeyPatch:
    """As torchrun starts a process."""
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "none")
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    monkeypatch.delenv(extensions.VARIABLE, raising=False)
    return monkeypatch


def test_deepspeed_has_a_rank_s_threads(launched: pytest.MonkeyPatch) -> None:
    """The 1 of torchrun is not the user's, and is put back."""
    threads = str(torch.get_num_threads())
    with deepspeed_global.loaded_for(Settings(device="cuda")):
        assert (os.environ["OMP_NUM_THREADS"], os.environ["DS_ACCELERATOR"]) == (threads, "cuda")
    assert os.environ["OMP_NUM_THREADS"] == "1" and "DS_ACCELERATOR" not in os.environ
    told = deepspeed_global.variables(Settings(device="cuda"), SingleRank())
    assert told["variables"] == {"DS_ACCELERATOR": "cuda", "OMP_NUM_THREADS": threads}
    launched.delenv("TORCHELASTIC_RUN_ID")
    assert "OMP_NUM_THREADS" not in deepspeed_global.loading(Settings())


def test_ranks_share_memory_of_one_name() -> None:
    found = as_threads(3, lambda ranks: deepspeed_global.variables(Settings(ranks=3), ranks)["defaults"])
    assert found[0] == found[1] == found[2]
    assert found[0]["MASTER_PORT"] == str(os.getpid())


@pytest.mark.parametrize("name", [*EXACT, "deepspeed-superoffload"])
@pytest.mark.parametrize("accumulate", [1, 2])
def test_the_configuration_is_each_rank_s_own(name: str, accumulate: int) -> None:
    """DeepSpeed makes the global batch of it: 1 x accumulate x ranks."""
    settings, more = Settings(accumulate=accumulate), {"ranks": 4}
    config = configuration(variant(name), settings, replace(sizes(BILLION), **more))
    assert config["train_micro_batch_size_per_gpu"] == 1 and "train_batch_size" not in config
    assert config["gradient_accumulation_steps"] == accumulate
    assert config["zero_optimization"]["reduce_scatter"] is True  # which divides by the number of ranks, and by nothing else
    assert "gradient_predivide_factor" not in config and "prescale_gradients" not in config


@pytest.mark.parametrize("name", EXACT)
@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_ranks_share_what_the_host_holds(name: str, device: Any) -> None:
    kind, settings = variant(name), Settings(device=device)
    one = sizes(8 * BILLION)
    config = configuration(kind, settings, one)
    alone = host_need(kind, settings, one, config)
    each = host_need(kind, settings, replace(one, ranks=4), config)
    kept = one.parameters * one.width  # at first on every rank; stage 2 keeps them, on the device
    assert each >= kept
    whole = kept if kind.stage == 2 and device == "cpu" else 0
    assert max(kept, 0.5 * (alone - whole) / 4 + whole) <= each <= max(kept, 2 * (alone - whole) / 4 + whole)


# ---- shares


@given(st.lists(st.integers(1, 5), min_size=1, max_size=3), st.integers(1, 4))
def test_shares_make_the_whole(shape: list[int], size: int) -> None:
    """DeepSpeed's, padded, and FSDP2's, of whole rows, where the last ranks may have fewer or none."""
    value = torch.arange(math.prod(shape), dtype=torch.float32).view(shape)
    flat, rows = -(-value.numel() // size), share_numel(shape, size)
    sharded = torch.chunk(value, size)

    def both(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor]:
        mine = sharded[ranks.rank] if ranks.rank < len(sharded) else value[:0]
        padded = own_share(value, flat, ranks)
        assert padded.numel() == flat
        whole = whole_value(padded, flat, value.shape, ranks, "weight")
        return whole, whole_value(mine, rows, value.shape, ranks, "weight")

    for found in as_threads(size, both):
        assert all(torch.equal(each, value) for each in found)
