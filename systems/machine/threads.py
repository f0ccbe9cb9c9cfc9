"""How many threads torch's own operations take: the cores that this process may use, shared by the ranks of a host."""

from __future__ import annotations

import torch

from systems.machine.limits import MachineLimits, read_limits


def cores_each(ranks: int, limits: MachineLimits | None = None) -> int:
    """Usable cores of each of so many ranks on this host, one at least. limits: where they were read already."""
    return max(1, (limits or read_limits()).cores // ranks)


def share_cores(ranks: int, asked: int | None) -> None:
    """Set torch's threads. asked: by the user, who knows better."""
    torch.set_num_threads(asked or cores_each(ranks))
