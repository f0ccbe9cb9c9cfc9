"""What an operation costs on a profile: bytes by hand, and the contention that was measured."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from systems.planning import hardware
from systems.planning.clock.clocks import TimedJob, run
from systems.planning.clock.rates import DISK, HOST_DRAM, Costs, Rates, default_queues
from systems.planning.hardware import Contention, Flow, HardwareProfile
from systems.planning.plan import LaneKind
from systems.planning.step.operations import ScheduledOperation, Work
from tests.planning.machines import machine
from tests.planning.synthetic import context, layout_of

NUMEL = 1000 * 128
GB = 10**9


def costs(accumulate: int = 1, **figures: Any) -> Costs:
    profile = machine(**figures)
    layout = layout_of([(1000, [0])])
    return Costs(layout, context(accumulate=accumulate), Rates(profile, 1), default_queues())


def operation(kind: Work, lane: LaneKind, **more: Any) -> ScheduledOperation:
    return ScheduledOperation(0, 0, kind, lane, 0, **more)


def test_bytes_of_adam_by_hand() -> None:
    """bf16: gradient 2, parameter 2, master and moments read and written 24: 28 bytes, as the roofs are measured."""
    update = operation(Work.UPDATE, LaneKind.CPU)
    assert costs().host_bytes(update) == 28 * NUMEL
    assert costs(accumulate=2).host_bytes(update) == (24 + 8 + 2) * NUMEL  # the accumulator is read and cleared
    accumulation = operation(Work.ACCUMULATE, LaneKind.CPU)
    assert costs(accumulate=2).host_bytes(accumulation) == (2 + 8) * NUMEL
    assert costs(accumulate=2).host_bytes(operation(Work.RESTORE, LaneKind.CPU)) == (4 + 2) * NUMEL
    squares = costs(accumulate=2), operation(Work.SQUARES, LaneKind.CPU), operation(Work.SQUARES, LaneKind.COMPUTE)
    assert squares[0].host_bytes(squares[1]) == squares[0].device_bytes(squares[2]) == 4 * NUMEL
    ahead, clear = operation(Work.UPDATE_AHEAD, LaneKind.CPU), operation(Work.CLEAR, LaneKind.CPU)
    assert costs().host_bytes(ahead) == 28 * NUMEL
    assert costs(accumulate=2).host_bytes(ahead) == (24 + 4 + 2) * NUMEL  # the accumulator is read alone
    assert costs(accumulate=2).host_bytes(clear) == 4 * NUMEL
    on_device = operation(Work.UPDATE, LaneKind.COMPUTE)
    assert (costs().device_bytes(on_device), costs().host_bytes(on_device)) == (28 * NUMEL, 0)
    assert costs().device_bytes(operation(Work.SQUARES, LaneKind.COMPUTE)) == 2 * NUMEL
    assert costs().device_bytes(operation(Work.COMPUTE, LaneKind.COMPUTE)) == 0


def test_updates_go_in_the_order_of_the_next_uses_and_sums_of_squares_before_them() -> None:
    made = replace(costs(accumulate=2), updates={0: 7})
    kinds = (Work.UPDATE, Work.UPDATE_AHEAD, Work.CLEAR, Work.SQUARES, Work.ACCUMULATE)
    assert [made.job(operation(kind, LaneKind.CPU), ()).priority for kind in kinds] == [7, 7, 7, -2, -1]


def contended(name: str) -> tuple[float, float]:
    """GB/s of CPU Adam and of copies both ways, over all devices of the node, while neither stops."""
    profile = hardware.load(name)
    rates, size = Rates(profile, profile.devices), 100 * GB
    layout = layout_of([(1000, [0])])
    made = Costs(layout, context(ranks=profile.devices), rates, default_queues())
    adam = made.job(operation(Work.UPDATE, LaneKind.CPU), ())._replace(flow_bytes=size)
    copies = [made.job(operation(Work.FETCH, LaneKind.H2D, bytes=size), ())]
    copies += [made.job(operation(Work.OFFLOAD, LaneKind.D2H, bytes=size), ())]
    long = 100 * size  # each copy outlasts Adam, and then both run without it
    endless = [TimedJob(c.queue, flow_bytes=long, rate=c.rate, claims=c.claims) for c in copies]
    spans = run([adam, *endless], rates.resources())
    seconds, end = spans[0].end_s, max(span.end_s for span in spans)
    moved = 2 * long - rates.both_ways * (end - seconds)
    return size / seconds * profile.devices / GB, moved / seconds * profile.devices / GB


def test_the_contention_measured_on_four_devices() -> None:
    """Measured on four H100: with copies both ways on all devices CPU Adam still ran at 122 GB/s while they dropped to 53."""
    adam, copies = contended("h100-80g-x4")
    assert adam == pytest.approx(122, rel=0.01)
    assert copies == pytest.approx(53, rel=0.01)


def test_the_contention_measured_on_one_device() -> None:
    """Measured on one H100: about 140 GB/s combined, CPU Adam between 100 and 124 of it."""
    adam, copies = contended("h100-80g-x1")
    assert 100 <= adam <= 124 and adam + copies == pytest.approx(140)


def measured(devices: int = 1) -> HardwareProfile:
    """CPU Adam 160 GB/s alone, 120 beside copies one way and 100 beside both; copies 50, 40 and 30, 45 without Adam."""
    adam, h2d, d2h = Flow.CPU_ADAM, Flow.H2D, Flow.D2H
    alone: list[dict[Flow, float]] = [{adam: 160.0}, {h2d: 50.0}, {d2h: 50.0}]
    pairs: list[dict[Flow, float]] = [{adam: 120.0, h2d: 40.0}, {adam: 120.0, d2h: 40.0}, {h2d: 45.0, d2h: 45.0}]
    rates = [*alone, *pairs, {adam: 100.0, h2d: 30.0, d2h: 30.0}]
    figures = dict(
        cpu_adam_bytes_per_s=80 * GB, h2d_bytes_per_s=50 * GB, d2h_bytes_per_s=50 * GB, host_dram_bytes_per_s=90 * GB
    )
    in_bytes = tuple({flow: rate * GB for flow, rate in those.items()} for those in rates)
    return machine(devices=devices, **figures).model_copy(update={"contention": Contention(rates=in_bytes, source="test")})


@pytest.mark.parametrize(("lanes", "gbs"), [((0,), [80]), ((0, 1), [60, 40]), ((1, 2), [45, 45]), ((0, 1, 2), [50, 30, 30])])
def test_measured_contention_is_what_flows_get_scaled_to_their_rates_alone(lanes: tuple[int, ...], gbs: list[float]) -> None:
    """The profile's Adam is half as fast as the measured one, and so it is beside copies."""
    profile = measured()
    made = Costs(layout_of([(1000, [0])]), context(), Rates(profile, 1), default_queues())
    operations = (
        operation(Work.UPDATE, LaneKind.CPU),
        operation(Work.FETCH, LaneKind.H2D, bytes=GB),
        operation(Work.OFFLOAD, LaneKind.D2H, bytes=GB),
    )
    jobs = [made.job(operations[lane], ())._replace(fixed_s=0.0, flow_bytes=gbs[at] * GB) for at, lane in enumerate(lanes)]
    ends = [span.end_s for span in run(jobs, made.rates.resources())]
    assert ends == pytest.approx([1.0] * len(lanes))


