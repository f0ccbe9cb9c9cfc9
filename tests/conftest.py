"""What every test starts from: the same number of threads, so that sums are made in the same order, and little garbage."""

from __future__ import annotations

import gc
from collections.abc import Iterator

import pytest
import torch

THREADS = 1  # tiny models: a second thread costs more than it brings, and milliseconds a call on a busy machine


def pytest_collection_finish() -> None:
    """The libraries' million objects stay: no garbage collection looks through them again."""
    gc.collect()
    gc.freeze()


@pytest.fixture(autouse=True)
def _fixed_threads() -> Iterator[None]:
    torch.set_num_threads(THREADS)
    yield
    torch.set_num_threads(THREADS)
