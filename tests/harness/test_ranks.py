"""Several ranks of one run as processes: one rank's figures where they have to be, and each way that a rank can end."""

from __future__ import annotations

import json
import os
import shlex
import signal
import socket
import subprocess
import sys
import time
import uuid
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import pytest
import torch
from rich.console import Console

from harness import cli, launch, ranks
from harness.likeness import alike, differences
from harness.record import MemoryPeaks, Record
from harness.spec import BadInputError
from systems.machine.threads import cores_each
from tests.harness.conftest import make_record, make_spec
from tests.harness.processes import LIGHT, MARK, ROOT, START_S, command_line, dummy, environment, marked, start, wait_for

END_S = 30.0
STRATEGIES = ("angel-ptm", "elixir", "h3t", "patrickstar")
ASKED: dict[str, Any] = {"dtype": "fp32", "clip": 0.5, "eval_every": 2, "steps": 3, "seed": 3, "option": ()}


def run_apart(*options: str, **fields: Any) -> Record:
    with open(os.devnull, "w") as nowhere:
        return launch.launch(make_spec(*options, **fields), console=Console(file=nowhere), stuck_s=1.0)


def run_system(system: str, **fields: Any) -> Record:
    return run_apart(**{"system": system, **ASKED, **fields})


@pytest.fixture
def mark(monkeypatch: pytest.MonkeyPatch) -> str:
    """Processes of this test have it."""
    found = uuid.uuid4().hex
    monkeypatch.setenv(MARK, found)
    monkeypatch.setenv("OMP_NUM_THREADS", "1")
    return found


