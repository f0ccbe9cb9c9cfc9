"""DeepSpeed's configurations say everything that its defaults leave open, and the user's own file goes over them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from systems import registry
from systems.baselines.external.budget import pinned_bytes
from systems.baselines.external.deepspeed_config import (
    Sizes,
    Variant,
    configuration,
    host_need,
    split_ratio,
    with_users_file,
)
from systems.baselines.external.package import merge
from systems.settings import AdamSettings, Settings

NAMES = [name for name in registry.find() if name.startswith("deepspeed")]
BILLION = 1_000_000_000


def variant(name: str) -> Variant:
    system: Any = registry.get(name)
    return system.variant


def sizes(parameters: int) -> Sizes:
    block = parameters // 20
    return Sizes(
        parameters=parameters,
        trainable=parameters,
        largest=parameters // 10,
        block=block,
        block_parameters=6,
        width=2,
    )


@pytest.mark.parametrize("name", NAMES)
@pytest.mark.one_in(2)
def test_what_the_run_asks_for_is_said(name: str) -> None:
    adam = AdamSettings(lr=3e-4, betas=(0.8, 0.9), eps=1e-6, weight_decay=0.2)
    settings = Settings(device="cuda", dtype="bf16", accumulate=3, clip=0.7, adam=adam)
    config = configuration(variant(name), settings, sizes(10 * BILLION), nvme_path="/disk")
    assert config["gradient_clipping"] == 0.7
    assert config["gradient_accumulation_steps"] == 3
    assert (config["bf16"]["enabled"], config["fp16"]["enabled"]) == (True, False)
    parameters = config["optimizer"]["params"]
    assert config["optimizer"]["type"] == "AdamW" and parameters["adam_w_mode"] is True
    assert [parameters[key] for key in ("lr", "betas", "eps", "weight_decay")] == [3e-4, [0.8, 0.9], 1e-6, 0.2]
    assert config["timers"]["throughput"]["enabled"] is False and config["wall_clock_breakdown"] is False
    assert config["data_types"] == {"grad_accum_dtype": "fp32"}
    json.dumps(config)


@pytest.mark.parametrize("name", NAMES)
def test_buckets_and_pinning_are_said(name: str) -> None:
    zero = configuration(variant(name), Settings(), sizes(10 * BILLION), nvme_path="/disk")["zero_optimization"]
    assert zero["reduce_bucket_size"] == 500_000_000
    if zero["stage"] == 3:
        assert zero["stage3_prefetch_bucket_size"] == 500_000_000
        assert zero["stage3_max_live_parameters"] == BILLION
        assert zero["stage3_param_persistence_threshold"] == 100_000
    for section in ("offload_optimizer", "offload_param"):
        assert zero.get(section, {}).get("pin_memory", True) is True


def test_each_variant_is_its_own() -> None:
    def zero(name: str, **more: Any) -> dict[str, Any]:
        return configuration(variant(name), Settings(), sizes(10 * BILLION), **more)["zero_optimization"]

    superoffload = zero("deepspeed-superoffload")
    assert superoffload["overlap_comm"] is False and superoffload["sub_group_size"] == 400_000_000
    assert superoffload["offload_optimizer"]["super_offload"] is True
    assert superoffload["offload_optimizer"]["cpuadam_cores_perc"] == 0.9
    assert zero("deepspeed-twinflow", ratio=0.3)["offload_optimizer"]["ratio"] == 0.3
    infinity = zero("deepspeed-infinity", nvme_path="/disk")
    assert infinity["offload_param"] == {"device": "cpu", "pin_memory": True}
    assert infinity["offload_optimizer"]["device"] == "nvme" and infinity["offload_optimizer"]["nvme_path"] == "/disk"
    assert "offload_optimizer" not in zero("deepspeed-zero3") and zero("deepspeed-zero2")["stage"] == 2


def test_parameters_on_disk_are_not_more_than_their_buffers() -> None:
    """A live parameter holds a buffer; DeepSpeed fails when there is none, and when one is fetched ahead twice."""
    kind = dataclasses.replace(variant("deepspeed-infinity"), parameters="nvme")
    model = sizes(10 * BILLION)
    zero = configuration(kind, Settings(), model, nvme_path="/disk")["zero_optimization"]
    assert zero["offload_param"]["nvme_path"] == "/disk"
    assert zero["offload_param"]["buffer_size"] >= model.largest
    assert zero["offload_param"]["buffer_count"] > 2 * model.block_parameters
    assert zero["stage3_max_reuse_distance"] <= model.block and zero["stage3_prefetch_bucket_size"] == 0


def test_adam_is_not_adamw() -> None:
    settings = Settings(adam=AdamSettings(decoupled=False))
    optimizer = configuration(variant("deepspeed-zero2"), settings, sizes(1000))["optimizer"]
    assert optimizer["type"] == "Adam" and optimizer["params"]["adam_w_mode"] is False


def test_a_users_file_goes_over_ours_key_by_key(tmp_path: Path) -> None:
    path = tmp_path / "own.json"
    own = {
        "train_batch_size": 64,
        "gradient_clipping": "auto",
        "zero_optimization": {"reduce_bucket_size": 7, "overlap_comm": None, "round_robin_gradients": True},
        "bf16": {"check_grad_overflow": False},
    }
    path.write_text(json.dumps(own))
    ours = configuration(variant("deepspeed-zero3"), Settings(clip=0.5), sizes(1000))
    config, notes = with_users_file(ours, str(path), "deepspeed-zero3")
    assert config["zero_optimization"]["reduce_bucket_size"] == 7
    assert config["zero_optimization"]["round_robin_gradients"] is True
    assert "overlap_comm" not in config["zero_optimization"]
    assert config["zero_optimization"]["stage3_max_live_parameters"] == BILLION
    assert config["bf16"] == {"enabled": True, "check_grad_overflow": False}
    assert config["gradient_clipping"] == 0.5 and "train_batch_size" not in config
    assert notes == [f"{path}: train_batch_size is not used, the run's batch size decides"]


Keys = st.sampled_from("abc")
Trees = st.recursive(st.sampled_from([0, 1, "x"]), lambda below: st.dictionaries(Keys, below, max_size=3), max_leaves=6)
Objects = st.dictionaries(Keys, Trees, max_size=3)


@given(Objects, Objects)
def test_merging_is_idempotent_and_keeps_theirs(ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    merged = merge(ours, theirs)
    assert merge(merged, theirs) == merged
    assert set(merged) == set(ours) | set(theirs)
    assert all(merged[key] == value for key, value in theirs.items() if not isinstance(value, dict))


@given(st.integers(min_value=1, max_value=20 * BILLION), st.integers(min_value=-BILLION, max_value=400 * BILLION))
def test_the_split_fills_the_device_and_no_more(parameters: int, room: int) -> None:
    """DeepSpeed gives the device int((1 - ratio) x sub-groups) of them."""
    kind = Variant(stage=3, optimizer="cpu", partial=True, sub_group=100_000_000)
    groups = -(-parameters // kind.sub_group)
    ratio = split_ratio(sizes(parameters), kind, room)
    assert 0.0 <= ratio <= 1.0
    on_device = int((1 - ratio) * groups)
    each = 16 * min(kind.sub_group, parameters)
    assert on_device == min(groups, max(0, room) // each)


def test_the_split_is_fine_enough() -> None:
    assert variant("deepspeed-twinflow").sub_group <= 100_000_000


@given(st.integers(min_value=1, max_value=1 << 40))
def test_pinned_bytes_round_up_to_a_power_of_two(nbytes: int) -> None:
    taken = pinned_bytes(nbytes)
    assert nbytes <= taken < 2 * nbytes and taken & (taken - 1) == 0


@pytest.mark.parametrize(
    ("name", "parameters", "least", "most"),
    [
        # Resident memory of the process on one H100 with 128 GiB, 16 x 1024 tokens (OPT shapes), and what did not fit.
        ("deepspeed-zero3-offload", 1_316_000_000, 25e9, 36e9),
        ("deepspeed-zero3-offload", 4_200_000_000, 80e9, 101e9),
        ("deepspeed-zero3-offload", 6_700_000_000, 128 * 2**30, 190e9),
        ("deepspeed-zero2-offload", 4_200_000_000, 65e9, 79e9),
    ],
)
def test_host_need_is_near_what_was_seen(name: str, parameters: int, least: float, most: float) -> None:
    """Above what would be refused for nothing, below what was resident: it counts model states and no workspace."""
    settings, kind = Settings(device="cuda", dtype="bf16"), variant(name)
    config = configuration(kind, settings, sizes(parameters))
    assert least <= host_need(kind, settings, sizes(parameters), config) <= most


@pytest.mark.parametrize("name", NAMES)
def test_an_emulated_device_counts_as_host_memory(name: str) -> None:
    """There every variant holds 16 bytes a parameter or more, but for what goes to disk."""
    kind, settings = variant(name), Settings(device="cpu")
    config = configuration(kind, settings, sizes(BILLION), nvme_path="/disk")
    need = host_need(kind, settings, sizes(BILLION), config)
    assert need >= (2 if kind.optimizer == "nvme" else 16) * BILLION
