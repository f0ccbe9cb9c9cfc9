"""How many threads torch's own operations take: the cores that this process may use, shared by the ranks of a host."""

from __future__ import annotations

import torch

from systems.machine.limits import read_limits


def cores_each(ranks: int) -> int:
    """Usable cores of each of so many ranks on this host, one at least."""
    return max(1, read_limits().cores // ranks)


def share_cores(ranks: int, asked: int | None) -> None:
    """Set torch's threads. asked: by the user, who knows better."""
    torch.set_num_threads(asked or cores_each(ranks))
