"""Adam out of place: the bits of the in-place form elsewhere, and nothing else changes."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import NamedTuple

import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st

from systems.adam.cpu import cpu_kernel
from systems.adam.cuda import TritonKernel
from systems.adam.kernel import AdamKernel, AdamRange, AdamTask, TorchKernel
from tests.substrate.test_adam import BITS, DTYPES, RANGE, available, random_state, same_bits, tables

POISON = {torch.int32: 0x7FA5A5A5, torch.int16: 0x7FA5}  # NaNs with a payload that no kernel writes
AFTER = 70  # elements behind a destination, more than a line of any type
STATES = ("master", "exp_avg", "exp_avg_sq")
KERNELS = [*(cpu_kernel(isa, threads) for isa, threads in itertools.product(available(), (1, 2))), TorchKernel()]
LONG = (  # more blocks than stay on the calling thread
    150_001,
    [
        replace(RANGE, offset=5, numel=70_000),
        replace(RANGE, offset=70_005, numel=1),
        replace(RANGE, offset=70_050, numel=79_000, decoupled=False),
    ],
)


NOTHING_BUT_NAN = replace(RANGE, offset=0, numel=1, lr=0.0, beta1=0.0, beta2=0.0, eps=0.0, weight_decay=0.0, step=1)


class Destination(NamedTuple):
    """numel elements in the midst of memory full of poison."""

    memory: torch.Tensor
    start: int
    numel: int

    @property
    def tensor(self) -> torch.Tensor:
        return self.memory[self.start : self.start + self.numel]

    def expected(self, result: torch.Tensor, touched: torch.Tensor) -> torch.Tensor:
        """The whole memory, if `result` has come to where `touched` and nothing elsewhere."""
        whole = Destination(poisoned(self.start, self.numel, result.dtype).memory, self.start, self.numel)
        bits = BITS[result.dtype]  # as integers: torch gives a NaN of one element other bits on its way into a mask
        whole.tensor.view(bits)[touched] = result.view(bits)[touched]
        return whole.memory


def poisoned(start: int, numel: int, dtype: torch.dtype) -> Destination:
    bits = BITS[dtype]
    return Destination(torch.full((start + numel + AFTER,), POISON[bits], dtype=bits).view(dtype), start, numel)


@given(
    table=tables(),
    gradient_dtype=st.sampled_from(DTYPES),
    out_dtype=st.sampled_from([None, *DTYPES]),
    start=st.integers(0, 3),
    starts=st.tuples(*[st.integers(0, 33)] * 4),
    special=st.booleans(),
    factor=st.sampled_from([1.0, 0.37, 1e-6]),
    seed=st.integers(0, 1000),
)
@example(LONG, torch.bfloat16, torch.bfloat16, 0, (0, 0, 0, 0), True, 0.37, 0)
@example(LONG, torch.float16, torch.float32, 1, (16, 5, 0, 33), True, 1.0, 1)
@example((0, []), torch.float32, torch.bfloat16, 0, (0, 1, 2, 3), False, 1.0, 2)
@example((1, [NOTHING_BUT_NAN]), torch.float32, torch.bfloat16, 0, (0, 0, 0, 0), True, 1.0, 0)
@settings(max_examples=60, deadline=None)
def test_the_bits_of_the_in_place_form_go_elsewhere_and_nothing_else_changes(
    table: tuple[int, list[AdamRange]],
    gradient_dtype: torch.dtype,
    out_dtype: torch.dtype | None,
    start: int,
    starts: tuple[int, int, int, int],
    special: bool,
    factor: float,
    seed: int,
) -> None:
    numel, ranges = table
    before = random_state(numel + start, seed, gradient_dtype, special=special)
    touched = torch.zeros(numel, dtype=torch.bool)
    for each in ranges:
        touched[each.offset : each.offset + each.numel] = True
    for kernel in KERNELS:
        inside = {name: tensor.clone()[start:] for name, tensor in before.items()}
        out = None if out_dtype is None else torch.zeros(numel, dtype=out_dtype)
        kernel.update(**inside, out=out, ranges=ranges, factor=factor)

        old = {name: tensor.clone() for name, tensor in before.items()}
        master, exp_avg, exp_avg_sq = (poisoned(at, numel, torch.float32) for at in starts[:3])
        outs = [] if out_dtype is None else [poisoned(starts[3], numel, out_dtype)]
        kernel.update(
            **{name: tensor[start:] for name, tensor in old.items()},
            out=outs[0].tensor if outs else None,
            ranges=ranges,
            factor=factor,
            into=(master.tensor, exp_avg.tensor, exp_avg_sq.tensor),
        )
        assert all(same_bits(old[name], before[name]) for name in before), kernel.name
        results = [*(inside[name] for name in STATES), *([] if out is None else [out])]
        for destination, result in zip((master, exp_avg, exp_avg_sq, *outs), results, strict=True):
            assert same_bits(destination.memory, destination.expected(result, touched)), kernel.name


@pytest.mark.parametrize("kernel", KERNELS[-2:], ids=lambda kernel: kernel.name)
def test_one_task_may_be_in_place_and_the_next_elsewhere(kernel: AdamKernel) -> None:
    first, second = random_state(1000, 1), random_state(1000, 2)
    right = [{name: tensor.clone() for name, tensor in state.items()} for state in (first, second)]
    ranges = [replace(RANGE, numel=1000)]
    kernel.update_all([AdamTask(**state, out=None, ranges=ranges) for state in right], factor=0.5)
    made = (torch.zeros(1000), torch.zeros(1000), torch.zeros(1000))
    tasks = [AdamTask(**first, out=None, ranges=ranges), AdamTask(**second, out=None, ranges=ranges, into=made)]
    kernel.prepare_all(tasks)(0.5)
    assert all(same_bits(first[name], right[0][name]) for name in first)
    assert all(same_bits(tensor, right[1][name]) for tensor, name in zip(made, STATES, strict=True))


def test_what_a_task_writes_elsewhere_overlaps_nothing_of_it() -> None:
    numel, ranges = 64, [replace(RANGE, numel=64)]
    names = (*STATES, "gradient", "new master", "new exp_avg", "new exp_avg_sq", "out")

    def task(**changed: torch.Tensor) -> AdamTask:
        tensors = {name: torch.zeros(numel) for name in names} | changed
        into = (tensors["new master"], tensors["new exp_avg"], tensors["new exp_avg_sq"])
        read = {name: tensors[name] for name in (*STATES, "gradient")}
        return AdamTask(**read, out=tensors["out"], ranges=ranges, into=into)

    task().check()
    for one, other in itertools.combinations(names, 2):
        for shift in (0, numel - 1, numel):
            memory = torch.zeros(2 * numel)
            changed = task(**{one: memory[:numel], other: memory[shift : shift + numel]})
            if shift == numel or other in (*STATES, "gradient"):  # side by side, or both only read
                changed.check()
            else:
                with pytest.raises(ValueError, match="overlap"):
                    changed.check()


def test_bad_destinations_are_refused() -> None:
    good, ranges = random_state(64, 0), [replace(RANGE, numel=64)]
    fine = torch.zeros(3, 64)

    def task(third: torch.Tensor) -> AdamTask:
        return AdamTask(**good, out=None, ranges=ranges, into=(fine[0], fine[1], third))

    task(fine[2]).check()
    with pytest.raises(ValueError, match="must be fp32"):
        task(fine[2].bfloat16()).check()
    with pytest.raises(ValueError, match="64 elements"):
        task(torch.zeros(65)).check()
    with pytest.raises(ValueError, match="contiguous"):
        task(torch.zeros(128)[::2]).check()
    with pytest.raises(ValueError, match="in place alone"):
        TritonKernel().update_all([task(fine[2])], factor=1.0)
