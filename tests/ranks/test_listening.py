"""What ranks of one host listen on: its loopback, unless the user names another interface."""

from __future__ import annotations

import ipaddress
import json
import os
import socket
import subprocess
import sys
import time
import uuid
from pathlib import Path

import psutil
import pytest

from systems.errors import UnsupportedError
from systems.ranks import joining
from tests.harness.processes import ROOT, command_line, environment, marked

WORK = """
import json, os, sys, psutil, systems, torch
from tests.systems.models_small import build, next_token_loss, tokens
rank = int(os.environ["RANK"])
engine = systems.initialize(build("opt"), system=sys.argv[2], device="cpu", dtype="fp32", **json.loads(sys.argv[3]))
batch = tokens(1, 2)[0][rank]
engine.backward(next_token_loss(engine, batch, batch[:, 1:].numel()))
engine.step()
found = psutil.Process().net_connections("inet")
told = {kind: sorted({each.laddr.ip for each in found if each.status == status})
        for kind, status in (("listens", psutil.CONN_LISTEN), ("talks", psutil.CONN_ESTABLISHED))}
open(f"{sys.argv[1]}/told-{rank}", "w").write(json.dumps(told))
torch.distributed.barrier()
engine.close()
"""


def is_here_alone(address: str) -> bool:
    return ipaddress.ip_address(address.removeprefix("::ffff:")).is_loopback


def other_interface() -> tuple[str, str] | None:
    """Name and address of one that is no loopback, where this machine has one."""
    for name, addresses in psutil.net_if_addrs().items():
        for each in addresses:
            if each.family is socket.AF_INET and not is_here_alone(each.address):
                return name, each.address
    return None


def in_torchrun(folder: Path, system: str, interface: str | None, **given: object) -> list[dict[str, list[str]]]:
    """What each of two ranks listens on, and at which addresses it talks."""
    (folder / "work.py").write_text(WORK)
    command = [sys.executable, "-m", "torch.distributed.run", "--standalone", "--nproc-per-node", "2", str(folder / "work.py")]
    variables = environment(more={"PYTHONPATH": str(ROOT)})
    variables.pop(joining.INTERFACE, None)
    variables |= {} if interface is None else {joining.INTERFACE: interface}
    done = subprocess.run(
        [*command, str(folder), system, json.dumps(given)],
        env=variables, cwd=ROOT, capture_output=True, text=True, timeout=180,
    )  # fmt: skip
    assert done.returncode == 0, done.stderr
    return [json.loads((folder / f"told-{rank}").read_text()) for rank in range(2)]


@pytest.mark.parametrize("system", ["elixir", pytest.param("torch-ddp", marks=pytest.mark.slow)])
@pytest.mark.long
def test_ranks_of_torchrun_on_one_host_listen_on_its_loopback(system: str, tmp_path: Path) -> None:
    given = {"device_memory": "2MiB"} if system == "elixir" else {}
    for told in in_torchrun(tmp_path, system, None, **given):
        assert told["listens"]
        assert all(is_here_alone(each) for each in told["listens"] + told["talks"]), told


@pytest.mark.slow
def test_an_interface_that_the_user_names_is_listened_on(tmp_path: Path) -> None:
    """So what is seen above is what the variable rules."""
    found = other_interface()
    name, address = found or ("lo", "127.0.0.1")
    for told in in_torchrun(tmp_path, "elixir", name, device_memory="2MiB"):
        assert told["listens"] == [address]


@pytest.mark.long
def test_ranks_of_a_run_listen_on_the_loopback(tmp_path: Path) -> None:
    """Looked at from outside, all the time, and every process of it."""
    mark = uuid.uuid4().hex
    variables = environment(mark)
    variables.pop(joining.INTERFACE, None)
    given = ("run", "--system", "elixir", "--model", "opt-tiny", "--device", "cpu", "--device-memory", "6MiB", "--ranks", "2")
    command = command_line(*given, "--steps", "20", "--results", str(tmp_path))
    process = subprocess.Popen(command, cwd=ROOT, env=variables, stdout=subprocess.DEVNULL, stderr=subprocess.PIPE, text=True)
    seen: dict[int, set[str]] = {}
    while process.poll() is None:
        for pid in marked(mark):
            try:
                found = psutil.Process(pid).net_connections("inet")
            except psutil.Error:
                continue
            addresses = {each.laddr.ip for each in found if each.status == psutil.CONN_LISTEN}
            if addresses:
                seen.setdefault(pid, set()).update(addresses)
        time.sleep(0.1)
    assert process.stderr is not None
    assert process.returncode == 0, process.stderr.read()
    process.stderr.close()
    assert len(seen) == 2, seen
    assert all(is_here_alone(each) for addresses in seen.values() for each in addresses), seen


@pytest.mark.parametrize(
    ("said", "interface"),
    [
        ({}, "lo"),  # a meeting in a file, of one host
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2"}, "lo"),
        ({"WORLD_SIZE": "4", "LOCAL_WORLD_SIZE": "2"}, None),  # several hosts: only the user can know
        ({"WORLD_SIZE": "2", "LOCAL_WORLD_SIZE": "2", joining.INTERFACE: "eth7"}, "eth7"),
    ],
)
def test_who_is_alone_on_this_host(said: dict[str, str], interface: str | None, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining.socket, "if_nameindex", lambda: [(1, "eth0"), (2, "lo")])
    rest = {"RANK": "0", "LOCAL_RANK": "0", "MASTER_ADDR": "localhost", "MASTER_PORT": "1"}
    monkeypatch.setattr(os, "environ", {**said, **(rest if said else {})})
    joining._listen_here(joining.LAUNCHED if said else "file:///tmp/meet")
    assert os.environ.get(joining.INTERFACE) == interface


@pytest.mark.parametrize("named", ["eth7", "lo,eth7"])
def test_an_interface_that_is_not_here_is_told_by_name(named: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(joining.socket, "if_nameindex", lambda: [(1, "eth0"), (2, "lo")])
    monkeypatch.setenv(joining.INTERFACE, named)
    with pytest.raises(UnsupportedError, match="GLOO_SOCKET_IFNAME is 'eth7', which this host has not: name one of eth0, lo"):
        joining._check_interfaces()
    monkeypatch.setenv(joining.INTERFACE, "eth0,lo")
    joining._check_interfaces()
