"""Groups of ranks: who is in which, what goes between them alone, and processes of which one dies among them."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from systems.errors import UnsupportedError
from systems.ranks.expert_exchange import ExpertExchange, exchange_experts
from systems.ranks.group_names import EXPERTS, REPLICA, WORLD
from systems.ranks.groups import cut, of_replicas
from systems.ranks.link import RanksDifferError
from systems.ranks.loopback import as_threads
from systems.ranks.ranks import Ranks, SingleRank
from systems.ranks.staging import Staging
from tests.systems.every import STRATEGIES
from tests.systems.experts import on_ranks
from tests.systems.running import Run

ROOT = Path(__file__).resolve().parents[2]
END_S = 30.0
WORK = """
import os, pickle, signal, sys, time, systems, torch
import torch.distributed as dist
from tests.systems.experts import STEPS, VOCABULARY, toy, toy_loss
from tests.systems.models_small import tokens
rank, folder, dies_at = int(sys.argv[1]), sys.argv[2], int(sys.argv[3])
dist.init_process_group("gloo", init_method=f"file://{folder}/meet", rank=rank, world_size=2)
torch.set_num_threads(1)
model, batches = toy(2, rank), tokens(STEPS, 2) % VOCABULARY
given = dict(device="cpu", dtype="fp32", clip=0.5, expert_ranks=2, device_memory="1GiB", host_memory="8GiB")
engine = systems.initialize(model, system="elixir", **given)
torch.set_num_threads(1)
exchange, seen = model.blocks[0].layer.exchange, [0]
swap = exchange.swap

def counted(source, what):
    seen[0] += 1
    if dies_at and rank == 1 and seen[0] == dies_at:
        open(f"{folder}/died", "w").write(repr(time.time()))
        os.kill(os.getpid(), signal.SIGKILL)
    return swap(source, what)

exchange.swap = counted
for batch in batches:
    engine.backward(toy_loss(engine, batch[rank], batch[:, :, 1:].numel()))
    engine.step()
engine.drain()
with engine.summon() as values:
    found = {name: value.clone() for name, value in values.items()}, [each.norm for each in engine.outcomes]
