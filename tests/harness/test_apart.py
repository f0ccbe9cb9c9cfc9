"""Work in a process of its own."""

from __future__ import annotations

import signal

from harness.apart import apart


def _blocked(asked: str) -> bool:
    return signal.Signals[asked] in signal.pthread_sigmask(signal.SIG_BLOCK, [])


def test_it_never_hears_of_ctrl_c_and_its_parent_does_still() -> None:
    assert apart(_blocked, "SIGINT", lambda: False) is True
    assert not _blocked("SIGINT")
