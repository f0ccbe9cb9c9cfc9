"""`harness profile`: what it writes loads as a hardware profile, and wrong input is found before any measurement."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Literal

import pytest
import torch

from harness import cli, profile
from harness.profile import Figures, ProfileSpec, measure_devices, measure_disk, measure_host, put_collectives, take_profile
from harness.roofs.collectives import Collectives, CollectiveSizes
from systems.machine.limits import read_limits
from systems.planning import hardware
from tests.harness.roofs.test_roofs import DISK_SIZES, HOST_SIZES, SIZES, host_as_devices


@pytest.mark.parametrize("devices", [1, 2])
def test_everything_measured_is_a_whole_profile(devices: int, tmp_path: Path) -> None:
    figures, limits, told = Figures("a machine"), read_limits(), []  # type: ignore[var-annotated]
    figures.fields["device_name"] = "a device"
    figures.put("device_memory_bytes", 1 << 30, "so we say")
    measure_disk(figures, tmp_path, told.append, DISK_SIZES, flags=0)
    measure_host(figures, limits, HOST_SIZES, told.append)
    measure_devices(figures, host_as_devices(devices), limits, HOST_SIZES, SIZES, told.append)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps(figures.content()))
    loaded = hardware.load(str(path))
    assert loaded.devices == devices
    assert loaded.copies_by_size is not None and len(loaded.copies_by_size.points) == len(SIZES.copies)
    assert (loaded.device_link_bytes_per_s is None) == (devices == 1)
    assert loaded.cpu_adam_dram_share is not None
    assert loaded.contention is not None and loaded.contention.most >= loaded.host_dram_bytes_per_s.value
    assert loaded.cpu_adam_bytes_per_s.value == loaded.contention.rates[0][hardware.Flow.CPU_ADAM]
    missing = {name for name in type(loaded).model_fields if getattr(loaded, name) is None}
    alone = {"device_link_bytes_per_s"} if devices == 1 else set()
    ranks = {"gathers_by_size", "reductions_by_size", "native_reductions_by_size", "exchange_s"}
    assert missing == {"network_bytes_per_s"} | ranks | alone
    expected = f"measured {figures.made_at:%Y-%m-%d} by harness profile, torch {torch.__version__}, a machine: "
    assert loaded.unit_event_s.source.startswith(expected)
    assert all(figure.source.startswith(expected) for figure in loaded.other.values())
    assert {"storage_rebind_s", "pinned_tensor_bytes_per_s", "pageable_h2d_bytes_per_s", "d2h_16kib_bytes_per_s"} <= set(
        loaded.other
    )
    assert told == [
        "disk", "host memory", "CPU Adam", "matrix products and device memory", "copies", "CPU Adam beside copies",
        "pinning, storages and unit events",
    ]  # fmt: skip


def test_a_host_alone_is_a_profile_like_another(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    path = tmp_path / "host.json"
    assert take_profile(ProfileSpec(out=str(path), device="cpu"), HOST_SIZES, SIZES) == 0
    out, err = capsys.readouterr()
    content = json.loads(path.read_text())
    assert json.loads(out) == content
    assert not {"device_name", "matmul_flops_per_s", "h2d_bytes_per_s", "unit_event_s"} & set(content)
    assert "there is no device in this profile" in err
    with pytest.raises(ValueError, match="device_name: field required"):
        hardware.load(str(path))
    path.write_text(json.dumps({"like": "h100-80g-x1"} | content))
    loaded = hardware.load(str(path))
    assert loaded.device_name == hardware.load("h100-80g-x1").device_name
    assert loaded.cpu_adam_bytes_per_s.value == content["cpu_adam_bytes_per_s"]["value"]
    assert loaded.cpu_update_s is not None and loaded.contention is None


@pytest.mark.parametrize("device", ["cpu", "cuda"])
def test_collectives_of_ranks_are_in_the_profile(device: Literal["cpu", "cuda"], tmp_path: Path) -> None:
    figures, points = Figures("a machine"), ((1 << 19, 1e9), (1 << 27, 2e9))
    found = Collectives(points, points[:1], points[1:] if device == "cuda" else None, 1e-4)
    put_collectives(figures, found, 2, device)
    path = tmp_path / "machine.json"
    path.write_text(json.dumps({"like": "h100-80g-x2", **figures.content()}))
    loaded = hardware.load(str(path))
    assert loaded.gathers_by_size is not None and loaded.gathers_by_size.points == points
    assert loaded.reductions_by_size is not None and loaded.reductions_by_size.points == points[:1]
    natively = loaded.summing_natively().reductions_by_size
    assert natively is not None and natively.points == (points[1:] if device == "cuda" else points[:1])
    assert loaded.exchange_s is not None and loaded.exchange_s.value == 1e-4
    assert ("NCCL" in loaded.gathers_by_size.source) == (device == "cuda")


def test_a_profile_of_ranks_without_a_device(tmp_path: Path) -> None:
    path, sizes = tmp_path / "host.json", CollectiveSizes(wholes=(1 << 12,), over_s=0.0, rounds=1)
    assert take_profile(ProfileSpec(out=str(path), device="cpu", ranks=2), HOST_SIZES, SIZES, sizes) == 0
    content = json.loads(path.read_text())
    assert [size for size, _ in content["gathers_by_size"]["points"]] == [1 << 11]
    assert content["exchange_s"]["value"] > 0 and "native_reductions_by_size" not in content


def test_what_was_written_meanwhile_is_not_overwritten(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A link to what is not there yet leads there, the first time."""
    path, link = tmp_path / "host.json", tmp_path / "link.json"
    link.symlink_to(path.name)
    monkeypatch.setattr(profile, "measure_host", lambda *_: None)
    assert cli.main(["profile", "--device", "cpu", "--out", str(link)]) == 0
    written = path.read_text()
    assert link.is_symlink() and json.loads(capsys.readouterr().out) == json.loads(written)
    path.unlink()
    monkeypatch.setattr(profile, "measure_host", lambda *_: path.write_text("mine"))
    assert cli.main(["profile", "--device", "cpu", "--out", str(path)]) == 2
    assert "cannot be written: File exists: the profile is on stdout" in capsys.readouterr().err
    assert path.read_text() == "mine" and set(tmp_path.iterdir()) == {path, link}


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (("--disk", "/no/such/folder"), "--disk /no/such/folder is no folder: name one on the disk to measure"),
        (("--disk", "{here}"), "is in memory (tmpfs): name a folder on the disk to measure"),
        (("--out", "profile.txt"), "a hardware profile is a file that ends in .json"),
        (("--out", "/no/such/folder/p.json"), "is no folder that this user may write to"),
        (("--out", "{here}/there.json"), "is there already, and measured numbers are never overwritten"),
        (("--ranks", "1"), "--ranks 1: input should be greater than or equal to 2"),
        (("--device", "tpu"), "--device tpu: input should be 'cuda' or 'cpu'"),
    ],
)
def test_bad_input_is_found_before_any_measurement(
    arguments: tuple[str, ...], said: str, tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(profile, "measure_host", lambda *_: pytest.fail("something was measured"))
    monkeypatch.setattr(profile, "in_memory", lambda folder: "tmpfs")
    (tmp_path / "there.json").touch()
    assert cli.main(["profile", "--device", "cpu", *(argument.format(here=tmp_path) for argument in arguments)]) == 2
    out, err = capsys.readouterr()
    assert (out, err.count("\n")) == ("", 1)
    assert said in err


def test_a_device_that_is_not_there_is_bad_input(capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert cli.main(["profile", "--device", "cuda"]) == 2
    assert "--device cuda: torch finds no CUDA device here" in capsys.readouterr().err
