"""The first build of anything takes long and says nothing itself, so it is announced, and only where it is one."""

from __future__ import annotations

import hashlib
import logging
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch

from systems.adam import cuda
from systems.baselines.external import extensions
from systems.native import build


@pytest.fixture
def told() -> Iterator[list[str]]:
    """What the library has said, whatever else listens to it."""
    lines: list[str] = []

    class Listener(logging.Handler):
        def emit(self, record: logging.LogRecord) -> None:
            lines.append(record.getMessage())

    logger, listener = logging.getLogger("systems"), Listener()
    level = logger.level
    logger.addHandler(listener)
    logger.setLevel(logging.INFO)
    yield lines
    logger.removeHandler(listener)
    logger.setLevel(level)


def test_a_native_build_is_announced_once(told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))

    def compiled(command: list[str], flags: list[str], library: Path) -> None:
        assert len(told) == 1  # before it begins
        library.write_bytes(b"code" + hashlib.sha256(b"code").digest())
        library.chmod(0o755)

    monkeypatch.setattr(build, "_compile", compiled)
    paths = {build._built("adam", build.ADAM_SOURCES, build.ADAM_FLAGS) for _ in range(3)}
    assert len(paths) == 1
    assert [line.split(" with ")[0] for line in told] == ["building adam.cpp"]
    assert "once" in told[0] and str(tmp_path) in told[0]


@pytest.mark.parametrize("there", [False, True])
def test_a_package_s_build_is_announced_where_its_library_is_not_there(
    there: bool, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv(extensions.VARIABLE, str(tmp_path))
    (tmp_path / "cpu_adam").mkdir()
    (tmp_path / "cpu_adam" / "build.ninja").touch()  # of one that was broken off
    if there:
        (tmp_path / "cpu_adam" / "cpu_adam.so").touch()
    with extensions.building():
        extensions.tell_of_build("DeepSpeed's cpu_adam", "cpu_adam")
    assert [line.split(":")[0] for line in told] == ([] if there else ["building DeepSpeed's cpu_adam"])
    assert all("once" in line and str(tmp_path) in line for line in told)


@pytest.mark.parametrize("there", [False, True])
def test_so_is_what_triton_compiles(there: bool, told: list[str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TRITON_CACHE_DIR", str(tmp_path))
    monkeypatch.setattr(cuda, "HAS_TRITON", True)
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    (tmp_path / "abc").mkdir()
    (tmp_path / "abc" / "another_kernel.json").touch()
    if there:
        (tmp_path / "abc" / f"{cuda.UPDATE_KERNEL}.json").touch()
    assert cuda.cuda_kernel().name == "triton"
    assert [line.split(" with ")[0] for line in told] == ([] if there else ["compiling the Adam kernel"])


def test_triton_keeps_its_files_by_the_kernel_s_name() -> None:
    assert f"def {cuda.UPDATE_KERNEL}(" in Path(cuda.__file__).read_text()
