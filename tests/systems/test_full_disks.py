"""Folders for optimizer states that are no disk, or have no room: refused by name, whichever system is to use them."""

from __future__ import annotations

import errno
import os
import shutil
from pathlib import Path
from typing import Any

import pytest

from systems import registry
from systems.device.memory import disk as disk_module
from systems.errors import BudgetError, UnsupportedError
from systems.machine import budgets as machine
from tests.systems import every
from tests.systems.models_small import tokens
from tests.systems.running import settings, start, train
from tests.systems.setups import budget_of
from tests.systems.test_disk import SETUPS, with_disk


@pytest.mark.parametrize("name", [name for name, system in every.STRATEGIES.items() if system.abilities.disk])
def test_a_folder_in_memory_and_a_full_one_are_refused_by_name(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    system, asked = (
        registry.get(name),
        settings(device_memory=budget_of(SETUPS[0], "half"), disk=tmp_path, host_memory=1_500_000),
    )
    monkeypatch.setattr(machine.shutil, "disk_usage", lambda _: shutil._ntuple_diskusage(10, 10, 0))
    with pytest.raises(BudgetError, match=rf"\(0B are free on the disk of {tmp_path}\)") as full:
        start(system, SETUPS[0].build(), asked)
    assert full.value.tier == "host"
    monkeypatch.setattr(machine, "in_memory", lambda folder: "tmpfs")
    with pytest.raises(UnsupportedError, match=rf"{tmp_path} is in memory \(tmpfs\).*name a folder on a disk"):
        start(system, SETUPS[0].build(), asked)
    assert os.listdir(tmp_path) == []


def test_a_disk_that_is_full_after_all_is_told_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Some file systems promise room and do not have it."""
    engine = with_disk(SETUPS[0], "angel-ptm", "tight", tmp_path)

    def fails(*_: Any) -> int:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(disk_module.os, "pwritev", fails)
    with pytest.raises(OSError, match="No space left on device, with optimizer states on the disk") as full:
        train(engine, tokens(3, 1))
    assert (full.value.errno, full.value.filename) == (errno.ENOSPC, str(tmp_path))
    monkeypatch.undo()
    engine.close()
