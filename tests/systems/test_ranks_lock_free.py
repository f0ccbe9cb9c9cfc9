"""Updates that run behind the steps on several ranks, each with its own updating thread over its shards."""

from __future__ import annotations

import errno
import os
import threading
import time
from collections.abc import Callable
from contextlib import ExitStack
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch

import systems
from systems.device.emulated import EmulatedDevice
from systems.planning.step.residence import lock_free_bytes
from systems.ranks.loopback import as_threads
from systems.ranks.ranks import Ranks
from systems.system import Engine
from tests.systems import experts
from tests.systems.models_small import next_token_loss, tokens
from tests.systems.running import AMPLE, RESIDENT, assert_equal, managed, parameters_of
from tests.systems.test_lock_free import ANGEL, Kept, lock_free, races_of, slow_updates
from tests.systems.test_memory import check_segments
from tests.systems.test_ordering import sleeps
from tests.systems.test_ranks import Asked, asked_of, make, on_ranks, resident, tight

CASES = [Asked("opt", 2), Asked("gpt2", 2, 2, "bf16"), Asked("stack", 3)]


def of_options(most: int | None, **given: Any) -> dict[str, Any]:
    return lock_free(most, **given).model_dump(exclude_unset=True)


@pytest.mark.parametrize("states", ["host", "disk"])
@pytest.mark.parametrize("asked", CASES, ids=str)
@pytest.mark.one_in(3)
def test_at_zero_no_bit_changes(asked: Asked, states: str, tmp_path: Path) -> None:
    more: dict[str, Any] = {"disk": tmp_path, "disk_memory": AMPLE} if states == "disk" else {}
    options = of_options(0, **({"states": "disk"} if more else {}))
    more |= {"device_memory": tight(asked.model, asked.size), "host_memory": AMPLE, "dtype": asked.dtype}
    found = on_ranks(ANGEL, *asked[:3], options, jitter=True, log_events=True, **more)
    for one, mine in zip(resident(*asked[:4], 0.0, "none"), found, strict=True):
        assert_equal(one, mine)
        assert not races_of(mine.engine)
        statistics: Any = mine.engine.statistics()
        assert statistics.staleness_max == statistics.staleness_mean == 0
        assert statistics.updates_behind > 0, "void: nothing was updated behind the steps"
    assert os.listdir(tmp_path) == []


@pytest.mark.parametrize("fixed", [None, 1])
@pytest.mark.parametrize("size", [2, 4])
def test_at_zero_no_bit_of_experts_that_ranks_share_changes(size: int, fixed: int | None) -> None:
    """fixed: the expert that gets all tokens; what the others' bundles are reduced to is zeros."""
    built = partial(experts.toy, fixed=fixed)
    expected = experts.on_ranks(RESIDENT, size, 2, build=built)
    budget = int(0.8 * max(run.memory.device_peak_bytes or 0 for run in expected))
    found = experts.on_ranks(ANGEL, size, 2, of_options(0, page=4096), build=built, device_memory=budget, jitter=True)
    for one, mine in zip(expected, found, strict=True):
        assert_equal(one, mine)
        statistics: Any = mine.engine.statistics()
        assert statistics.updates_behind > 0, "void: nothing was updated behind the steps"


class Trained:
    """A rank's engine, and each step's loss on batches that are the same on all ranks."""

    def __init__(self, ranks: Ranks, model: Any, most: int, folder: Path | None, accumulate: int) -> None:
        torch.set_num_threads(1)
        self.number, self.losses = ranks.rank, list[float]()
        more = {} if folder is None else {"disk": folder, "disk_memory": AMPLE}
        budget, sleep = tight("opt", ranks.size), sleeps(ranks.rank, 1e-3)
        asked = asked_of("opt", ranks=ranks.size, accumulate=accumulate, device_memory=budget, host_memory=AMPLE, **more)
        options = lock_free(most, **({} if folder is None else {"states": "disk"}))
        self.engine: Engine = ANGEL.initialize(
            model, asked, options, ranks=ranks, device=lambda log: EmulatedDevice(budget, log, jitter=sleep)
        )

    def step(self, micro_batches: torch.Tensor, steps: int = 1) -> None:
        for _ in range(steps):
            total, count = 0.0, 2 * micro_batches[:, :, 1:].numel()
            for micro in micro_batches:
                loss = next_token_loss(self.engine, micro, count)
                self.engine.backward(loss)
                total += loss.item()
            self.engine.step()
            self.losses.append(total)


def together(
    size: int, work: Callable[[Trained], Any], most: int, folder: Path | None = None, accumulate: int = 1
) -> list[Any]:
    """work: with updates that take three times as long on the last rank."""
    models = [make("opt") for _ in range(size)]

    def one(ranks: Ranks) -> Any:
        trained = Trained(ranks, models[ranks.rank], most, folder, accumulate)
        with ExitStack() as stack:
            stack.enter_context(trained.engine)
            stack.enter_context(slow_updates(trained.engine, 0.003 if ranks.rank == size - 1 else 0.001))
            return work(trained)

    return as_threads(size, one)