engine.close()
open(f"{folder}/found-{rank}", "wb").write(pickle.dumps(found))
"""


@given(st.integers(1, 6), st.integers(1, 6))
def test_each_rank_is_in_one_group_of_each_kind(replicas: int, expert_ranks: int) -> None:
    """The order of a mesh of (replicas, expert ranks)."""
    mesh = torch.arange(replicas * expert_ranks).view(replicas, expert_ranks)
    holders, sharers = cut(replicas * expert_ranks, expert_ranks)
    assert holders == [tuple(column.tolist()) for column in mesh.unbind(1)]
    assert sharers == [tuple(row.tolist()) for row in mesh.unbind(0)]


@pytest.mark.parametrize(("ranks", "expert_ranks"), [(3, 2), (1, 2), (4, 3)])
def test_ranks_are_a_whole_number_of_sets(ranks: int, expert_ranks: int) -> None:
    with pytest.raises(UnsupportedError, match=f"`expert_ranks` is {expert_ranks}, which does not divide .*, {ranks}: give"):
        cut(ranks, expert_ranks)


def test_one_rank_is_a_group() -> None:
    ranks = SingleRank()
    ranks.divide(1)
    for name in (WORLD, REPLICA):
        assert ranks.group(name).members == (0,)


def summed_by(ranks: Ranks) -> tuple[list[float], list[float], list[float]]:
    """Of all ranks, of those that have the same experts, and of all again, once they share none."""
    ranks.divide(2)
    found = []
    for name in (WORLD, REPLICA):
        group, whole = ranks.group(name), torch.full((4,), 10.0**ranks.rank)
        group.link.reduce(f"reduce {name}", whole)
        group.link.gather(f"gather {name}", whole)
        found.append(whole.tolist())
    ranks.divide(1)
    whole = torch.full((4,), 10.0**ranks.rank)
    ranks.group(REPLICA).link.reduce("reduce", whole)
    ranks.group(REPLICA).link.gather("gather", whole)
    return found[0], found[1], whole.tolist()


def test_sums_are_of_a_group_alone() -> None:
    everything = [1111.0] * 4
    for rank, found in enumerate(as_threads(4, summed_by)):
        assert found == (everything, [[101.0] * 4, [1010.0] * 4][rank % 2], everything)


@settings(max_examples=60, deadline=None)
@given(st.sampled_from([(4, 2), (6, 2), (6, 3), (8, 4)]), st.integers(0, 9000), st.booleans())
def test_a_group_s_sums_take_no_room_of_their_own(sizes: tuple[int, int], nbytes: int, together: bool) -> None:
    """Unless there is next to none. Which bits come of them is tested in test_link.py, of any room."""
    size, few = sizes
    whole = Staging(nbytes, torch.device("cpu"), size, together=together)
    mine, values = whole.shared_by(few), torch.arange(few * 640.0)
    places = [room.untyped_storage().data_ptr() for room in mine._rooms if room.numel()]
    assert nbytes < 256 * 64 or set(places) == {whole._rooms[0].untyped_storage().data_ptr()}
    ends = [room.data_ptr() - mine._rooms[0].data_ptr() + room.nbytes for room in mine._rooms]
    assert len(set(places)) > 1 or ends[-1] <= whole._rooms[0].nbytes
    assert sum(piece.part.numel() for piece in mine.pieces(values, 0)) == len(values)


def there_and_back(ranks: Ranks) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor | None, dict[str, int]]:
    """Slots that say whose they are: 100 x rank + 10 x expert + place."""
    ranks.divide(2)
    counted: dict[str, int] = {}

    def count(name: str, amount: int) -> None:
        counted[name] = counted.get(name, 0) + amount

    exchange = ExpertExchange("layer", ranks.group(EXPERTS), count)
    slots = (100.0 * ranks.rank + 10 * torch.arange(4.0).view(4, 1, 1) + torch.arange(3.0).view(1, 3, 1)).expand(4, 3, 2)
    slots = slots.clone().requires_grad_()
    came = exchange.dispatch(slots)
    back = exchange.combine(came * (1.0 + ranks.rank))
    back.sum().backward()
    return came.detach()[..., 0], back.detach()[..., 0], slots.grad, counted


def test_slots_come_to_their_expert_rank_by_rank_and_go_back() -> None:
    found = as_threads(4, there_and_back)
    for rank, (came, back, gradient, counted) in enumerate(found):
        first, here = rank // 2 * 2, range(rank % 2 * 2, rank % 2 * 2 + 2)
        expected = [[100.0 * r + 10 * e + p for r in (first, first + 1) for p in range(3)] for e in here]
        assert came.tolist() == expected
        factors = torch.tensor([1.0 + first, 1.0 + first, 2.0 + first, 2.0 + first]).view(4, 1)
        mine = 100.0 * rank + 10 * torch.arange(4.0).view(4, 1) + torch.arange(3.0)
        assert torch.equal(back, mine * factors)
        assert gradient is not None and torch.equal(gradient, factors.unsqueeze(-1).expand(4, 3, 2))
        assert counted == {"exchange_bytes": 4 * (4 * 3 * 2 * 4) // 2}


def test_experts_that_ranks_cannot_share_are_refused() -> None:
    def work(ranks: Ranks) -> None:
        ranks.divide(2)
        ExpertExchange("layer", ranks.group(EXPERTS), lambda *_: None).dispatch(torch.zeros(3, 1, 1))

    with pytest.raises(UnsupportedError, match="layer has 3 experts, which 2 ranks cannot share evenly"):
        as_threads(2, work)


def test_ranks_at_different_layers_are_told_by_name() -> None:
    def work(ranks: Ranks) -> None:
        ranks.divide(2)
        ExpertExchange(f"blocks.{ranks.rank}", ranks.group(EXPERTS), lambda *_: None).dispatch(torch.zeros(2, 1, 1))

    with pytest.raises(RanksDifferError, match=r"rank 0 at 'dispatch of blocks.0, .*rank 1 at 'dispatch of blocks.1, "):
        as_threads(2, work)


class Here(nn.Module):
    """An exchange that is a module."""

    def dispatch(self, slots: torch.Tensor) -> torch.Tensor:
        return slots

    combine = dispatch


class OfClass(nn.Module):
    exchange = Here()


def test_layers_get_their_own_exchange_back() -> None:
    """Be it a layer's attribute, a module of it, or its class's. What is something else of that name stays."""

    def work(ranks: Ranks) -> None:
        model = nn.ModuleList([nn.Linear(1, 1), nn.Linear(1, 1), OfClass(), nn.Linear(1, 1)])
        own: list[Any] = [SimpleNamespace(dispatch=print, combine=print), Here(), OfClass.exchange, "New York"]
        for layer, exchange in zip(model, own, strict=True):
            if layer is not model[2]:
                layer.exchange = exchange

        def exchanges() -> list[bool]:
            return [layer.exchange is exchange for layer, exchange in zip(model, own, strict=True)]

        undo = exchange_experts(model, ranks, lambda *_: None)
        assert exchanges() == [True] * 4, "nobody shares experts"
        undo()
        ranks.divide(2)
        undo = exchange_experts(model, ranks, lambda *_: None)
        assert exchanges() == [False, False, False, True]
        assert all(isinstance(layer.exchange, ExpertExchange) for layer in model[:3])
        undo()
        assert exchanges() == [True] * 4 and "exchange" not in vars(model[2])

    as_threads(2, work)


def test_what_is_an_expert_s_says_so() -> None:
    model = nn.Sequential(nn.Linear(1, 1), nn.Sequential(nn.Linear(1, 1)), nn.Linear(1, 1))
    for module, said in zip(model, ("world", "replica", True), strict=True):
        module.data_parallel = said  # type: ignore[assignment]
    assert of_replicas(model) == frozenset(model[1].parameters())
    model[0].data_parallel = "expert"  # type: ignore[assignment]
    with pytest.raises(UnsupportedError, match="module 0 has data_parallel='expert': give 'replica' for what only"):
        of_replicas(model)


def processes(tmp_path: Path, dies_at: int = 0) -> list[subprocess.Popen[str]]:
    (tmp_path / "work.py").write_text(WORK)
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    command = [sys.executable, str(tmp_path / "work.py")]
    return [
        subprocess.Popen(
            [*command, str(rank), str(tmp_path), str(dies_at)], env=variables, cwd=ROOT, stderr=subprocess.PIPE, text=True
        )
        for rank in range(2)
    ]


@pytest.mark.long
def test_processes_that_share_experts_have_the_bits_of_threads(tmp_path: Path) -> None:
    for process in processes(tmp_path):
        _, said = process.communicate(timeout=240)
        assert process.returncode == 0, said
    threads: list[Run] = on_ranks(STRATEGIES["elixir"], 2, 2, clip=0.5)
    for rank, expected in enumerate(threads):
        values, norms = pickle.loads((tmp_path / f"found-{rank}").read_bytes())
        assert norms == expected.norms
        assert values.keys() == expected.parameters.keys()
        assert all(torch.equal(values[name], value) for name, value in expected.parameters.items())


@pytest.mark.long
@pytest.mark.parametrize("dies_at", [2, 7])
def test_a_rank_killed_in_an_all_to_all_ends_the_others(dies_at: int, tmp_path: Path) -> None:
    """In forward of the first step, and in the second's backward: four a step and layer."""
    both = processes(tmp_path, dies_at)
    said = [process.communicate(timeout=240)[1] for process in both]
    ended = time.time()
    assert both[1].returncode == -9 and both[0].returncode not in (0, -9), said
    assert "PeerGoneError: another rank is gone" in said[0]
    assert ended - float((tmp_path / "died").read_text()) < END_S
