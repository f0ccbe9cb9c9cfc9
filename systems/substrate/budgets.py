"""What an engine may take of its machine beside the device."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, kw_only=True)
class Budgets:
    """Bytes of the host's memory and of the disk; the device has its own."""

    host: int
    disk: int
