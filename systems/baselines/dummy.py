"""A scripted system that trains nothing: it sleeps known times and fails on demand, so that the harness can be tested.

Every figure the harness derives from it has a known right answer. Steps are counted from 1 in the options.
"""

from __future__ import annotations

import ctypes
import errno
import importlib
import os
import queue
import tempfile
import threading
import time
from collections import Counter
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

import torch
from pydantic import BaseModel, Field

from systems.baselines.faces import DUMMY as FACE
from systems.baselines.faces import DummyOptions
from systems.errors import BudgetError, DivergedError, OutOfMemoryError, UnavailableError, UnsupportedError
from systems.ranks.ranks import Ranks, SingleRank
from systems.reports import MemoryReport
from systems.settings import Settings, StepOutcome
from systems.sizes import format_size
from systems.system import Engine, System

COUNTERS = (
    "h2d_bytes", "d2h_bytes", "gather_bytes", "reduce_bytes", "disk_read_bytes", "disk_write_bytes",
    "skipped_steps", "fallbacks", "retraces", "host_syncs",
)  # fmt: skip
NORM = 2.0
_HOUR_S = 3600.0


class OddStatistics(BaseModel):
    value: Any = Field(default_factory=object)


class DummyEngine(Engine):
    """Sleeps through the steps that its options describe. sleep: stands in for time.sleep in tests.

    On several ranks each step waits for all of them, as a real one does.
    """

    system = "dummy"

    def __init__(
        self,
        options: DummyOptions,
        settings: Settings,
        sleep: Callable[[float], None] = time.sleep,
        ranks: Ranks | None = None,
    ) -> None:
        self.ranks = ranks or SingleRank()
        self._scripted = options.rank in (None, self.ranks.rank)
        self.module = torch.nn.Module()
        self.outcomes: list[StepOutcome] = []
        self.learning_rates: list[float] = []  # as set, for tests of the schedule
        self._options, self.settings, self._sleep = options, settings, sleep
        self._counters: Counter[str] = Counter(dict.fromkeys(COUNTERS, 0))
        self._done = 0
        self._weight = torch.zeros((), device=settings.device, requires_grad=True)
        self._background: queue.Queue[float | None] = queue.Queue()
        self._thread = threading.Thread(target=self._work_in_background, daemon=True)
        self._thread.start()
        self._misbehave(0)

    def _work_in_background(self) -> None:
        while (seconds := self._background.get()) is not None:
            self._sleep(seconds)
            self._background.task_done()

    @property
    def _pace(self) -> float:
        return self._options.slow_factor if self._done < self._options.slow_steps else 1.0

    def __call__(self, input_ids: torch.Tensor, **_: Any) -> Any:
        """Logits that give every token the same probability: the loss is ln(vocabulary), here the largest id + 1."""
        vocabulary = int(input_ids.max()) + 1
        if not torch.is_grad_enabled():
            self._sleep(self._options.eval_time_s)
        weight = self._weight * float("nan") if self._options.nan_at == self._done + 1 else self._weight
        return SimpleNamespace(logits=weight.expand(*input_ids.shape, vocabulary).clone())

    def backward(self, loss: torch.Tensor) -> None:
        loss.backward()
        self._sleep(self._options.micro_step_time_s * self._pace)

    def step(self) -> None:
        self._misbehave(self._done + 1)
        self.ranks.link.gather(f"step {self._done + 1}", torch.zeros(self.ranks.size))
        self._sleep(self._options.step_time_s * self._pace)
        if self._options.drain_time_s:
            self._background.put(self._options.drain_time_s)
        self._done += 1
        skipped = self._options.skip_at == self._done
        self._counters["skipped_steps"] += skipped
        self._counters["h2d_bytes"] += self._options.bytes_per_step
        clip = self.settings.clip
        factor = min(1.0, clip / NORM) if clip else 1.0
        self.outcomes.append(StepOutcome(step=self._done, norm=NORM, clip_factor=factor, loss_scale=1.0, skipped=skipped))

    def discard(self) -> None:
        """There is nothing to drop."""

    def _misbehave(self, step: int) -> None:
        options = self._options
        if not self._scripted:
            return
        if options.extra_exchange_at == step:
            self.ranks.exchange("what others do not", None)
        if options.oom_at == step:
            raise OutOfMemoryError("the script says so", tier=options.oom_tier, need=1 << 30, have=1 << 20)
        if options.disk_full_at == step:
            raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), tempfile.gettempdir())
        if options.diverge_at == step:
            raise DivergedError(f"the script says that step {step} diverges")
        if options.crash_at == step:
            raise RuntimeError(f"the script says that step {step} crashes")
        if options.child_at == step and os.fork() == 0:
            time.sleep(_HOUR_S)
            os._exit(0)
        if options.exit_at == step:
            os._exit(options.exit_code)
        if options.signal_at == step:
            os.kill(os.getpid(), options.signal)
        if options.segfault_at == step:
            ctypes.string_at(0)
        if options.hang_at == step:
            time.sleep(_HOUR_S)

    def drain(self) -> None:
        self._background.join()

    def counters(self) -> dict[str, int]:
        return dict(self._counters)

    def memory(self) -> MemoryReport:
        return MemoryReport(device_budget_bytes=self.settings.device_memory, host_budget_bytes=self.settings.host_memory)

    def statistics(self) -> BaseModel | None:
        return OddStatistics() if self._options.odd_statistics else None

    def startup_s(self) -> dict[str, float]:
        return {"scripted": self._options.startup_time_s}

    def set_lr(self, lr: float) -> None:
        self.learning_rates.append(lr)

    def close(self, *, keep: bool = True) -> None:
        if self._thread.is_alive():
            self.drain()
            self._background.put(None)
            self._thread.join()
            self.ranks.leave()

    @contextmanager
    def masters(self, *, write: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        yield {}


class Dummy(System):
    """It runs no model, which saves a test's time."""

    name, summary, abilities = FACE.name, FACE.summary, FACE.abilities
    Options: type[BaseModel] = FACE.Options

    def initialize(
        self, model: torch.nn.Module, settings: Settings, options: BaseModel, *, ranks: Ranks | None = None
    ) -> DummyEngine:
        assert isinstance(options, DummyOptions)
        if ranks is not None and options.rank not in (None, ranks.rank):
            return DummyEngine(options, settings, ranks=ranks)
        have = settings.host_memory
        if options.refuse == "budget" or (have is not None and options.host_need > have):
            need, have = options.host_need, have or 0
            message = f"the script needs {format_size(need)} of host memory, the budget is {format_size(have)}"
            raise BudgetError(message + ": raise `host_memory` or lower host_need", tier="host", need=need, have=have)
        if options.refuse == "unsupported":
            raise UnsupportedError("the script cannot do this: leave out `options=dict(refuse='unsupported')`")
        if options.refuse == "unavailable":
            raise UnavailableError("the script needs the package offload-parts", install="pip install offload-parts")
        if options.refuse == "missing-package":
            importlib.import_module("offload_parts")
        time.sleep(options.startup_time_s)
        return DummyEngine(options, settings, ranks=ranks)


SYSTEM = Dummy()
