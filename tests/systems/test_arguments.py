"""Types and devices as torch names them are arguments too."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch

import systems
from systems.arguments import device_of, dtype_of
from tests.systems.every import STRATEGIES
from tests.systems.test_foreign_calls import Stack

OURS = sorted(["resident", *STRATEGIES])


def test_dtypes_are_torch_s_and_their_names() -> None:
    for name, others in {
        "bf16": (torch.bfloat16, "bfloat16"),
        "fp16": (torch.float16, torch.half, "float16"),
        "fp32": (torch.float32, torch.float, "float32"),
    }.items():
        assert {dtype_of(each) for each in (name, *others)} == {name}


def test_devices_are_torch_s_and_the_current_one(monkeypatch: pytest.MonkeyPatch) -> None:
    cpu: tuple[Any, ...] = ("cpu", torch.device("cpu"), torch.device("cpu", 0))
    assert {device_of(each) for each in cpu} == {"cpu"}
    monkeypatch.setattr(torch, "cuda", SimpleNamespace(is_available=lambda: True, current_device=lambda: 1))
    assert {device_of(each) for each in ("cuda", "cuda:1", torch.device("cuda"), torch.device("cuda", 1))} == {"cuda"}
    with pytest.raises(ValueError, match=r"device is 'cuda:0', and this process is on cuda:1: call torch.cuda.set_device\(0\)"):
        device_of("cuda:0")


@pytest.mark.parametrize("system", OURS)
def test_an_engine_takes_them(system: str) -> None:
    given: dict[str, Any] = {"device_memory": "1MiB", "host_memory": "16MiB", "system": system}
    with systems.initialize(Stack(0), device=torch.device("cpu"), dtype=torch.bfloat16, **given) as engine:
        assert {p.dtype for p in engine.module.parameters()} == {torch.bfloat16}


@pytest.mark.parametrize("system", OURS)
def test_memory_is_looked_at_before_anything_is_built(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A model that cannot fit is refused by its sizes alone: no kernel is compiled for it."""
    monkeypatch.setattr("systems.substrate.device.cpu_kernel", lambda **_: pytest.fail("a kernel was built"))
    with pytest.raises(systems.errors.BudgetError) as refused:
        systems.initialize(Stack(0), system=system, device="cpu", device_memory="300", host_memory="1GiB")
    assert "raise `device_memory`" in str(refused.value) and refused.value.tier == "device"
    if system != "resident":
        with pytest.raises(systems.errors.BudgetError) as refused:
            systems.initialize(Stack(0), system=system, device="cpu", device_memory="1MiB", host_memory="300")
        assert "raise `host_memory`" in str(refused.value) and refused.value.tier == "host"
