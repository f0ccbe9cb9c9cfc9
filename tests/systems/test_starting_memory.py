"""Initializing takes what training takes, no more: 14 bytes a parameter of host memory, the model's own values included. One
that fails leaves the model as it was."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch

from systems import registry
from systems.baselines import resident
from systems.device.memory.host import HostMapping
from systems.errors import BudgetError
from systems.substrate import assembly
from systems.substrate.bundle import first_values
from tests.systems.every import STRATEGIES, SYSTEMS
from tests.systems.models_small import build, tokens
from tests.systems.running import elixir, one_step, settings, start

MANAGED = list(STRATEGIES)

# A process for each system, so that the peak of one is not that of another; it begins with what it has.
MEASURES = """
import os, sys, torch, systems
from systems.machine.limits import process_memory

WIDTH, LAYERS = 1024, 12

def resident():
    return process_memory("self")["VmRSS"]

def child(name):
    torch.ones(6 << 20), [torch.ones(1 << 20) for _ in range(4)]  # the C library keeps blocks of this size from now on
    before = resident()
    layers = [torch.nn.utils.skip_init(torch.nn.Linear, WIDTH, WIDTH) for _ in range(LAYERS)]
    model = torch.nn.Sequential(torch.nn.Embedding(8, WIDTH), *layers)
    for parameter in model.parameters():
        torch.nn.init.constant_(parameter, 0.5)
    engine = systems.initialize(model, system=name, device="cpu", device_memory="200MiB", host_memory="4GiB", dtype="bf16")
    after, peak = resident(), process_memory("self")["VmHWM"]
    print(name, sum(p.numel() for p in model.parameters()), after - before, peak - before, flush=True)
    os._exit(0)

torch.set_num_threads(1)
for name in sys.argv[1:]:
    systems.initialize(torch.nn.Linear(8, 8), system=name, device="cpu").close()  # what it imports is there before
    if (pid := os.fork()) == 0:
        child(name)
    assert os.waitpid(pid, 0)[1] == 0, name
"""


@pytest.mark.parametrize("names", [["elixir"], pytest.param(MANAGED, marks=pytest.mark.slow)], ids=["one", "all"])
def test_initializing_takes_14_bytes_a_parameter(names: list[str], tmp_path: Path) -> None:
    """18 would be 48 MiB more."""
    script = tmp_path / "measures.py"
    script.write_text(MEASURES)
    alone = {**os.environ, "OMP_THREAD_LIMIT": "1", "CUDA_VISIBLE_DEVICES": ""}  # neither's threads survive a fork
    told = subprocess.check_output([sys.executable, script, *names], text=True, timeout=200, env=alone)
    lines = [line.split() for line in told.splitlines()]
    assert [line[0] for line in lines] == names
    for name, *numbers in lines:
        numel, after, peak = map(int, numbers)
        assert 14 * numel <= after + (4 << 20) and peak <= 14 * numel + (24 << 20), (name, after / numel, peak / numel)


FAILURES: dict[str, Any] = {
    "no room": None,
    "while it is read": (first_values.FirstValues, "_draw", resident, "zeros_like"),
    "once it is taken over": (assembly, "ParameterWatch", resident, "ParameterWatch"),
}


@pytest.mark.parametrize("failure", FAILURES)
@pytest.mark.parametrize("name", ["resident", *MANAGED])
@pytest.mark.one_in(3)
def test_an_initialize_that_fails_leaves_the_model_as_it_was(name: str, failure: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its parameters, with their gradients and frozen ones with all their bits; and it can be given again."""
    system, model = registry.get(name), build("opt")
    model.model.decoder.layers[1].requires_grad_(False)
    model(tokens(1, 1)[0, 0]).logits.sum().backward()
    before = {key: (p, p.data_ptr(), p.detach().clone(), p.grad) for key, p in model.named_parameters()}
    asked, calls = settings(dtype="bf16"), list[Any]()
    error: type[BaseException] = KeyboardInterrupt
    with monkeypatch.context() as patch:
        if failure == "no room":
            asked, error = settings(device_memory=1000, dtype="bf16"), BudgetError
        else:
            managed_owner, managed_name, owner, attribute = FAILURES[failure]
            if name != "resident":
                owner, attribute = managed_owner, managed_name
            call = torch.zeros_like if attribute == "zeros_like" else getattr(owner, attribute)

            def fails(*args: Any, **given: Any) -> Any:
                calls.append(args)
                if attribute == "ParameterWatch" or len(calls) == 7:
                    raise KeyboardInterrupt
                return call(*args, **given)

            patch.setattr(torch if attribute == "zeros_like" else owner, attribute, fails)
        with pytest.raises(error):
            start(system, model, asked)
    assert bool(calls) == (failure != "no room"), "void: it failed elsewhere"
    for key, parameter in model.named_parameters():
        mine, address, value, gradient = before[key]
        assert parameter is mine and parameter.data_ptr() == address and parameter.grad is gradient
        assert torch.equal(parameter, value)
    with start(system, model, settings()) as engine:
        one_step(engine, tokens(1, 1)[0])


@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
def test_a_model_without_values_is_without_them_again(system: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    with torch.device("meta"):
        model = torch.nn.Sequential(torch.nn.Linear(4, 4), torch.nn.Linear(4, 4))
    before = dict(model.named_parameters())

    def fails(*_: Any, **__: Any) -> Any:
        raise KeyboardInterrupt

    for owner in (assembly, resident):
        monkeypatch.setattr(owner, "ParameterWatch", fails)
    with pytest.raises(KeyboardInterrupt):
        start(system, model, settings(initial_weights=lambda name, tensor: torch.nn.init.ones_(tensor)))
    assert all(parameter is before[name] and parameter.is_meta for name, parameter in model.named_parameters())


def test_moments_are_taken_last(monkeypatch: pytest.MonkeyPatch) -> None:
    """When nobody holds the model's own values any more, so that they are never there together."""
    model, seen = build("opt"), []
    addresses = [p.data_ptr() for p in model.parameters()]
    touch = HostMapping.touch

    def watched(mapping: HostMapping) -> None:
        seen.append((mapping.name, [p.data_ptr() for p in model.parameters()] == addresses))
        touch(mapping)

    monkeypatch.setattr(HostMapping, "touch", watched)
    start(elixir(), model, settings(accumulate=2, device_memory=1_300_000)).close()
    assert list(dict.fromkeys(seen)) == [  # what is pinned is taken to be pinned
        ("host-slots", True),
        ("host-master", True),
        ("host-exp_avg", False),
        ("host-exp_avg_sq", False),
        ("host-accumulator", False),
    ]