@pytest.mark.parametrize(
    ("size", "most", "accumulate", "on_disk"),
    [(2, 2, 1, True), (3, 4, 2, True), (2, 4, 2, False), (3, 1, 1, False), (3, 2, 1, True), (2, 1, 2, True)],
)
@pytest.mark.one_in(2)
def test_gradients_consumed_are_gradients_produced_and_all_ranks_read_the_same(
    size: int, most: int, accumulate: int, on_disk: bool, tmp_path: Path
) -> None:
    """Whose updates are how far decides which versions are brought together, but all have the same ones."""

    def work(trained: Trained) -> Any:
        for step in range(6):
            trained.step(tokens(1, accumulate, seed=step)[0])
        trained.engine.drain()
        return trained.losses, parameters_of(trained.engine), trained.engine.statistics()

    with pytest.MonkeyPatch.context() as monkeypatch:
        kept = Kept(monkeypatch)
        found = together(size, work, most, tmp_path if on_disk else None, accumulate)
        assert 1 <= kept.check() <= most + 1
    (losses, parameters, _), *others = found
    assert all(loss == loss for loss in losses), "a version was read while it was written"
    for mine, values, _ in others:
        assert mine == losses
        assert all(torch.equal(values[name], value) for name, value in parameters.items())
    assert all(statistics.staleness_max <= most for *_, statistics in found)


def test_who_looks_at_weights_finds_all_gradients_in_them(tmp_path: Path) -> None:
    """What has left the device for it is back in the next step."""

    def work(trained: Trained) -> Any:
        engine, batch = trained.engine, tokens(1, 1)[0]
        ours = managed(engine)
        trained.step(batch, 4)
        assert ours.lock_free.active
        trained.step(batch)
        with torch.no_grad():
            trained.losses.append(next_token_loss(engine, batch[0], 30).item())
        assert not ours.lock_free.active
        check_segments(ours)
        trained.step(batch, 2)
        systems.save_checkpoint(engine, tmp_path / "saved")
        saved = parameters_of(engine)
        trained.step(batch, 2)
        values = parameters_of(engine)
        assert any(not torch.equal(values[name], saved[name]) for name in values)
        systems.load_checkpoint(engine, tmp_path / "saved")
        loaded = parameters_of(engine)
        assert all(torch.equal(saved[name], value) for name, value in loaded.items())
        trained.step(batch, 2)
        return trained.losses

    first, second = together(2, work, 2)
    assert first == second


@pytest.mark.parametrize("most", [0, 2])
def test_an_error_behind_the_steps_of_one_rank_ends_all(most: int, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(trained: Trained) -> None:
        batch = tokens(1, 1)[0]
        trained.step(batch, 2)
        if trained.number == 1:
            kernel = managed(trained.engine).device.host_kernel
            update, calls = kernel.update, list[int]()

            def fails(*states: Any, **named: Any) -> None:
                calls.append(1)
                if len(calls) == 3:
                    raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))
                update(*states, **named)

            kernel.update = fails
        trained.step(batch, 8)
        trained.engine.drain()

    began = time.perf_counter()
    with pytest.raises(OSError, match=os.strerror(errno.ENOSPC)):
        together(2, work, most)
    assert time.perf_counter() - began < 30
    assert not [thread for thread in threading.enumerate() if thread.name == "updating"]


def test_the_host_holds_what_the_plan_says() -> None:
    def work(trained: Trained) -> int:
        trained.step(tokens(1, 1)[0], 3)
        ours = managed(trained.engine)
        layout, context = ours.layout, ours.strategy._context
        need = lock_free_bytes(layout, context, [b.index for b in layout.bundles if b.trainable])
        twice = 2 * (4 + 4)  # fp32
        numel = sum(layout.shard_numel(b.index) for b in layout.bundles if b.trainable)
        assert twice * numel <= need <= twice * numel + 2 * 4096
        assert (trained.engine.memory().host_peak_bytes or 0) >= need
        return need

    one, other = together(2, work, 1)
    assert one == other


def test_a_rank_may_drain_without_the_others() -> None:
    """What it took off the device all bring back together."""

    def work(trained: Trained) -> list[float]:
        batch = tokens(1, 1)[0]
        for number in (0, 1, 2):
            trained.step(batch, 4)
            if trained.number == number:
                trained.engine.drain()
                assert not managed(trained.engine).lock_free.active
        with torch.no_grad():
            trained.losses.append(next_token_loss(trained.engine, batch[0], 30).item())
        trained.step(batch, 2)
        return trained.losses

    first, second = together(2, work, 2)
    assert first == second
