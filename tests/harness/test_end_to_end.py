"""The command line with the real process of a run, in a clean and in a hostile environment (cases C36, C48, C52, C66)."""

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest

from harness import store
from tests.harness.processes import START_S, dummy, start

# What Python does first in every process started with this on its path: no way out but to this machine.
NO_NETWORK = """
import socket
def refuse(self, address):
    if self.family != socket.AF_UNIX and str(address[0]) not in ("127.0.0.1", "::1", "localhost"):
        raise OSError(101, "Network is unreachable")
    return original(self, address)
class Socket(socket.socket):
    connect = refuse
original, socket.socket = socket.socket.connect, Socket
socket.getaddrinfo = socket.gethostbyname = lambda *_, **__: (_ for _ in ()).throw(socket.gaierror(-3, "no name server"))
"""


def hashes(folder: Path) -> dict[str, str]:
    return {path.name: hashlib.sha256(path.read_bytes()).hexdigest() for path in folder.iterdir()}


@pytest.mark.parametrize("reference", ["dummy", pytest.param("resident", marks=pytest.mark.slow)])
def test_a_machine_with_nothing_but_cores(tmp_path: Path, reference: str) -> None:
    """Case C52: no CUDA device, no network, a HOME that cannot be written to; the comparison runs on the emulated device."""
    (tmp_path / "sitecustomize.py").write_text(NO_NETWORK)
    results = tmp_path / "results"
    packages = os.pathsep.join([str(tmp_path), *filter(None, [os.environ.get("PYTHONPATH")])])
    hostile = {"CUDA_VISIBLE_DEVICES": "", "HOME": "/proc/nowhere", "PYTHONPATH": packages, "HF_HOME": "/proc/nowhere"}
    flags = [
        "--model",
        "opt-tiny",
        "--set",
        "num_layers=2",
        "--steps",
        "3",
        "--warmup",
        "1",
        "--repeat",
        "1",
        "--dtype",
        "fp32",
    ]
    systems = ["--system", reference, "--system", "elixir:prefetch=1"]
    with start("compare", *systems, *flags, "--results", str(results), env=hostile) as process:
        out, err = process.communicate(timeout=4 * START_S)
    assert process.returncode == 0, err
    (line,) = out.splitlines()
    rows = json.loads(line)["rows"]
    assert [row["status"] for row in rows] == ["ok", "ok"]
    assert rows[1]["speed_ratio"]["verdict"] == "too few runs"
    assert rows[1]["configuration"]["options"]["prefetch"] == 1
    if reference == "resident":
        assert rows[1]["losses"] == rows[0]["losses"]
    records, _ = store.read_all(results)
    for record in records:
        assert record.resolved.device_label == record.environment.hardware.device_name == "cpu-emulated"
        assert record.metrics.mfu is None
        assert record.resolved.peak_flops_per_s is None
        assert record.memory.host_budget_bytes
    assert "mfu" not in err.lower()


@pytest.mark.slow
def test_bad_input_that_only_the_worker_sees_is_one_line_too(tmp_path: Path) -> None:
    with start(*dummy(tmp_path, options=("crash=2",))) as process:
        out, err = process.communicate(timeout=START_S)
    assert (process.returncode, out) == (2, "")
    assert err == "harness: unknown option of dummy 'crash': did you mean crash_at?\n"
    assert list(tmp_path.iterdir()) == []


@pytest.mark.slow
def test_a_crash_keeps_its_last_lines_and_touches_no_earlier_record(tmp_path: Path) -> None:
    (tmp_path / "earlier.json").write_text("{}")
    before = hashes(tmp_path)
    with start(*dummy(tmp_path, options=("crash_at=3",))) as process:
        out, err = process.communicate(timeout=START_S)
    assert process.returncode == 1
    record = json.loads(out.splitlines()[-1])
    assert record["status"] == "failed"
    assert record["reason"]["message"] == "RuntimeError: the script says that step 3 crashes"
    assert record["reason"]["log"][-1] == record["reason"]["message"]
    assert 5 < len(record["reason"]["log"]) <= 20
    assert "Traceback" in err
    after = hashes(tmp_path)
    assert after.pop(record["run_id"] + ".json")
    assert after == before


@pytest.mark.slow
def test_one_json_line_a_run_and_each_in_its_own_process(tmp_path: Path) -> None:
    with start(*dummy(tmp_path, "--repeat", "2", "--tag", "pair", options=("step_time_s=0.01",))) as process:
        out, err = process.communicate(timeout=2 * START_S)
    assert process.returncode == 0, err
    printed = [json.loads(line) for line in out.splitlines()]
    assert [record["replicate"] for record in printed] == [0, 1]
    records, unreadable = store.read_all(tmp_path)
    assert unreadable == []
    assert [record.model_dump(mode="json") for record in records] == printed
    assert {record.spec.tag for record in records} == {"pair"}
    assert records[0].metrics.loss == records[1].metrics.loss
    assert records[0].wall_s is not None
    assert "step 4/4" in err


@pytest.mark.slow
@pytest.mark.parametrize("option", ["exit_at=0", "exit_at=2", "segfault_at=2", "signal_at=1", "hang_at=1"])
def test_deaths_of_the_real_process(tmp_path: Path, option: str) -> None:
    with start(*dummy(tmp_path, "--timeout", "20", options=(option,))) as process:
        out, _ = process.communicate(timeout=START_S)
    assert process.returncode == 1
    record = json.loads(out.splitlines()[-1])
    assert record["status"] == ("timeout" if option == "hang_at=1" else "failed")
    assert record["resolved"]["clock"]
    assert record["environment"]["versions"]["torch"]
    assert record["memory"]["host_rss_peak_bytes"] > 50 << 20


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_elixir_deepspeed_and_resident_compared(tmp_path: Path) -> None:
    pytest.importorskip("deepspeed")
    systems = ["elixir", "deepspeed-zero3-offload", "resident"]
    flags = [flag for system in systems for flag in ("--system", system)]
    arguments = ["compare", *flags, "--model", "opt-tiny", "--device", "cpu", "--repeat", "3", "--results", str(tmp_path)]
    with start(*arguments) as process:
        out, err = process.communicate(timeout=10 * START_S)
    assert process.returncode == 0, err
    made = json.loads(out.splitlines()[-1])
    assert [(row["status"], row["n"]) for row in made["rows"]] == [("ok", 3)] * 3
    assert all(row["losses"]["max_relative_deviation"] < 2e-2 for row in made["rows"])
    assert made["rows"][1]["configuration"]["package"].startswith("deepspeed ")
    assert made["rows"][1]["configuration"]["real_package"] is True
    assert made["rows"][1]["configuration"]["statistics"]["config"]["zero_optimization"]["stage"] == 3
    assert made["refusals"] == []
    assert len(store.read_all(tmp_path)[0]) == 9
