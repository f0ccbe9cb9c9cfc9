"""How processes meet before they are a group: each tells that it comes, or why not, in a store that their launcher gave them.

Without that the others would wait for one that does not come, for as long as one may wait that is slow.
"""

from __future__ import annotations

import json
import os
from collections import Counter
from datetime import timedelta
from functools import cache

import torch.distributed as dist

from systems.errors import UnsupportedError
from systems.ranks.gloo import with_peers

_met: Counter[str] = Counter()  # by place; each meeting of a process has names of its own in the store


@cache
def _place(where: str, rank: int, size: int, timeout: timedelta) -> dist.Store:
    """Kept for as long as this process is there, for the next engine."""
    store, _, _ = next(dist.rendezvous(where, rank, size, timeout=timeout))
    return store


def _next(where: str, rank: int, size: int, timeout: timedelta) -> dist.Store:
    store = _place(where, rank, size, timeout)
    _met[where] += 1
    return dist.PrefixStore(f"meeting-{_met[where]}", store)


def meet(where: str, *, rank: int, size: int, device: str, timeout: timedelta) -> dist.Store:
    """A store for a group of all ranks, each of which calls this. where: as torch writes it. device: what each rank uses.

    Raises UnsupportedError on all that come, where one said that it does not, or has another device.
    """
    with with_peers("the meeting of all ranks"):
        store = _next(where, rank, size, timeout)
        store.set(str(rank), json.dumps({"device": device}))
        told = [json.loads(store.get(str(each))) for each in range(size)]
    for each, theirs in enumerate(told):
        if "why" in theirs:
            raise UnsupportedError(f"rank {each} does not take part: {theirs['why']}")
    for each, theirs in enumerate(told):
        if theirs["device"] != told[0]["device"]:
            raise UnsupportedError(
                f"the device is {told[0]['device']} on rank 0 and {theirs['device']} on rank {each}: give all ranks the same"
            )
    return store


def stay_away(where: str, *, rank: int, size: int, timeout: timedelta, why: str) -> None:
    """Instead of `meet`, for one that cannot: at once, if there is a store that needs nobody else."""
    if where != "env://" or os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        return
    _next(where, rank, size, timeout).set(str(rank), json.dumps({"why": why}))
