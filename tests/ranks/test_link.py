"""The link: the bits of the ordered sum, whoever carries it, and ranks that are not at the same collective."""

from __future__ import annotations

import os
import pickle
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.utils._python_dispatch import TorchDispatchMode

from systems.device import device as devices
from systems.device.emulated import EmulatedDevice
from systems.device.lanes.lane import LinkLane
from systems.device.watch.events import EventLog
from systems.ranks.gloo import GlooLink
from systems.ranks.link import Alone, Link, RanksDifferError, shard_of
from systems.ranks.loopback import as_threads
from systems.ranks.nccl import NcclLink
from systems.ranks.processes import FRAME_BYTES
from systems.ranks.ranks import Ranks, SingleRank
from systems.ranks.staging import Staging

ROOT = Path(__file__).resolve().parents[2]
LENGTHS = (0, 1, *range(FRAME_BYTES // 2 - 30, FRAME_BYTES // 2, 5), *range(FRAME_BYTES - 60, FRAME_BYTES + 10, 10))
DTYPES = (torch.float32, torch.bfloat16, torch.float16)


def values_of(rank: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """Of very different sizes, so that the order of additions shows."""
    luck = torch.Generator().manual_seed(rank)
    return (torch.randn(numel, generator=luck) * 10.0 ** torch.randint(-3, 4, (numel,), generator=luck)).to(dtype)


def expected_sum(size: int, numel: int, dtype: torch.dtype) -> torch.Tensor:
    total = torch.zeros(numel)
    for rank in range(size):
        total = total + values_of(rank, numel, dtype).float() if rank else values_of(0, numel, dtype).float()
    return total.to(dtype)


def both(ranks: Ranks, numel: int, dtype: torch.dtype) -> torch.Tensor:
    """A reduction, and then a gathering of what came of it: every rank has the whole sum."""
    whole = values_of(ranks.rank, numel, dtype)
    ranks.link.reduce("reduce", whole)
    ranks.link.gather("gather", whole)
    return whole


@settings(max_examples=40, deadline=None)
@given(st.integers(1, 5), st.integers(0, 40), st.sampled_from(DTYPES))
def test_sums_are_in_rank_order_and_rounded_once(size: int, shard: int, dtype: torch.dtype) -> None:
    found = as_threads(size, lambda ranks: both(ranks, size * shard, dtype))
    for each in found:
        assert torch.equal(each, expected_sum(size, size * shard, dtype))


def test_the_order_is_seen() -> None:
    """Else the test above could not fail."""
    numel = 3000
    backwards = values_of(2, numel, torch.float32) + values_of(1, numel, torch.float32) + values_of(0, numel, torch.float32)
    assert not torch.equal(backwards, expected_sum(3, numel, torch.float32))


@settings(max_examples=100, deadline=None)
@given(st.integers(2, 5), st.integers(0, 3000), st.sampled_from(DTYPES), st.integers(0, 9000), st.booleans())
def test_the_room_of_a_reduction_bounds_its_pieces_and_not_its_bits(
    size: int, shard: int, dtype: torch.dtype, nbytes: int, together: bool
) -> None:
    """Each rank's pieces hold what it would send; what comes is put where the library would. together: its way."""
    wholes = [values_of(rank, size * shard, dtype) for rank in range(size)]
    stagings = [Staging(nbytes, torch.device("cpu"), size, together=together) for _ in range(size)]
    taken = sum(room.nbytes for room in stagings[0]._rooms)
    assert taken <= max(nbytes, (2 * size + 2) * 256)
    ways = [staging.pieces(whole, rank) for rank, (staging, whole) in enumerate(zip(stagings, wholes, strict=True))]
    for pieces in zip(*ways, strict=True):
        for rank, piece in enumerate(pieces):
            for source, other in enumerate(pieces):
                piece.coming[source].copy_((other.together() if together else other.part)[rank])
        for piece in pieces:
            piece.add_up()
    found = torch.cat([shard_of(whole, rank, size) for rank, whole in enumerate(wholes)])
    assert torch.equal(found, expected_sum(size, size * shard, dtype))


def test_one_rank_moves_nothing() -> None:
    ranks = SingleRank()
    whole = values_of(0, 7, torch.bfloat16)
    before = whole.clone()
    assert torch.equal(both(ranks, 7, torch.bfloat16), before)
    assert ranks.exchange("a", {"a": 1}) == [{"a": 1}] and isinstance(ranks.link, Alone)


def test_what_cannot_be_shared_evenly() -> None:
    with pytest.raises(ValueError, match="7 elements cannot be shared evenly by 2 ranks"):
        shard_of(torch.zeros(7), 0, 2)


def test_ranks_exchange_values() -> None:
    told = as_threads(3, lambda ranks: ranks.exchange("a", (ranks.rank, "x" * ranks.rank)))
    assert told == [[(0, ""), (1, "x"), (2, "xx")]] * 3


def test_ranks_that_tell_about_different_things_are_told_by_name() -> None:
    with pytest.raises(RanksDifferError, match="rank 0 at 'about 0'; rank 1 at 'about 1'"):
        as_threads(2, lambda ranks: ranks.exchange(f"about {ranks.rank}", None))


def test_ranks_that_differ_are_told_by_name() -> None:
    def differ(ranks: Ranks) -> None:
        link: Link = ranks.link
        whole = torch.zeros(4)
        if ranks.rank == 1:
            link.gather("gather bundle 3 (blocks.1)", whole)
        else:
            link.reduce("reduce bundle 4 (blocks.2)", whole)

    with pytest.raises(RanksDifferError, match=r"rank 0 at 'reduce bundle 4 .*'; rank 1 at 'gather bundle 3 .*blocks.1"):
        as_threads(2, differ)


def test_a_rank_that_fails_leaves_nobody_waiting() -> None:
    def work(ranks: Ranks) -> None:
        if ranks.rank == 2:
            raise ZeroDivisionError
        ranks.link.gather("never", torch.zeros(3))

    with pytest.raises(ZeroDivisionError):
        as_threads(3, work)


def of_processes(size: int, tmp_path: Path, what: str, before: str = "", **given: Any) -> list[Any]:
    """What `what`, an expression over `ranks`, is on each of some processes. before: a statement; given: of Processes."""
    script = f"""
import pickle, sys, torch, torch.distributed as dist
from systems.ranks.processes import Processes
from tests.ranks.test_link import *
rank = int(sys.argv[1])
dist.init_process_group("gloo", init_method="file://{tmp_path}/meet", rank=rank, world_size={size})
{before}
ranks = None
try:
    ranks = Processes(**{ {"stuck_s": 0.5} | given })
    found = {what}
except RuntimeError as error:
    found = f"{{type(error).__name__}}: {{error}}"
open(f"{tmp_path}/found-{{rank}}", "wb").write(pickle.dumps(found))
ranks and ranks.close()
dist.destroy_process_group()
"""
    variables = {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo", "OMP_NUM_THREADS": "1"}
    started = [subprocess.Popen([sys.executable, "-c", script, str(rank)], env=variables, cwd=ROOT) for rank in range(size)]
    assert [each.wait(timeout=120) for each in started] == [0] * size
    return [pickle.loads((tmp_path / f"found-{rank}").read_bytes()) for rank in range(size)]


def test_processes_have_the_same_bits(tmp_path: Path) -> None:
    numel = 3 * 70_000
    told = "[ranks.exchange('a', 'x' * length * ranks.rank) for length in LENGTHS]"
    what = f"[both(ranks, {numel}, dtype) for dtype in DTYPES] + [{told}, {BROUGHT}]"
    found = of_processes(3, tmp_path, what)
    assert_brought([each for *_, each in found])
    for *sums, told, _ in found:
        for dtype, total in zip(DTYPES, sums, strict=True):
            assert torch.equal(total, expected_sum(3, numel, dtype))
        assert told == [["", "x" * length, "xx" * length] for length in LENGTHS]


def brought(ranks: Ranks, onto: int | None) -> torch.Tensor | None:
    """A tensor whose pieces lie on ranks in turn, some of them empty; where it comes together, else None."""
    whole, here = torch.full((100,), -1.0), onto in (None, ranks.rank)
    for each in PLACES[ranks.rank]:
        whole[each] = pieced()[each]
    places = [[whole[each] for each in mine] if here or rank == ranks.rank else [] for rank, mine in enumerate(PLACES)]
    ranks.bring("pieces", lambda: places, onto)
    return whole if here else None


PLACES = ([slice(0, 10), slice(60, 100)], [slice(10, 10), slice(40, 60)], [slice(10, 40)])


def pieced() -> torch.Tensor:
    """NaNs of other bits than torch's own among them, which have to come through."""
    found = torch.arange(100, dtype=torch.float32)
    found.view(torch.int32)[::7] = 0x7FC0BEEF
    return found


def of_rank_0(ranks: Ranks) -> list[torch.Tensor]:
    """Tensors of several types, without elements and without dimensions."""
    found = [torch.tensor([True, False]), torch.tensor([[1 + 2j]]), torch.tensor(7), torch.empty(0, 3), pieced().bfloat16()]
    return [ranks.of_first("a", each if ranks.rank == 0 else torch.zeros_like(each)) for each in found]


def assert_brought(found: list[Any]) -> None:
    """found: by rank, onto each of three and onto all; and what rank 0 gave."""
    for rank, (*onto_each, onto_all, received) in enumerate(found):
        assert [number for number, each in enumerate(onto_each) if each is not None] == [rank]
        for each in (onto_each[rank], onto_all):
            assert torch.equal(each.view(torch.int32), pieced().view(torch.int32))
        for mine, first in zip(received, of_rank_0(SingleRank()), strict=True):
            assert mine.dtype == first.dtype and mine.shape == first.shape
            assert torch.equal(mine.reshape(-1).view(torch.uint8), first.reshape(-1).view(torch.uint8))


BROUGHT = "[brought(ranks, onto) for onto in (0, 1, 2, None)] + [of_rank_0(ranks)]"


def test_what_ranks_have_pieces_of_comes_together_bit_for_bit() -> None:
    assert_brought(as_threads(3, lambda ranks: [brought(ranks, onto) for onto in (0, 1, 2, None)] + [of_rank_0(ranks)]))


def test_ranks_that_bring_different_things_together_are_told_by_name() -> None:
    with pytest.raises(RanksDifferError, match="rank 0 at 'pieces, onto 0'; rank 1 at 'pieces, onto 1'"):
        as_threads(3, lambda ranks: brought(ranks, ranks.rank))


def test_what_one_rank_cannot_bring_is_told_on_all() -> None:
    def work(ranks: Ranks) -> str:
        def places() -> list[list[torch.Tensor]]:
            if ranks.rank == 1:
                raise OSError("its disk is gone")
            return [[torch.zeros(1)]] * 3

        with pytest.raises(OSError, match="rank 1: its disk is gone"):
            ranks.bring("pieces", places)
        return "told"

    assert as_threads(3, work) == ["told"] * 3


class Seen(TorchDispatchMode):
    """names: of operations, those with tensors that would count as activations of a pass."""

    def __init__(self) -> None:
        super().__init__()
        self.names: list[str] = []

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        self.names.append(str(func))
        return func(*args, **(kwargs or {}))


def swapped(ranks: Ranks) -> tuple[list[str], list[float]]:
    source, into = torch.arange(4.0) + 10 * ranks.rank, torch.empty(4)
    with Seen() as seen:
        ranks.link.swap("a", into, source)
    return seen.names, into.tolist()


def test_a_pass_sees_nothing_of_a_swap_but_what_comes(tmp_path: Path) -> None:
    """What the library works with is host memory, which it may hold for a while longer: peaks would differ by it."""
    copies = ["aten.copy_.default"]
    expected = [(copies, [0.0, 1.0, 10.0, 11.0]), (copies, [2.0, 3.0, 12.0, 13.0])]
    assert of_processes(2, tmp_path, "swapped(ranks)") == expected


def test_processes_that_differ_are_told_by_name(tmp_path: Path) -> None:
    what = "ranks.link.gather('one', torch.zeros(2)) if ranks.rank else ranks.link.reduce('two', torch.zeros(2))"
    told = "RanksDifferError: ranks are at different collectives (rank 0 at 'two'; rank 1 at 'one')"
    assert all(each.startswith(told) for each in of_processes(2, tmp_path, what))


def end(folder: str, after: str | None = None) -> None:
    """This process, without a word to the others. after: a file that another writes first."""
    while after and not (Path(folder) / after).exists():
        time.sleep(0.01)
    (Path(folder) / "found-1").write_bytes(pickle.dumps("ended"))
    os._exit(0)


def test_a_process_that_is_gone_is_told_as_that(tmp_path: Path) -> None:
    """Once both have all their groups: making one takes the other too."""
    last = f"(Path({str(tmp_path)!r}) / 'made').touch() or ranks.exchange('last words', 0)"
    told, _ = of_processes(2, tmp_path, f"end({str(tmp_path)!r}, 'made') if ranks.rank else {last}")
    assert told.startswith("PeerGoneError: another rank is gone, or has let wait too long, at 'last words': ")


def test_a_process_that_is_gone_before_there_are_groups_is_told_as_that(tmp_path: Path) -> None:
    told, _ = of_processes(2, tmp_path, "'made'", f"rank and end({str(tmp_path)!r})", timeout_s=1)
    assert told.startswith("PeerGoneError: another rank is gone, or has let wait too long, at 'the making of groups': ")


def test_processes_that_wait_for_each_other_for_ever_end(tmp_path: Path, capfd: pytest.CaptureFixture[str]) -> None:
    """In a place that no tag shows: one tells what the other does not ask. The first to see it ends both."""
    what = "ranks.exchange('one', 0) if ranks.rank else ranks.link.gather('two', torch.zeros(2))"
    with pytest.raises(AssertionError, match=r"1.*\] == \[0, 0\]"):
        of_processes(2, tmp_path, what)
    told = "ranks wait for each other: rank 0 in 'two' (number 1 of link); rank 1 in 'one' (number 2 of control)"
    assert told in capfd.readouterr().err


@pytest.mark.parametrize("queues", [True, False])
def test_who_issues_a_collective_carries_it_out_if_its_link_queues(queues: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    """Any other may keep whoever comes to it waiting for other ranks."""
    taken: list[bool] = []

    class Lane(LinkLane):
        def __init__(self, *args: Any, in_caller: bool, **more: Any) -> None:
            taken.append(in_caller)
            super().__init__(*args, in_caller=in_caller, **more)

    monkeypatch.setattr(devices, "LinkLane", Lane)
    ranks = SingleRank()
    ranks.link.queues = queues
    device = EmulatedDevice(1 << 20, EventLog(keep=False))
    devices.join_ranks(device, ranks)
    device.close()
    assert taken == [queues] and NcclLink.queues and not GlooLink.queues
