"""Hardware profiles: the shipped ones are whole, a broken one says which field, an unknown name what was meant."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest
from pydantic import ValidationError

from systems.planning import hardware
from systems.planning.hardware import BySize, Contention, Flow, HardwareProfile

ASKED_FOR = {
    "h100-80g-x1": 1,
    "h100-80g-x2": 2,
    "h100-80g-x4": 4,
    "h200-141g-x2": 2,
    "h3t-2080ti-10g-x8": 8,
    "h3t-a100-40g-x8": 8,
    "h3t-a100-40g-x64": 64,
    "yard-v100-32g-x8": 8,
    "superpod-a100-40g-x8": 8,
    "hai-pcie-a100-40g-x8": 8,
    "elixir-a100-80g-pcie": 1,
    "angel-a100-40g-x8": 8,
    "angel-a100-40g-x576": 576,
    "angel-a100-40g-x768": 768,
}


@pytest.mark.parametrize("name", hardware.names())
def test_a_shipped_profile_is_whole_and_consistent(name: str) -> None:
    profile = hardware.load(name)
    assert profile.cpu_adam_bytes_per_s.value <= profile.host_dram_bytes_per_s.value
    for one_way in (profile.h2d_bytes_per_s.value, profile.d2h_bytes_per_s.value):
        assert one_way <= profile.both_ways_bytes_per_s.value <= 2.2 * one_way
    assert profile.node_copy_bytes_per_s.value <= profile.devices_per_node.value * profile.h2d_bytes_per_s.value * 1.05
    assert profile.node_copy_bytes_per_s.value <= profile.node_both_ways_bytes_per_s.value
    if "-x" in name:
        assert profile.devices == int(name.rpartition("-x")[2])


def test_the_profiles_that_the_papers_and_our_machines_need_are_there() -> None:
    assert {name: hardware.load(name).devices for name in ASKED_FOR} == ASKED_FOR


def test_every_number_of_every_file_has_a_source() -> None:
    def unsourced(content: Any, path: str) -> list[str]:
        if isinstance(content, dict):
            if "value" in content or "points" in content:
                return [] if content.get("source") else [path]
            return [found for key, part in content.items() for found in unsourced(part, f"{path}.{key}")]
        return [path] if isinstance(content, int | float) else []

    for file in hardware.FOLDER.glob("*.json"):
        assert not unsourced(json.loads(file.read_text()), file.stem)


def test_measured_roofs_are_those_of_the_measured_machine() -> None:
    one, four = hardware.load("h100-80g-x1"), hardware.load("h100-80g-x4")
    assert one.h2d_bytes_per_s.value == 52.7e9 and one.cpu_adam_bytes_per_s.value == 123e9
    assert four.node_copy_bytes_per_s.value == 148e9 and four.cpu_adam_bytes_per_s.value == 147e9
    assert four.h2d_bytes_per_s == one.h2d_bytes_per_s  # like the other


def test_copies_take_what_was_measured_at_every_measured_size() -> None:
    profile = hardware.load("h100-80g-x1")
    assert profile.copies_by_size is not None
    best = max(rate for _, rate in profile.copies_by_size.points)
    for size, rate in profile.copies_by_size.points:
        assert size / best + profile.copy_overhead_s(size) == pytest.approx(size / rate)
    assert profile.copy_overhead_s(1 << 40) == 0.0


def test_contention_has_every_set_of_flows_once() -> None:
    rates = [dict.fromkeys(those, 8.0 / len(those)) for those in hardware.sets_of_flows()]
    whole = Contention(rates=tuple(rates), source="test")
    assert whole.most == 8.0
    assert whole.kept[frozenset({"cpu_adam", "d2h"})] == {"cpu_adam": 0.5, "d2h": 0.5}
    faster = [*rates[:-1], dict.fromkeys(rates[-1], 9.0)]
    assert set(Contention(rates=tuple(faster), source="test").kept[frozenset(rates[-1])].values()) == {1.0}
    for broken in (rates[1:], [*rates, rates[0]], [*rates[1:], {Flow.H2D: 1.0}]):
        with pytest.raises(ValidationError, match="rates must have each set of cpu_adam, h2d, d2h once, 7 in all"):
            Contention(rates=tuple(broken), source="test")
    with pytest.raises(ValidationError, match="bytes a second above 0"):
        Contention(rates=({Flow.CPU_ADAM: 0.0}, *rates[1:]), source="test")


def test_overheads_between_points_lie_between() -> None:
    curve = BySize(points=((100, 10.0), (300, 20.0), (900, 30.0)), source="test")
    at = {size: curve.overhead_s(size) for size in (1, 100, 200, 300, 900, 901)}
    assert at[1] == at[100] == pytest.approx(100 / 10 - 100 / 30)
    assert at[200] == pytest.approx((at[100] + at[300]) / 2)
    assert at[900] == at[901] == 0.0


def content() -> dict[str, Any]:
    found: dict[str, Any] = json.loads((hardware.FOLDER / "h100-80g-x1.json").read_text())
    return found


def written(tmp_path: Path, changed: object) -> str:
    path = tmp_path / "mine.json"
    path.write_text(changed if isinstance(changed, str) else json.dumps(changed))
    return str(path)


def without_source(given: dict[str, Any]) -> None:
    del given["matmul_flops_per_s"]["bf16"]["source"]


@pytest.mark.parametrize(
    ("change", "said"),
    [
        (lambda given: given.pop("h2d_bytes_per_s"), "h2d_bytes_per_s: field required"),
        (without_source, "matmul_flops_per_s.bf16.source: field required"),
        (lambda given: given["nodes"].update(value=0), "nodes.value: input should be greater than 0"),
        (lambda given: given["matmul_efficiency"].update(value=1.2), "matmul_efficiency.value: input should be less than"),
        (lambda given: given.update(speed={"value": 1, "source": "x"}), "speed: extra inputs are not permitted"),
        (lambda given: given.update(description=""), "description: string should have at least 1 character"),
        (lambda given: given["nodes"].update(value=2), "the profile: network_bytes_per_s is missing: several nodes need it"),
        (lambda given: given.pop("disk_read_bytes_per_s"), "the profile: disk_read_bytes_per_s and disk_write_bytes_per_s"),
        (lambda given: given["copies_by_size"]["points"].reverse(), "copies_by_size: points must have ascending sizes"),
        (lambda given: given.update(like="no-such"), "unknown hardware profile 'no-such': there is"),
    ],
)
def test_a_broken_profile_names_the_field(change: Any, said: str, tmp_path: Path) -> None:
    given = content()
    change(given)
    path = written(tmp_path, given)
    with pytest.raises(ValueError) as refused:
        hardware.load(path)
    told = str(refused.value)
    assert said in told and "\n" not in told
    assert path in told or "no-such" in told


@pytest.mark.parametrize("text", ["", "{", "[]", '"h100"', "[" * 100_000, '{"nodes": ' + "9" * 5000 + "}"])
def test_a_file_that_is_no_profile_at_all(text: str, tmp_path: Path) -> None:
    path = written(tmp_path, text)
    with pytest.raises(ValueError, match="hardware profile .*mine.json"):
        hardware.load(path)


def test_profiles_that_are_like_each_other_in_a_circle(tmp_path: Path) -> None:
    path = written(tmp_path, {"like": str(tmp_path / "mine.json")})
    with pytest.raises(ValueError, match="like must name another profile"):
        hardware.load(path)


def test_an_unknown_name_is_told_what_is_near() -> None:
    with pytest.raises(ValueError, match="did you mean .*h100-80g-x4"):
        hardware.load("h100-80gb-x4")
    with pytest.raises(ValueError, match="cannot be read"):
        hardware.load("nowhere/mine.json")


def test_a_path_is_a_profile_too(tmp_path: Path) -> None:
    mine = hardware.load(written(tmp_path, {"like": "h100-80g-x1", "description": "mine"}))
    assert mine == hardware.load("h100-80g-x1").model_copy(update={"description": "mine"})
    assert HardwareProfile.model_validate_json(mine.model_dump_json()) == mine


def test_a_type_without_a_rate_is_refused() -> None:
    with pytest.raises(ValueError, match="no matmul rate for bf16: use `dtype='fp16'` or `dtype='fp32'`"):
        hardware.load("yard-v100-32g-x8").matmul_rate("bf16")


def test_the_profile_of_a_device_by_its_name() -> None:
    assert hardware.of_device("NVIDIA H200") == "h200-141g-x1"
    assert hardware.of_device("NVIDIA H100 80GB HBM3") == "h100-80g-x1", "of several machines the one with a single device"
    assert hardware.of_device("cpu-emulated") is None