@pytest.fixture
def light(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(launch, "WORKER", LIGHT)


def nothing_is_left(mark: str) -> bool:
    return wait_for(lambda: not marked(mark), 5.0)


# ---- what a run on ranks finds


def oracle(run_here: Callable[..., Record], ranks: int) -> Record:
    return run_here(make_spec(**{"system": "resident", **ASKED, "accumulate": ranks}))


def assert_is_one_rank(found: Record, expected: Record, ranks: int) -> None:
    """To the last bit, over steps that each change all that follows."""
    assert found.status == "ok", found.reason
    assert found.samples.micro_batch_loss == expected.samples.micro_batch_loss
    assert found.metrics.loss == expected.metrics.loss
    assert found.metrics.grad_norm_before_clip == expected.metrics.grad_norm_before_clip
    assert (found.metrics.eval_step, found.metrics.eval_loss) == (expected.metrics.eval_step, expected.metrics.eval_loss)
    assert found.resolved.tokens_per_step == expected.resolved.tokens_per_step
    assert found.resolved.global_batch_samples == expected.resolved.global_batch_samples
    assert (found.spec.ranks, len(found.memory_by_rank)) == (ranks, ranks)


@pytest.mark.long
def test_two_ranks_are_one_that_accumulates(run_here: Callable[..., Record], mark: str, tmp_path: Path) -> None:
    expected = oracle(run_here, 2)
    whole = run_system("resident", ranks=2)
    assert_is_one_rank(whole, expected, 2)
    budget = int(0.6 * (expected.memory.device_peak_bytes or 0))
    kept = str(tmp_path / "kept")
    found = run_system("elixir", ranks=2, device_memory=budget, host_memory="2GiB", checkpoint=kept)
    assert_is_one_rank(found, expected, 2)
    mine, each = found.memory, found.memory_by_rank
    assert mine.device_peak_bytes == max(rank.device_peak_bytes or 0 for rank in each) <= budget
    assert mine.device_budget_bytes == budget
    assert mine.host_budget_bytes == 2 << 30
    for name in ("host_peak_bytes", "host_rss_peak_bytes"):
        assert getattr(mine, name) == sum(getattr(rank, name) for rank in each)
    assert found.traffic.gather_bytes and found.traffic.reduce_bytes
    assert (whole.memory.host_peak_bytes, found.environment.threads.intra_op) == (0, 1)
    assert nothing_is_left(mark)
    assert_goes_on(kept, run_here)


def assert_goes_on(kept: str, run_here: Callable[..., Record]) -> None:
    """One rank with as many micro-batches, from what two have saved, as if nobody had stopped."""
    asked = {"system": "resident", **ASKED, "accumulate": 2, "steps": 5}
    whole = run_here(make_spec(**asked))
    with pytest.warns(UserWarning, match="was saved by 2 ranks and goes on with 1 rank"):
        after = run_here(make_spec(**asked, resume=kept))
    assert after.status == "ok", after.reason
    assert after.metrics.loss == whole.metrics.loss[3:]
    assert after.metrics.grad_norm_before_clip == whole.metrics.grad_norm_before_clip[3:]
    assert any("--resume: of 2 ranks, and 1 go on: dropout begins anew" in note for note in after.notes)


@pytest.mark.slow
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("size", [2, 3])
def test_each_strategy_on_ranks(strategy: str, size: int, run_here: Callable[..., Record], mark: str) -> None:
    expected = oracle(run_here, size)
    budget = int(0.6 * (expected.memory.device_peak_bytes or 0))
    assert_is_one_rank(run_system(strategy, ranks=size, device_memory=budget), expected, size)


@pytest.mark.slow
def test_a_trace_and_phases_are_one_more_step_of_all_ranks(tmp_path: Path, mark: str) -> None:
    found = run_system("elixir", ranks=2, trace=str(tmp_path / "step.json"), phases=True)
    assert found.status == "ok", found.reason
    assert (tmp_path / "step.json").stat().st_size > 0
    assert found.phases_s["phase.gather"] > 0


def test_figures_of_hosts_and_devices() -> None:
    by_rank = [
        MemoryPeaks(host=0, device_peak_bytes=3, host_peak_bytes=10, disk_direct=True),
        MemoryPeaks(host=0, device_peak_bytes=5, host_peak_bytes=11, disk_direct=True),
        MemoryPeaks(host=1, device_peak_bytes=4, host_peak_bytes=20, disk_direct=False),
    ]
    assert ranks.together(by_rank) == {"device_peak_bytes": 5, "host_peak_bytes": 21, "disk_direct": False}


@pytest.mark.slow
def test_baselines_of_torch_are_compared_on_ranks(tmp_path: Path, mark: str, capsys: pytest.CaptureFixture[str]) -> None:
    """The same work, with each device's and the host's budget; what a package does not tell of its links stays unknown."""
    flags = ["--model", "opt-tiny", "--device", "cpu", "--dtype", "fp32", "--steps", "3", "--clip", "0.5", "--ranks", "2"]
    flags += ["--host-memory", "2GiB", "--device-memory", "1GiB", "--repeat", "1", "--results", str(tmp_path)]
    systems = ["--system", "resident", "--system", "torch-ddp", "--system", "fsdp2-offload"]
    code = cli.main(["compare", *systems, *flags])
    told = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert (code, [row["status"] for row in told["rows"]]) == (0, ["ok"] * 3)
    assert told["refusals"] == []
    for row in told["rows"][1:]:
        assert row["speed_ratio"] is not None
        assert row["losses"]["max_relative_deviation"] < 1e-5
    kept = [Record.model_validate_json(path.read_text()) for path in tmp_path.iterdir()]
    assert [(len(record.memory_by_rank), record.memory.host_budget_bytes) for record in kept] == [(2, 2 << 30)] * 3
    assert {record.traffic.reduce_bytes for record in kept if record.spec.system != "resident"} == {None}
    assert nothing_is_left(mark)


def test_other_ranks_are_other_work() -> None:
    """Of equal batches too: twice the devices are another machine."""
    one, two = (make_record(spec=make_spec(ranks=ranks), resolved={"global_batch_samples": 4 * ranks}) for ranks in (1, 2))
    equal = make_record(spec=make_spec(ranks=2), resolved={"global_batch_samples": 4})
    assert {each.fact for each in differences(two, one) if each.refused} >= {"ranks", "global batch in samples"}
    assert "ranks" in {each.fact for each in differences(equal, one) if each.refused}
    assert not alike(equal, one)


def test_more_processes_than_the_host_holds_are_not_started(tmp_path: Path) -> None:
    with start(*dummy(tmp_path, "--ranks", "1000000"), light=True) as process:
        out, err = process.communicate(timeout=START_S)
    assert (process.returncode, out, err.count("\n")) == (2, "", 1)
    assert "--ranks 1000000: each is a process of 128MiB and more, of which this host holds" in err


# ---- torchrun


def commands_of_the_document() -> list[list[str]]:
    """Those of docs/several-gpus.md, as programs of this Python."""
    text = (ROOT / "docs" / "several-gpus.md").read_text()
    programs = {"harness": "harness", "torchrun": "torch.distributed.run"}
    lines = [line for block in text.split("```")[1::2] for line in block.strip().splitlines()]
    return [[word for each in shlex.split(line) for word in _as_program(each, programs)] for line in lines]


def _as_program(word: str, programs: Mapping[str, str]) -> list[str]:
    return [sys.executable, "-m", programs[word]] if word in programs else [word]


@pytest.mark.slow
def test_the_commands_of_the_document(tmp_path: Path, mark: str) -> None:
    """One starts its ranks itself, of the other each command starts its own; the first one prints and keeps."""
    found = []
    of_one_host = [command for command in commands_of_the_document() if "--nnodes" not in command]
    for number, command in enumerate(of_one_host):
        results = tmp_path / str(number)
        done = subprocess.run(
            [*command, "--results", str(results)],
            cwd=ROOT,
            capture_output=True,
            text=True,
            timeout=4 * START_S,
            env=environment(mark, {"PYTHONPATH": str(ROOT)}),
        )
        assert done.returncode == 0, done.stderr
        (line,) = done.stdout.splitlines()
        (kept,) = results.iterdir()
        assert json.loads(line) == json.loads(kept.read_text())
        found.append(Record.model_validate_json(line))
        assert nothing_is_left(mark)
    itself, launched, shared = found
    assert (itself.spec.ranks, launched.spec.ranks, len(launched.memory_by_rank)) == (2, 2, 2)
    assert itself.metrics.loss == launched.metrics.loss
    assert itself.metrics.grad_norm_before_clip == launched.metrics.grad_norm_before_clip
    assert itself.memory.device_peak_bytes == launched.memory.device_peak_bytes
    assert shared.resolved.shape is not None and shared.resolved.shape["expert_ranks"] == 2
    assert shared.traffic.exchange_bytes


def agents(mark: str, folder: Path, *more: str) -> list[subprocess.Popen[str]]:
    """The document's command for several hosts, as it is called on each of two, both here."""
    (command,) = [command for command in commands_of_the_document() if "--nnodes" in command]
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    command[command.index("--rdzv-endpoint") + 1] = f"localhost:{port}"
    return [
        subprocess.Popen(
            [*command, *more, "--results", str(folder)],
            cwd=ROOT,
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
            text=True,
            env={k: v for k, v in environment(mark, {"PYTHONPATH": str(ROOT)}).items() if k != "OMP_NUM_THREADS"},
        )
        for _ in range(2)
    ]


@pytest.mark.slow
def test_two_agents_of_torchrun_are_one_run(tmp_path: Path, mark: str) -> None:
    """Each starts local rank 0, on one machine here: its memory and cores are shared by both, whatever they were told."""
    expected = run_apart(system="elixir", device_memory=6 << 20, host_memory=1 << 30, ranks=2, option=(), steps=3)
    started = agents(mark, tmp_path, "--host-memory", "1GiB", "--steps", "3")
    said = [process.communicate(timeout=4 * START_S) for process in started]
    assert [process.returncode for process in started] == [0, 0], said
    (line,) = "".join(out for out, _ in said).splitlines()
    (kept,) = tmp_path.iterdir()
    assert json.loads(line) == json.loads(kept.read_text())
    found = Record.model_validate_json(line)
    assert found.metrics.loss == expected.metrics.loss
    assert [each.host for each in found.memory_by_rank] == [0, 0]
    assert found.memory.host_budget_bytes == expected.memory.host_budget_bytes == 1 << 30
    assert found.environment.threads.intra_op == cores_each(2)
    assert nothing_is_left(mark)


@pytest.mark.slow
def test_a_rank_killed_on_one_host_ends_the_other(tmp_path: Path, mark: str) -> None:
    """The first rank's record says that another one is gone, the other's command which one and why."""
    dead = ("--system", "dummy", "--steps", "4", "--warmup", "1", "--option", "signal_at=2", "rank=1")
    started = agents(mark, tmp_path, *dead)
    said = [process.communicate(timeout=4 * START_S) for process in started]
    assert all(process.returncode for process in started)
    (line,) = "".join(out for out, _ in said).splitlines()
    record = Record.model_validate_json(line)
    assert (record.status, record.reason and record.reason.follows) == ("failed", True)
    assert record.wall_s is not None and record.wall_s < END_S
    assert "rank 1: killed by SIGKILL in phase step" in "".join(err for _, err in said)
    assert nothing_is_left(mark)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "told", "printed"),
    [
        (("crash_at=2",), "rank 1: RuntimeError: the script says that step 2 crashes", ""),
        (("signal_at=2",), "rank 0: PeerGoneError: another rank is gone", "harness: rank 1: killed by SIGKILL in phase step"),
    ],
)
def test_how_a_rank_of_torchrun_ended(options: tuple[str, ...], told: str, printed: str, tmp_path: Path, mark: str) -> None:
    """An error is in the first rank's record; of a killed one its own command tells."""
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "-m", "harness"]
    flags = dummy(tmp_path, options=(*options, "rank=1"))
    done = subprocess.run(
        [*command, *flags], cwd=ROOT, capture_output=True, text=True, timeout=4 * START_S, env=environment(mark)
    )
    assert done.returncode != 0
    record = Record.model_validate_json(done.stdout.splitlines()[-1])
    assert record.status == "failed" and record.reason is not None
    assert record.reason.message.startswith(told)
    assert printed in done.stderr
    assert nothing_is_left(mark)


