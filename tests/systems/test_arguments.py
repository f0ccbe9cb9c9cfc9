"""Types and devices as torch names them are arguments too."""

from __future__ import annotations

import re
from pathlib import Path
from types import NoneType, SimpleNamespace
from typing import Any, get_args

import pytest
import torch

import systems
from systems.arguments import device_of, dtype_of, options_of
from systems.registry import check_options, find, get
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
    monkeypatch.setattr("systems.device.device.cpu_kernel", lambda **_: pytest.fail("a kernel was built"))
    with pytest.raises(systems.errors.BudgetError) as refused:
        systems.initialize(Stack(0), system=system, device="cpu", device_memory="300", host_memory="1GiB")
    assert "raise `device_memory`" in str(refused.value) and refused.value.tier == "device"
    if system != "resident":
        with pytest.raises(systems.errors.BudgetError) as refused:
            systems.initialize(Stack(0), system=system, device="cpu", device_memory="2KiB", host_memory="300")
        assert "raise `host_memory`" in str(refused.value) and refused.value.tier == "host"


@pytest.mark.parametrize("system", find())
@pytest.mark.one_in(3)
def test_cuda_that_is_not_there_is_told_in_words(system: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """A torch built without it raises AssertionError at the first question about a device."""
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    for name in ("current_device", "get_device_name", "get_device_properties"):
        monkeypatch.setattr(torch.cuda, name, lambda *_: pytest.fail("a device was asked for"))
    for budget in (None, "4MiB"):
        with pytest.raises(systems.errors.UnsupportedError, match="no CUDA device is visible: use `device='cpu'`"):
            systems.initialize(Stack(0), system=system, device="cuda", device_memory=budget)


@pytest.mark.parametrize("system", OURS)
def test_options_are_values_of_python(system: str) -> None:
    """None is none of them unless the system says so, and True is no number; texts are read as on a command line."""
    chosen = get(system)
    given: dict[str, Any] = {"device": "cpu", "device_memory": "1MiB", "system": system}
    defaults = chosen.Options()
    assert check_options(chosen, options_of(defaults.model_dump())) == defaults
    for name, field in chosen.Options.model_fields.items():
        value = getattr(defaults, name)
        if NoneType not in get_args(field.annotation):
            with pytest.raises(ValueError, match=re.escape(f"`options=dict({name}=None)`")) as refused:
                systems.initialize(Stack(0), options={name: None}, **given)
            assert "\n" not in str(refused.value) and "did you mean" not in str(refused.value)
        if type(value) is int:
            assert getattr(check_options(chosen, options_of({name: str(value)})), name) == value
            assert getattr(check_options(chosen, options_of({name: torch.tensor(value)})), name) == value
            for wrong in (True, False):
                with pytest.raises(ValueError, match=re.escape(f"`options=dict({name}={wrong})`")):
                    systems.initialize(Stack(0), options={name: wrong}, **given)


def test_options_may_be_paths_and_have_names() -> None:
    assert options_of({"chunk-min": Path("there"), "cache": None}) == {"chunk_min": "there", "cache": None}
    with pytest.raises(ValueError, match="options has the name 4: give names as strings"):
        options_of({4: 3})  # type: ignore[dict-item]
    with pytest.raises(ValueError, match="options is list: give a dict"):
        options_of([1])  # type: ignore[arg-type]
