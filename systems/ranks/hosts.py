"""Which ranks are on one host, whose memory and files are theirs in common."""

from __future__ import annotations

import socket
from pathlib import Path

from systems.ranks.ranks import Ranks

BOOT = Path("/proc/sys/kernel/random/boot_id")


def this_host() -> str:
    """A name that no other host has."""
    try:
        return f"{socket.gethostname()} {BOOT.read_text().strip()}"
    except OSError:
        return socket.gethostname()


def on_this_host(ranks: Ranks) -> list[int]:
    """This rank, and the others that are on its host. A collective."""
    told = ranks.exchange("hosts", this_host() if ranks.size > 1 else "")
    return [rank for rank, theirs in enumerate(told) if theirs == told[ranks.rank]]
