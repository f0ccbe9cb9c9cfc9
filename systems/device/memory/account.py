"""Accounts: live and peak bytes of a tier against its hard budget."""

from __future__ import annotations

from collections import deque

from systems.device.watch.events import EventLog
from systems.planning.plan import Tier


class Account:
    """Live and peak bytes of one tier against its budget.

    pool: bytes the substrate placed; the rest of `live` is activations and temporaries. Frees may come from any thread (a
    tensor dies where its last reference does), so they are queued and taken in by the thread that runs the step.
    """

    def __init__(self, tier: Tier, budget: int, log: EventLog) -> None:
        self.tier, self.budget, self._log = tier, budget, log
        self.pool = self.other = 0
        self.peak = self.pool_peak = self.other_peak = 0
        self._returned: deque[int] = deque()

    @property
    def keeps_log(self) -> bool:
        return self._log.keep

    @property
    def live(self) -> int:
        self._take_in()
        return self.pool + self.other

    @property
    def room(self) -> int:
        return self.budget - self.live

    def _take_in(self) -> None:
        while self._returned:
            self.other -= self._returned.popleft()

    def add_pool(self, nbytes: int, label: str) -> None:
        self._take_in()
        self.pool += nbytes
        self._note(label)

    def add_other(self, nbytes: int, label: str) -> None:
        """Bytes of an activation or buffer; the caller has made room."""
        self._take_in()
        self.other += nbytes
        self._note(label)

    def return_other(self, nbytes: int) -> None:
        self._returned.append(nbytes)

    def settle(self, *, pool: int, other: int | None = None) -> None:
        """What is in use, reckoned anew, after something broke off while it was counted. other: None, as counted."""
        self._take_in()
        self.pool, self.other = pool, self.other if other is None else other
        self._note("settled")

    def start_interval(self) -> int:
        """Peak of the other bytes since the last call; a new interval begins at what is live now."""
        self._take_in()
        peak, self.other_peak = self.other_peak, self.other
        return peak

    def _note(self, label: str) -> None:
        live = self.pool + self.other
        self.peak = max(self.peak, live)
        self.pool_peak = max(self.pool_peak, self.pool)
        self.other_peak = max(self.other_peak, self.other)
        self._log.live_bytes(self.tier.value, live, self.pool, label)
