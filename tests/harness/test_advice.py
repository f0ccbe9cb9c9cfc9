"""Where memory is short: looked for before anything is built, told in one line, and every command that is named works."""

from __future__ import annotations

import os
import shlex
from collections.abc import Iterator
from pathlib import Path

import pytest

from harness import cli, running
from harness.channel import Channel, WorkerJob
from harness.command import command
from harness.plan_spec import PlanSpec
from harness.record import Record
from harness.spec import RunSpec
from systems.machine.limits import CGROUP_ROOT
from systems.registry import find
from tests.systems.setups import in_turn

STRATEGIES = [name for name, entry in find().items() if entry.exposes == "STRATEGY"]
SMALL = ("--set", "hidden_size=32", "num_heads=2", "ffn_size=64", "vocab_size=128", "num_layers=3", "--seq-len", "16")


HOST_NEED = 520 * 1024  # of the small model


@pytest.fixture
def channel() -> Iterator[Channel]:
    read_end, write_end = os.pipe()
    yield Channel(write_end)
    os.close(read_end)
    os.close(write_end)


def carry_out(spec: RunSpec, channel: Channel, host: int = 8 << 30) -> Record:
    job = WorkerJob(
        spec=spec,
        run_id="run",
        started_at="2026-11-29T00:00:00+00:00",
        replicate=0,
        parent_pid=os.getppid(),
        descriptor=0,
        host_budget_bytes=host,
        cgroup_root=str(CGROUP_ROOT),
        advise=True,
    )
    return running.run(job, channel, import_s=0.0)


def asked(tmp_path: Path, *arguments: str) -> RunSpec:
    small = ("--model", "opt-tiny", "--device", "cpu", *SMALL, "--steps", "1", "--data", "synthetic")
    given = (*small, "--results", str(tmp_path), *arguments)
    return cli.parse(RunSpec, given, prog="harness run")


def commands(record: Record) -> list[list[str]]:
    assert record.reason is not None and record.reason.tier is not None
    return [shlex.split(line.rpartition(": ")[2]) for line in record.reason.advice]


BOTH = ("--device-memory", "64KiB", "--host-memory", "300KiB", "--batch-size", "2")  # are too small
CASES = [
    *(pytest.param(name, BOTH, marks=() if name == "elixir" else pytest.mark.slow) for name in STRATEGIES),
    pytest.param("resident", ("--device-memory", "800KiB", "--batch-size", "8"), marks=pytest.mark.slow),
    ("resident", ("--device-memory", "300KiB", "--batch-size", "1")),
]


@pytest.mark.parametrize(("system", "budgets"), CASES)
def test_every_command_that_is_named_works(
    system: str, budgets: tuple[str, ...], tmp_path: Path, channel: Channel, capsys: pytest.CaptureFixture[str]
) -> None:
    record = carry_out(asked(tmp_path, "--system", system, *budgets), channel)
    assert record.status in ("refused", "oom") and record.reason is not None
    if record.status == "refused":
        assert record.reason.phase == "room" and "build" not in record.phases_s
    assert "Traceback" not in capsys.readouterr().err and any("Error" in line for line in record.reason.log)
    plan, *runs = commands(record)
    assert plan[:2] == ["harness", "plan"] and cli.main(plan[1:]) == 1
    assert runs, record.reason
    for each in runs:
        assert each[:2] == ["harness", "run"]
        found = carry_out(cli.parse(RunSpec, each[2:], prog="harness run"), channel)
        assert found.status == "ok", (each, found.reason)


def test_a_package_without_plans_is_told_to_ask_for_those_that_have(tmp_path: Path, channel: Channel) -> None:
    spec = asked(tmp_path, "--system", "fsdp2-offload", "--dtype", "fp32", "--host-memory", "1KiB", "--device", "cpu")
    (plan,) = commands(carry_out(spec, channel))
    assert plan[:4] == ["harness", "plan", "--system", "all"] and cli.main(plan[1:]) in (0, 1)


@pytest.mark.parametrize(
    ("system", "host", "device"),
    in_turn(STRATEGIES, [(HOST_NEED + 400 * 1024, 400 * 1024), (5 * HOST_NEED, 5 * HOST_NEED)]),
)
def test_device_and_host_that_are_one_memory_have_to_fit_it_together(
    system: str, host: int, device: int, tmp_path: Path, channel: Channel, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A model whose states would fit either alone."""

    def of_a_machine_with(nbytes: int) -> Record:
        limits = running.read_limits().model_copy(update={"host_budget_bytes": nbytes})
        monkeypatch.setattr("systems.machine.budgets.read_limits", lambda: limits)
        return carry_out(asked(tmp_path, "--system", system, "--batch-size", "1"), channel, host=nbytes)

    record = of_a_machine_with(HOST_NEED + 32 * 1024)
    assert record.status == "refused" and record.reason is not None and record.reason.phase == "room"
    assert "the emulated device, which is host memory too" in record.reason.message
    record = of_a_machine_with(host)
    assert record.status == "ok" and record.memory.device_budget_bytes == device


def test_a_command_is_what_was_asked_for() -> None:
    given = ("--system", "x", "--model", "a b", "--recompute", "0-2", "--option", "a=1", "b=2", "--device-memory", "1792KiB")
    spec = cli.parse(RunSpec, (*given, "--set", "num_layers=4", "x=1", "--phases"), prog="harness run")
    typed = command("run", spec, {"num_layers": 2})
    again = cli.parse(RunSpec, shlex.split(typed)[2:], prog="harness run")
    assert again == spec.model_copy(update={"set": ("x=1", "num_layers=2")})
    assert "'a b'" in typed and "1792KiB" in typed and "--lr" not in typed
    plan = PlanSpec(system="x", model="y", hardware="h", steps=3)
    assert "--steps" not in command("plan", plan)
