"""Who may use an engine when: nobody while values are out to be written, and no forked process at all."""

from __future__ import annotations

import os
import signal
import warnings
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

import systems
from systems.errors import UnsupportedError
from systems.system import Engine
from tests.systems.models_plain import build, squared_error
from tests.systems.models_small import tokens
from tests.systems.running import RESIDENT, assert_equal, finished, one_step, parameters_of, settings, start
from tests.systems.setups import SYSTEMS

ALL = {"resident": (RESIDENT, RESIDENT.Options()), **SYSTEMS}
BATCH = tokens(1, 1)[0]
Use = Callable[[Any], object]
USES: dict[str, Use] = {
    "forward": lambda engine: squared_error(engine, BATCH[0], 1),
    "step": lambda engine: engine.step(),
    "summon": lambda engine: engine.summon().__enter__(),
    "summon to write": lambda engine: engine.summon(write=True).__enter__(),
    "state_dict": lambda engine: engine.state_dict(),
    "checkpoint": lambda engine: systems.save_checkpoint(engine, Path("/nowhere")),
    "close": lambda engine: engine.close(),
}


def started(system: str) -> Engine:
    chosen, options = ALL[system]
    return start(chosen, build("stack"), settings(device_memory=1 << 20 if system == "resident" else 160 << 10), options)


@pytest.mark.parametrize("system", ALL)
@pytest.mark.one_in(2)
def test_within_a_summon_that_writes_nothing_else_is_done(system: str) -> None:
    engine = started(system)
    one_step(engine, BATCH, squared_error)
    name = next(iter(parameters_of(engine)))
    with engine.summon(write=True) as values:
        values[name].zero_()
        for use in USES.values():
            with pytest.raises(UnsupportedError, match=r"^summon\(write=True\) is open"):
                use(engine)
    assert not parameters_of(engine)[name].any()
    with pytest.raises(ZeroDivisionError), engine.summon(write=True) as values:
        values[name].fill_(1 / 0)
    with engine.summon(), engine.summon(write=True) as values:
        values[name].fill_(1.0)
    assert bool((parameters_of(engine)[name] == 1.0).all())
    finished(engine, [one_step(engine, BATCH, squared_error)])


def fail_within(engine: Engine) -> None:
    summoned = engine.summon(write=True)
    summoned.__enter__()
    engine.step()


@pytest.mark.parametrize("system", ALL)
def test_an_error_within_it_lets_the_engine_close(system: str) -> None:
    engine = started(system)
    with pytest.raises(UnsupportedError, match="is open"), engine:
        fail_within(engine)
    with pytest.raises(ValueError, match="closed"):
        squared_error(engine, BATCH[0], 1)


def in_a_child(work: Callable[[], None]) -> int:
    """Its exit status: 0 if `work` came to its end."""
    with warnings.catch_warnings(action="ignore"):  # of forking with threads, which is what this is about
        child = os.fork()
    if child:
        return os.waitstatus_to_exitcode(os.waitpid(child, 0)[1])
    status = 1
    try:
        signal.alarm(20)
        work()
        status = 0
    finally:
        os._exit(status)


@pytest.mark.parametrize("system", ALL)
@pytest.mark.one_in(3)
def test_a_forked_process_is_told_and_ends(system: str) -> None:
    engine = started(system)
    losses = [one_step(engine, BATCH, squared_error)]

    def work() -> None:
        for use in (*list(USES.values())[:-1], lambda engine: engine.drain(), lambda engine: engine.set_lr(0.1)):
            with pytest.raises(RuntimeError, match="belongs to the process that it was made in"):
                use(engine)
        if system != "resident":  # which does not need the device's threads for that
            with pytest.raises(RuntimeError, match="belongs to the process"), torch.no_grad():
                engine.module(torch.zeros(2, 48))
        engine.close()

    assert in_a_child(work) == 0
    losses.append(one_step(engine, BATCH, squared_error))
    other = started("resident")
    assert_equal(finished(other, [one_step(other, BATCH, squared_error) for _ in range(2)]), finished(engine, losses))
