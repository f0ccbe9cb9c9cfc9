"""Ranks as processes that torch.distributed knows: who they are and what they tell each other, over gloo."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from datetime import timedelta
from functools import partial
from itertools import count
from typing import Literal

import torch
import torch.distributed as dist

from systems.machine.limits import host_identity
from systems.ranks.gloo import GlooLink, gather_on_host, with_peers
from systems.ranks.group_names import EXPERTS, REPLICA
from systems.ranks.link import Link
from systems.ranks.nccl import NcclLink
from systems.ranks.ranks import Ranks
from systems.ranks.stuck import STUCK_S, Board, StuckWatch, Waits, end_process

TIMEOUT_S = 1800.0  # for a rank that others wait for: it may save, or compile
FRAME_BYTES = 8192  # of what a rank tells, sent with its length; what is longer needs a second collective
LENGTH_BYTES = 8

Device = Literal["cuda", "cpu"]


Members = tuple[int, ...]
QUEUES = {REPLICA: ("link", "devices"), EXPERTS: ("experts", "experts")}  # of the host's and of a device's: see Waits


def link_of(
    device: Device,
    timeout: timedelta,
    waits: Waits,
    *,
    shared: bool,
    among: Sequence[Members | None] = (None,),
    queues: tuple[str, str] = ("link", "devices"),
) -> tuple[Link, list[dist.ProcessGroup]]:
    """What collectives of devices of this kind go through, and the groups that were made for it, on all ranks alike.

    shared: some ranks have one device together, which NCCL refuses. among: all groups of that kind; this rank is in one.
    """
    host = _mine(among, "gloo", timeout)
    if device == "cpu" or shared:
        return GlooLink(host, waits, queues[0]), [host]
    devices = _mine(among, "nccl", timeout)
    return NcclLink(devices, GlooLink(host, waits, queues[0]), waits, queues[1]), [host, devices]


def _mine(among: Sequence[Members | None], backend: str, timeout: timedelta) -> dist.ProcessGroup:
    """All ranks make all of them, in one order."""
    with with_peers("the making of groups"):
        made = [dist.new_group(None if m is None else list(m), backend=backend, timeout=timeout) for m in among]
    return next(group for group in made if group is not dist.GroupMember.NON_GROUP_MEMBER)


def _board(name: str, rank: int, size: int) -> Board:
    """In the store of the default group."""
    store = dist.PrefixStore(name, dist.distributed_c10d._get_default_store())

    def write(text: str) -> None:
        store.set(str(rank), text)

    write("")
    return Board(write=write, read=lambda: [store.get(str(each)).decode() for each in range(size)])


class _DefaultGroup:
    """Who uses torch.distributed's default group, of which a process has one."""

    def __init__(self) -> None:
        self._users: set[Ranks] = set()
        self._ends = False
        self.numbers = count()  # of all that ever used one: the same on all ranks

    def begin(self, user: Ranks, *, end: bool) -> None:
        self._users.add(user)
        self._ends = self._ends or end

    def end(self, user: Ranks) -> None:
        """The last one ends a group that was made for them."""
        self._users.discard(user)
        if self._ends and not self._users:
            self._ends = False
            dist.destroy_process_group()


_default = _DefaultGroup()


class Processes(Ranks):
    """Of torch.distributed's default group, which is there already. Groups of our own are made here, on all ranks alike.

    Which of them are on one host, Note [Hosts] in systems/machine/limits.py says, and not their launchers.

    device: of all ranks. timeout_s: how long a rank waits for others. end_default: the default group ends with the last
    that use it.
    stuck_s, on_stuck: see StuckWatch; called from a thread of its own. ends: how each rank's work ended, if it says so.
    """

    def __init__(
        self,
        device: Device = "cpu",
        *,
        timeout_s: float = TIMEOUT_S,
        end_default: bool = False,
        stuck_s: float = STUCK_S,
        on_stuck: Callable[[str], None] = end_process,
        of_one_engine: bool = False,
    ) -> None:
        self.of_one_engine = of_one_engine
        self.rank, self.size = dist.get_rank(), dist.get_world_size()
        timeout = timedelta(seconds=timeout_s)
        number = next(_default.numbers)
        self._waits, self.ends = Waits(), _board(f"ends-{number}", self.rank, self.size)
        self._control = _mine((None,), "gloo", timeout)
        own = str(torch.cuda.get_device_properties(torch.cuda.current_device()).uuid) if device == "cuda" else str(self.rank)
        places = self.exchange("places", (host_identity(), own))
        hosts = [host for host, _ in places]
        here = [rank for rank, host in enumerate(hosts) if host == hosts[self.rank]]
        self.local_rank, self.local_size = here.index(self.rank), len(here)
        self.host = list(dict.fromkeys(hosts)).index(hosts[self.rank])
        self._link_of = partial(link_of, device, timeout, self._waits, shared=len({own for _, own in places}) < self.size)
        self.link, more = self._link_of()
        self._groups = [self._control, *more]
        self._watch = StuckWatch(self._waits, _board(f"waits-{number}", self.rank, self.size), stuck_s, on_stuck)
        _default.begin(self, end=end_default)

    def _link_among(self, groups: Sequence[Members], name: str) -> Link:
        link, more = self._link_of(among=groups, queues=QUEUES[name])
        self._groups += more
        return link

    def exchange_bytes(self, about: str, told: bytes) -> list[bytes]:
        with self._waits.of("control", about):
            first = self._gather(FRAME_BYTES, len(told).to_bytes(LENGTH_BYTES, "little") + told, about)
            lengths = [int.from_bytes(each[:LENGTH_BYTES], "little") for each in first]
            begun = FRAME_BYTES - LENGTH_BYTES
            more = max(lengths) - begun
            rest = self._gather(more, told[begun:], about) if more > 0 else [b""] * self.size
        return [(each[LENGTH_BYTES:] + behind)[:length] for each, behind, length in zip(first, rest, lengths, strict=True)]

    def _gather(self, nbytes: int, told: bytes, about: str) -> list[bytes]:
        """What each rank tells, cut or filled up to as many bytes."""
        mine = torch.frombuffer(bytearray(told[:nbytes].ljust(nbytes, b"\0")), dtype=torch.uint8)
        found = [torch.empty_like(mine) for _ in range(self.size)]
        gather_on_host(found, mine, self._control, about)
        return [each.numpy().tobytes() for each in found]

    def _bring(self, pieces: Sequence[Sequence[torch.Tensor]], onto: int | None) -> None:
        """Not told as waiting: all ranks have come, and who neither gives nor gets goes on to wait for the next thing."""
        for source, theirs in enumerate(pieces):
            for piece in theirs if source != onto else ():
                with with_peers("what ranks bring together"):
                    self._move(piece, source, onto)

    def _move(self, piece: torch.Tensor, source: int, onto: int | None) -> None:
        if onto is None:
            dist.broadcast(piece, source, group=self._control)
        elif self.rank == source:
            dist.send(piece, onto, group=self._control)
        elif self.rank == onto:
            dist.recv(piece, source, group=self._control)

    def close(self) -> None:
        self._watch.close()
        groups, self._groups = self._groups, []
        try:
            for group in groups:
                dist.destroy_process_group(group)
        finally:
            _default.end(self)
