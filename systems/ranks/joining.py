"""How a process joins the others: torch.distributed's default group is there, or a launcher's words say how to make it."""

from __future__ import annotations

import contextlib
import os
import socket
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Literal

import torch
import torch.distributed as dist

from systems.errors import UnsupportedError
from systems.messages import in_words
from systems.ranks.gloo import with_peers
from systems.ranks.launchers import launched
from systems.ranks.meeting import meet, stay_away
from systems.ranks.processes import TIMEOUT_S, Processes
from systems.ranks.stuck import STUCK_S, end_process

LAUNCHED = "env://"  # where processes of a launcher find each other
WAIT = timedelta(seconds=TIMEOUT_S)  # for those that do not come
INTERFACE = "GLOO_SOCKET_IFNAME"  # which gloo listens on; without it, the one that the host's name leads to
LOOPBACK = ("lo", "lo0")  # of Linux, and of macOS
BACKENDS = {"cpu": "gloo", "cuda": "cpu:gloo,cuda:nccl"}


def is_one_of_several() -> bool:
    """UnsupportedError where a launcher does not say which one."""
    if dist.is_available() and dist.is_initialized():
        return dist.get_world_size() > 1
    return launched() is not None


@contextmanager
def expected() -> Iterator[None]:
    """Around what comes before `joined`: an exception there is told to those that a launcher started with this process, which
    would wait for it.
    """
    try:
        yield
    except Exception as error:
        with contextlib.suppress(Exception):  # the error is the news
            told = None if dist.is_initialized() else launched()
            if told is not None:
                stay_away(LAUNCHED, rank=told.rank, size=told.size, timeout=WAIT, why=in_words(error))
        raise


def joined(device: Literal["cuda", "cpu"]) -> Processes:
    """This process as one of several, called by all of them alike, for one engine. Where there is no default group, it is made,
    and ends with these ranks. device: of each of them.
    """
    if dist.is_available() and dist.is_initialized():
        return Processes(device, of_one_engine=True)
    told = launched()
    assert told is not None, "somebody has asked is_one_of_several()"
    return begun(device, rank=told.rank, size=told.size, local_rank=told.local_rank, of_one_engine=True)


def begun(
    device: Literal["cuda", "cpu"],
    *,
    rank: int,
    size: int,
    local_rank: int,
    where: str = LAUNCHED,
    timeout_s: float = TIMEOUT_S,
    stuck_s: float = STUCK_S,
    on_stuck: Callable[[str], None] = end_process,
    of_one_engine: bool = False,
) -> Processes:
    """A default group of `size` processes, which ends with the last ranks that use it. where: as in `meet`, of this host alone
    where it is not LAUNCHED. The rest is as in Processes.

    Raises UnsupportedError where torch cannot, and where there are fewer devices than ranks.
    """
    if not (dist.is_available() and dist.is_gloo_available()):
        raise UnsupportedError("this torch is built without torch.distributed's gloo, which several ranks need: use one rank")
    with expected():
        chosen = None
        if device == "cuda":
            count = torch.cuda.device_count()
            if local_rank >= count:
                raise UnsupportedError(
                    f"rank {rank} would be number {local_rank} on {count} CUDA devices: start fewer on this host"
                )
            chosen = torch.device("cuda", local_rank)
            torch.cuda.set_device(chosen)
        _listen_here(where)
        _check_interfaces()
    store = meet(where, rank=rank, size=size, device=device, timeout=WAIT)
    with with_peers("the start"):
        dist.init_process_group(BACKENDS[device], store=store, rank=rank, world_size=size, device_id=chosen)
    try:
        return Processes(
            device,
            timeout_s=timeout_s,
            end_default=True,
            stuck_s=stuck_s,
            on_stuck=on_stuck,
            of_one_engine=of_one_engine,
        )
    except BaseException:
        dist.destroy_process_group()
        raise


def _listen_here(where: str) -> None:
    """Gloo asks nobody who connects who he is: ranks that are all on this host listen on its loopback, if the user has named no
    interface.
    """
    told = launched() if where == LAUNCHED else None
    if told is not None and told.local_size < told.size:
        return
    loopback = next((name for _, name in socket.if_nameindex() if name in LOOPBACK), None)
    if loopback is not None:
        os.environ.setdefault(INTERFACE, loopback)


def _check_interfaces() -> None:
    """Gloo's own words for one that is not there do not say that it has no other."""
    here = [name for _, name in socket.if_nameindex()]
    named = [name for name in os.environ.get(INTERFACE, "").split(",") if name]
    for name in named:
        if name not in here:
            raise UnsupportedError(f"{INTERFACE} is {name!r}, which this host has not: name one of {', '.join(here)}, or none")