@pytest.mark.slow
def test_a_killed_agent_leaves_nothing(tmp_path: Path, mark: str) -> None:
    """It tells nobody; its commands see that it is gone."""
    agent = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", "--no-python"]
    commands = command_line(*dummy(tmp_path, options=("hang_at=1",)), light=True)
    with subprocess.Popen([*agent, *commands], cwd=ROOT, stderr=subprocess.DEVNULL, env=environment(mark)) as process:
        assert wait_for(lambda: len(marked(mark)) == 7, START_S)  # the agent, and twice a command, a rank and a guard
        process.kill()
    assert wait_for(lambda: not marked(mark), END_S)
    (kept,) = tmp_path.iterdir()
    record = Record.model_validate_json(kept.read_text())
    assert (record.status, record.reason and record.reason.signal) == ("interrupted", "SIGHUP")


@pytest.mark.parametrize(
    ("command", "told"),
    [
        (("run", "--ranks", "3"), "--ranks 3: WORLD_SIZE is 2: leave --ranks out under torchrun"),
        (("run", "--repeat", "2"), "--repeat 2: torchrun starts one run"),
        (("compare", "--system", "resident"), "of all commands torchrun starts harness run alone"),
        (("max-scale",), "of all commands torchrun starts harness run alone"),
        (("max-batch",), "of all commands torchrun starts harness run alone"),
    ],
)
def test_what_torchrun_cannot_start(command: tuple[str, ...], told: str, monkeypatch: pytest.MonkeyPatch, capsys: Any) -> None:
    said = {"RANK": "0", "WORLD_SIZE": "2", "LOCAL_RANK": "0", "LOCAL_WORLD_SIZE": "2"}
    for name, value in {**said, "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}.items():
        monkeypatch.setenv(name, value)
    first, *rest = command
    assert cli.main([first, "--system", "dummy", "--model", "opt-tiny", *rest]) == 2
    assert told in capsys.readouterr().err


# ---- how ranks end


@pytest.mark.parametrize(
    ("options", "status", "signal_name", "exit_code", "told"),
    [
        (("signal_at=2",), "failed", "SIGKILL", None, "rank 1: killed by SIGKILL in phase step"),
        (("signal_at=0", "others=follow"), "failed", "SIGKILL", None, "rank 1: killed by SIGKILL in phase initialize"),
        (("exit_at=2",), "failed", None, 3, "rank 1: the process ended with exit code 3 in phase step"),
        (("crash_at=1",), "failed", None, 1, "rank 1: the process ended with exit code 1 in phase warm-up"),
        (("tell_at=0",), "oom", None, None, "rank 1: the script finds no room"),
        (("tell_at=0", "others=follow"), "oom", None, None, "rank 1: the script finds no room"),
    ],
)
@pytest.mark.usefixtures("light")
def test_one_rank_ends_all(
    options: tuple[str, ...], status: str, signal_name: str | None, exit_code: int | None, told: str, mark: str
) -> None:
    """Within seconds, and it is named; what others say of its absence is not the cause."""
    begun = time.monotonic()
    record = run_apart(*options, "rank=1", ranks=3)
    reason = record.reason
    assert reason is not None
    assert (record.status, reason.rank, reason.signal, reason.exit_code) == (status, 1, signal_name, exit_code)
    assert reason.message.startswith(told)
    assert time.monotonic() - begun < END_S
    assert nothing_is_left(mark)
    if "crash_at=1" in options:
        assert reason.log[-1] == "RuntimeError: the script says that step 1 crashes"


@pytest.mark.usefixtures("light")
def test_what_all_ranks_say_is_no_rank_s_own(mark: str) -> None:
    """Nor that the last of them were ended before they had gone by themselves."""
    record = run_apart("tell_at=0", ranks=2)
    assert record.reason is not None
    assert (record.status, record.reason.rank, record.reason.message) == ("oom", None, "the script finds no room")
    assert record.notes == []
    assert nothing_is_left(mark)


@pytest.mark.usefixtures("light")
def test_time_is_up_for_all_ranks(mark: str) -> None:
    record = run_apart("hang_at=1", "rank=1", ranks=2, timeout=2.0)
    assert (record.status, record.reason and record.reason.phase) == ("timeout", "initialize")
    assert nothing_is_left(mark)


@pytest.mark.usefixtures("light")
def test_bad_input_of_all_ranks_is_one_line(mark: str) -> None:
    with pytest.raises(BadInputError, match="a word"):
        run_apart("bad_input=a word", ranks=2)
    assert nothing_is_left(mark)


@pytest.mark.parametrize("number", [signal.SIGINT, signal.SIGTERM])
def test_stopping_the_command_stops_all_ranks(number: int, tmp_path: Path, mark: str) -> None:
    with start(*dummy(tmp_path, "--ranks", "3", options=("hang_at=1",)), light=True, mark=mark) as process:
        assert wait_for(lambda: len(marked(mark)) == 5, START_S)  # the command, three ranks and a guard
        time.sleep(0.5)
        process.send_signal(number)
        out, _ = process.communicate(timeout=START_S)
    assert process.returncode == 128 + number
    assert json.loads(out)["status"] == "interrupted"
    assert nothing_is_left(mark)


def test_a_killed_command_leaves_nothing(tmp_path: Path, mark: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TMPDIR", str(tmp_path))
    with start(*dummy(tmp_path / "results", "--ranks", "2", options=("hang_at=1",)), light=True, mark=mark) as process:
        assert wait_for(lambda: len(marked(mark)) == 4, START_S)
        assert wait_for(lambda: bool(list(tmp_path.glob("harness-ranks-*"))), START_S)
        process.kill()
        process.communicate(timeout=START_S)
    assert nothing_is_left(mark)
    assert not list(tmp_path.glob("harness-ranks-*"))


def test_a_rank_killed_among_real_ones(mark: str) -> None:
    """Those that wait for it are inside a collective."""
    record = run_apart("signal_at=2", "rank=1", ranks=2)
    assert record.reason is not None
    assert (record.status, record.reason.rank, record.reason.signal) == ("failed", 1, "SIGKILL")
    assert record.wall_s is not None and record.wall_s < END_S
    assert record.resolved.steps == 4
    assert nothing_is_left(mark)


@pytest.mark.slow
@pytest.mark.parametrize(
    ("options", "status", "told"),
    [
        (("crash_at=2",), "failed", "RuntimeError: the script says that step 2 crashes"),
        (("crash_at=0",), "failed", "RuntimeError: the script says that step 0 crashes"),
        (("oom_at=2",), "oom", "the script says so"),
        (("refuse=unsupported",), "refused", "the script cannot do this"),
        (("refuse=budget", "host_need=1"), "refused", "the script needs 1B of host memory"),
        (("diverge_at=2",), "diverged", "the script says that step 2 diverges"),
        (("exit_at=2",), "failed", "the process ended with exit code 3 in phase step"),
        (("segfault_at=2",), "failed", "killed by SIGSEGV in phase step"),
        (("extra_exchange_at=2",), "failed", "ranks wait for each other: rank 0 in"),
    ],
)
@pytest.mark.parametrize("rank", [0, 1])
def test_each_way_to_end_among_real_ranks(options: tuple[str, ...], status: str, told: str, rank: int, mark: str) -> None:
    record = run_apart(*options, f"rank={rank}", ranks=2)
    assert record.reason is not None
    stuck = "extra_exchange_at=2" in options  # which is no one's alone
    assert record.status == status
    assert record.reason.message.startswith(told if stuck else f"rank {rank}: {told}")
    assert record.reason.rank == (None if stuck else rank)
    if stuck:
        expected = {rank: "'what others do not' (number", 1 - rank: "'step 2' (number 2 of link)"}
        assert all(f"rank {each} in {waits}" in record.reason.message for each, waits in expected.items())
    assert record.wall_s is not None and record.wall_s < END_S
    assert nothing_is_left(mark)


def test_dropout_differs_from_rank_to_rank_and_repeats() -> None:
    def drawn(seed: int, rank: int) -> list[float]:
        ranks.seed_dropout(seed, rank)
        return list(torch.rand(4).tolist())

    assert drawn(7, 1) == drawn(7, 1)
    draws = {tuple(drawn(seed, rank)) for seed in (7, 8) for rank in range(3)}
    assert len(draws) == 6
    assert drawn(7, 0) == torch.rand(4, generator=torch.Generator().manual_seed(7)).tolist()