def test_contention_is_of_all_devices_of_a_node() -> None:
    """With two devices a rank has half of everything; one rank of two devices shares by the capacity, as without."""
    whole, alone = Rates(measured(devices=2), 2), Rates(measured(devices=2), 1)
    assert whole.resources()[HOST_DRAM].beside and whole.host_dram == 160 * GB / 2
    assert not alone.resources()[HOST_DRAM].beside and alone.host_dram == 90 * GB


def test_an_update_takes_its_fixed_time() -> None:
    update = operation(Work.UPDATE, LaneKind.CPU)
    assert costs().job(update, ()).fixed_s == 0.0
    assert costs(cpu_update_s=1e-4).job(update, ()).fixed_s == 1e-4


def test_a_disk_is_shared_by_the_nodes_ranks_and_may_be_missing() -> None:
    profile = hardware.load("angel-a100-40g-x8")
    layout = layout_of([(1000, [0])])
    made = Costs(layout, context(ranks=8), Rates(profile, 8), default_queues())
    read = made.job(operation(Work.FETCH, LaneKind.DISK_READ, bytes=GB), (3,))
    assert (read.queue, read.waits, read.flow_bytes) == ("disk-read", (3,), GB)
    assert read.rate == pytest.approx(3.5e9 / 8)
    with pytest.raises(ValueError, match="the plan uses a disk, and the hardware profile .* has none"):
        costs().job(operation(Work.FETCH, LaneKind.DISK_WRITE, bytes=GB), ())


@pytest.mark.parametrize("ranks", [1, 4])
@pytest.mark.parametrize("together", [None, 1.0, 2.5, 4.0, 9.0])
def test_one_way_of_a_disk_alone_is_not_slowed_by_what_both_at_once_reach(together: float | None, ranks: int) -> None:
    """Reading has 3 GB/s and writing 2: beside each other they have together's, in proportion, and never more than alone."""
    speeds = {"disk_read_bytes_per_s": 3 * GB, "disk_write_bytes_per_s": 2 * GB}
    both = None if together is None else together * GB
    rates = Rates(machine(devices=ranks, **speeds, disk_both_ways_bytes_per_s=both), ranks)
    made = replace(costs(), rates=rates)
    read = made.job(operation(Work.FETCH, LaneKind.DISK_READ, bytes=3 * GB), ())._replace(fixed_s=0.0)
    write = made.job(operation(Work.OFFLOAD, LaneKind.DISK_WRITE, bytes=2 * GB), ())._replace(fixed_s=0.0)
    alone = [run([job], rates.resources())[0].end_s for job in (read, write)]
    assert alone == pytest.approx([ranks, ranks])
    beside = [span.end_s for span in run([read, write], rates.resources())]
    assert beside == pytest.approx([ranks * 5 / min(5, together or 5)] * 2)


def test_a_machine_without_a_disk_has_rates_all_the_same() -> None:
    none: dict[str, Any] = dict.fromkeys(("disk_read_bytes_per_s", "disk_write_bytes_per_s"))
    for together in (None, 2 * GB):
        rates = Rates(machine(**none, disk_both_ways_bytes_per_s=together), 1)
        assert rates.resources()[DISK].capacity > 0
        with pytest.raises(ValueError, match="uses a disk, and the hardware profile"):
            rates.disk(LaneKind.DISK_READ)
