"""The optimizer's arithmetic: against torch.optim (case C24), bit for bit between instruction sets, threads, CUDA."""

from __future__ import annotations

import itertools
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from systems.adam.cpu import ISAS, Isa, cpu_kernel
from systems.adam.cuda import cuda_kernel
from systems.adam.kernel import AdamKernel, AdamRange, AdamTask, TorchKernel, coefficients
from systems.errors import UnsupportedError
from systems.native import build

DTYPES = (torch.float32, torch.bfloat16, torch.float16)
BITS = {torch.float32: torch.int32, torch.bfloat16: torch.int16, torch.float16: torch.int16}
RANGE = AdamRange(offset=0, numel=0, lr=1e-3, beta1=0.9, beta2=0.999, eps=1e-8, weight_decay=0.1, decoupled=True, step=1)


def available() -> tuple[Isa, ...]:
    best = build.adam_library().best_isa()
    return ISAS[: best + 1]


def same_bits(a: torch.Tensor, b: torch.Tensor) -> bool:
    return torch.equal(a.cpu().view(BITS[a.dtype]), b.cpu().view(BITS[b.dtype]))


def random_state(numel: int, seed: int, gradient: torch.dtype = torch.float32, *, special: bool = False) -> dict[str, Any]:
    """Tensors, by the names that they have in a task; special: sprinkled, each differently."""
    generator = torch.Generator().manual_seed(seed)
    master, exp_avg, exp_avg_sq, values = torch.randn(4, numel, generator=generator)
    state = {"master": master, "exp_avg": exp_avg, "exp_avg_sq": exp_avg_sq.square(), "gradient": values.to(gradient)}
    for position, tensor in enumerate(state.values()):
        if special:
            sprinkle(tensor, seed + position)
    return state


# --- against torch.optim ---


@pytest.mark.parametrize("decoupled", [True, False], ids=["adamw", "adam"])
@pytest.mark.parametrize("numel", [1, 7, 1023, 1025, 4097, 40_000])
@pytest.mark.one_in(2)
def test_c24_agrees_with_torch_optim_over_200_steps(decoupled: bool, numel: int) -> None:
    torch.set_num_threads(1)  # a threaded sqrt of 4097 elements waits 8 ms for its second thread on a busy machine
    kernels = [cpu_kernel(threads=1), cpu_kernel(threads=8), TorchKernel()]
    steps = 200 if numel < 40_000 else 40  # the largest is there for its threads
    for weight_decay, eps in itertools.product((0.0, 0.1), (1e-8, 1e-6)):
        generator = torch.Generator().manual_seed(numel)
        start = torch.randn(numel, generator=generator)
        theirs = torch.nn.Parameter(start.clone())
        make = torch.optim.AdamW if decoupled else torch.optim.Adam
        optimizer = make([theirs], lr=1e-3, eps=eps, weight_decay=weight_decay)
        ours = [(start.clone(), torch.zeros(numel), torch.zeros(numel), torch.zeros(numel)) for _ in kernels]
        for step in range(1, steps + 1):
            theirs.grad = torch.randn(numel, generator=generator)
            scaled = theirs.grad * 4
            each = replace(RANGE, numel=numel, eps=eps, weight_decay=weight_decay, decoupled=decoupled, step=step)
            for kernel, (p, m, v, out) in zip(kernels, ours, strict=True):
                kernel.update_all([AdamTask(p, m, v, scaled, out, [each])], factor=0.25)
            optimizer.step()
        state = optimizer.state[theirs]
        right = (theirs.data, state["exp_avg"], state["exp_avg_sq"], theirs.data)
        for kernel, mine in zip(kernels, ours, strict=True):
            for a, b in zip(mine, right, strict=True):
                assert (a - b).abs().max() <= 1e-6, kernel.name


def test_one_step_agrees_with_double_precision() -> None:
    before = random_state(1000, seed=0)
    now = {name: tensor.clone() for name, tensor in before.items()}
    each = replace(RANGE, numel=1000, step=7, lr=0.01)
    cpu_kernel().update(**now, out=None, ranges=[each], factor=0.5)
    p, m, v, g = (before[name].numpy().astype(np.float64) for name in ("master", "exp_avg", "exp_avg_sq", "gradient"))
    g *= 0.5
    m, v = 0.9 * m + 0.1 * g, 0.999 * v + 0.001 * g * g
    p = p * (1 - 0.01 * 0.1) - 0.01 / (1 - 0.9**7) * m / (np.sqrt(v / (1 - 0.999**7)) + 1e-8)
    for name, right in (("exp_avg", m), ("exp_avg_sq", v), ("master", p)):
        np.testing.assert_allclose(now[name].numpy(), right, rtol=2e-6, atol=1e-7)


# --- bit for bit between instruction sets and threads ---

SPECIAL = [
    0.0,
    -0.0,
    float("nan"),
    -float("nan"),
    float("inf"),
    -float("inf"),
    1e-45,
    -1e-40,
    1e-38,
    6e-8,
    3e-5,
    65504.0,
    65520.0,
    3.4e38,
    1e19,
    1.0,
]


@st.composite
def tables(draw: st.DrawFn) -> tuple[int, list[AdamRange]]:
    ranges, at = [], 0
    for _ in range(draw(st.integers(0, 4))):
        at += draw(st.integers(0, 40))
        numel = draw(st.sampled_from([0, 1, 7, 15, 16, 17, 31, 100, 1023, 1025, 16_383, 16_385, 40_001]))
        ranges.append(
            AdamRange(
                offset=at,
                numel=numel,
                lr=draw(st.floats(0, 1)),
                beta1=draw(st.sampled_from([0.0, 0.5, 0.9])),
                beta2=draw(st.sampled_from([0.0, 0.95, 0.999])),
                eps=draw(st.sampled_from([0.0, 1e-8, 1e-6])),
                weight_decay=draw(st.sampled_from([0.0, 0.1])),
                decoupled=draw(st.booleans()),
                step=draw(st.integers(1, 1000)),
            )
        )
        at += numel
    return at + draw(st.integers(0, 20)), ranges


def sprinkle(tensor: torch.Tensor, seed: int) -> None:
    """Replaces a few elements by zeros, subnormals, infinities, NaNs and numbers at the edges of the formats."""
    generator = torch.Generator().manual_seed(seed)
    if tensor.numel():
        where = torch.randint(tensor.numel(), (min(32, tensor.numel()),), generator=generator)
        which = torch.randint(len(SPECIAL), where.shape, generator=generator)
        tensor[where] = torch.tensor(SPECIAL)[which].to(tensor.dtype)


@given(
    table=tables(),
    gradient_dtype=st.sampled_from(DTYPES),
    out_kind=st.sampled_from(["none", "gradient", *DTYPES]),
    start=st.integers(0, 3),
    special=st.booleans(),
    factor=st.sampled_from([1.0, 0.37, 1e-6]),
    seed=st.integers(0, 1000),
)
@settings(max_examples=120, deadline=None)
def test_every_instruction_set_and_thread_count_gives_the_same_bits(
    table: tuple[int, list[AdamRange]],
    gradient_dtype: torch.dtype,
    out_kind: str | torch.dtype,
    start: int,
    special: bool,
    factor: float,
    seed: int,
) -> None:
    numel, ranges = table
    before = random_state(numel + start, seed, gradient_dtype, special=special)
    results = []
    for isa, threads in itertools.product(available(), (1, 3)):
        now = {name: tensor.clone()[start:] for name, tensor in before.items()}  # start: tensors that are not aligned
        if out_kind in ("none", "gradient"):
            out = now["gradient"] if out_kind == "gradient" else None
        else:
            out = torch.full((numel,), 5.0).to(out_kind)
        cpu_kernel(isa, threads).update(**now, out=out, ranges=ranges, factor=factor)
        results.append([*now.values(), *([] if out is None else [out])])
    for other in results[1:]:
        assert all(same_bits(a, b) for a, b in zip(results[0], other, strict=True))
    touched = torch.zeros(numel, dtype=torch.bool)
    for each in ranges:
        touched[each.offset : each.offset + each.numel] = True
    for name, result in zip(before, results[0], strict=False):
        assert same_bits(result[~touched], before[name][start:][~touched])
    if out_kind == "gradient":
        rounded = results[0][0][touched].to(gradient_dtype)
        assert torch.equal(results[0][3][touched].nan_to_num(7.0), rounded.nan_to_num(7.0))


def test_results_do_not_depend_on_the_flush_mode_of_the_calling_thread() -> None:
    before = random_state(100, seed=1)
    before["exp_avg_sq"].fill_(1e-42)
    before["gradient"].fill_(1e-30)
    results = []
    for flush in (False, True):
        now = {name: tensor.clone() for name, tensor in before.items()}
        torch.set_flush_denormal(flush)
        try:
            cpu_kernel(threads=1).update(**now, out=None, ranges=[replace(RANGE, numel=100)], factor=1.0)
        finally:
            torch.set_flush_denormal(False)
        results.append(now)
    assert all(same_bits(results[0][name], results[1][name]) for name in before)
    assert results[0]["exp_avg_sq"].max() > 0


# --- conversions, sums, copies ---


@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_cast_rounds_as_torch_does(isa: Isa, dtype: torch.dtype) -> None:
    high = torch.arange(1 << 16, dtype=torch.int32) << 16
    bits = torch.cat([high | low for low in (0, 1, 0x0FFF, 0x1000, 0x1001, 0x7FFF, 0x8000, 0x8001, 0x3000, 0xFFFF)])
    values = bits.view(torch.float32)
    out = torch.empty(values.shape, dtype=dtype)
    cpu_kernel(isa, 2).cast(values, out)
    number = ~values.isnan()
    assert same_bits(out[number], values.to(dtype)[number])
    assert out[~number].isnan().all()


@pytest.mark.parametrize("isa", available())
@pytest.mark.parametrize("dtype", DTYPES, ids=str)
def test_accumulate_adds_the_exact_value_of_every_gradient(isa: Isa, dtype: torch.dtype) -> None:
    gradient = (
        torch.arange(1 << 16, dtype=torch.int32)
        .to(torch.int16)
        .view(torch.bfloat16 if dtype is torch.float32 else dtype)
        .to(dtype)
    )
    accumulator = torch.randn(gradient.shape, generator=torch.Generator().manual_seed(0))
    right = accumulator + gradient.float()
    cpu_kernel(isa, 2).accumulate(accumulator, gradient)
    number = ~right.isnan()
    assert same_bits(accumulator[number], right[number])
    assert accumulator[~number].isnan().all()


@pytest.mark.parametrize("dtype", DTYPES, ids=str)
@pytest.mark.parametrize("numel", [0, 1, 31, 33, 16_384, 16_385, 100_003])
def test_sum_squares_has_one_value_close_to_numpy(dtype: torch.dtype, numel: int) -> None:
    values = torch.randn(numel, generator=torch.Generator().manual_seed(numel)).to(dtype)
    sums = {cpu_kernel(isa, threads).sum_squares_all([values])[0] for isa in available() for threads in (1, 2, 5)}
    assert len(sums) == 1
    right = float(np.square(values.double().numpy()).sum())
    assert sums.pop() == pytest.approx(right, rel=1e-13)
    assert float(TorchKernel().sum_squares_all([values])[0]) == pytest.approx(right, rel=1e-13)


def test_sum_squares_shows_what_is_not_finite() -> None:
    values = torch.ones(1000)
    values[999] = float("inf")
    assert cpu_kernel().sum_squares_all([values])[0] == float("inf")
    values[3] = float("nan")
    assert np.isnan(cpu_kernel().sum_squares_all([values])[0])
    assert cpu_kernel().sum_squares_all([torch.full((4,), 3e38)])[0] == pytest.approx(4 * 9e76, rel=1e-6)


@pytest.mark.parametrize("numel", [0, 1, 1_000_003])
def test_copy(numel: int) -> None:
    source, destination = torch.randn(numel), torch.zeros(numel)
    cpu_kernel(threads=3).copy(destination, source)
    assert torch.equal(source, destination)


# --- ranges, arguments, choice of kernel ---


KERNELS = [cpu_kernel(), TorchKernel(), *([cuda_kernel()] if torch.cuda.is_available() else [])]


@pytest.mark.parametrize("kernel", KERNELS, ids=lambda kernel: kernel.name)
def test_many_tasks_at_once_equal_each_alone(kernel: AdamKernel) -> None:
    device = "cuda" if kernel.name == "triton" else "cpu"
    results = []
    for way in ("together", "alone", "prepared"):
        tasks = []
        for seed, (numel, dtype) in enumerate(itertools.product((1, 4096, 5000, 20_000, 0), DTYPES)):
            state = {name: tensor.to(device) for name, tensor in random_state(numel, seed, dtype).items()}
            ranges = [
                replace(RANGE, numel=numel // 3, step=seed + 1),
                replace(RANGE, offset=numel // 2, numel=numel // 2, decoupled=False),
            ]
            tasks.append(AdamTask(**state, out=state["gradient"] if seed % 2 else None, ranges=ranges))
        if way == "prepared":
            kernel.prepare_all(tasks)(0.5)
        for some in {"together": [tasks], "alone": [[task] for task in tasks], "prepared": []}[way]:
            kernel.update_all(some, factor=0.5)
        results.append([t for task in tasks for t in (task.master, task.exp_avg, task.exp_avg_sq, task.gradient)])
    assert all(same_bits(a, b) and same_bits(a, c) for a, b, c in zip(*results, strict=True))
    sums = kernel.sum_squares_all(results[0])
    assert [float(each) for each in sums] == [float(kernel.sum_squares_all([each])[0]) for each in results[0]]
    kernel.update_all([], factor=1.0)
    kernel.prepare_all([])(1.0)
    assert len(kernel.sum_squares_all([])) == 0


@pytest.mark.parametrize("kernel", [cpu_kernel(), TorchKernel()], ids=lambda kernel: kernel.name)
def test_bad_arguments_are_refused(kernel: AdamKernel) -> None:
    good = random_state(64, seed=0)
    one = replace(RANGE, numel=64)

    def update(ranges: list[AdamRange] | None = None, out: torch.Tensor | None = None, **changed: torch.Tensor) -> None:
        kernel.update(**{**good, **changed}, out=out, ranges=ranges or [one], factor=1.0)

    with pytest.raises(ValueError, match="ascending and disjoint"):
        update([replace(one, offset=10, numel=10), replace(one, offset=19, numel=10)])
    with pytest.raises(ValueError, match="beyond"):
        update([replace(one, offset=1)])
    with pytest.raises(ValueError, match="counts from 1"):
        update([replace(one, step=0)])
    with pytest.raises(ValueError, match="fp32"):
        update(master=torch.zeros(64, dtype=torch.float64))
    with pytest.raises(ValueError, match="contiguous"):
        update(exp_avg=torch.zeros(128)[::2])
    memory = torch.zeros(65)
    with pytest.raises(ValueError, match="overlap"):
        update(gradient=memory[:64], out=memory[1:])
    with pytest.raises(ValueError, match="overlap"):
        update(gradient=memory[:64], out=memory.view(torch.bfloat16)[:64])
    with pytest.raises(ValueError, match="equal length"):
        kernel.cast(torch.zeros(3), torch.zeros(4))


def test_coefficients_are_rounded_from_double_precision() -> None:
    c = coefficients(replace(RANGE, step=3, beta2=0.99))
    assert c.inverse_root_correction2 == 1 / (1 - 0.99**3) ** 0.5
    assert c.negative_step == -1e-3 / (1 - 0.9**3)
    assert (c.decay, c.l2) == (1 - 1e-4, 0.0)
    assert coefficients(replace(RANGE, decoupled=False))[:2] == (1.0, 0.1)


def test_without_a_compiler_the_fallback_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("CXX", "no-such-compiler")
    with pytest.warns(RuntimeWarning, match="no-such-compiler"):
        assert cpu_kernel().name == "torch"
    with pytest.raises(UnsupportedError, match="no-such-compiler"):
        cpu_kernel("plain")
    with pytest.raises(ValueError, match="avx512"):
        cpu_kernel("sse9")  # type: ignore[arg-type]


def test_an_instruction_set_the_processor_lacks_is_refused(monkeypatch: pytest.MonkeyPatch) -> None:
    class Old:
        @staticmethod
        def best_isa() -> int:
            return 0

    monkeypatch.setattr(build, "adam_library", Old)
    with pytest.raises(UnsupportedError, match="no avx2"):
        cpu_kernel("avx2")


# --- CUDA ---

needs_cuda = pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device")


@needs_cuda
def test_cuda_gives_the_bits_of_the_cpu() -> None:
    numel = 100_003
    kinds: tuple[str | torch.dtype, ...] = ("none", "gradient", *DTYPES)
    for gradient_dtype, out_kind, decoupled in itertools.product(DTYPES, kinds, (True, False)):
        first = replace(RANGE, offset=3, numel=1025, decoupled=decoupled)
        ranges = [first, replace(first, offset=1040, numel=98_000, step=9)]
        before = random_state(numel, 5, gradient_dtype)
        for position, tensor in enumerate(before.values()):
            sprinkle(tensor, position)
        results: list[list[torch.Tensor]] = []
        for device, kernel in (("cpu", cpu_kernel()), ("cuda", cuda_kernel())):
            now = {name: tensor.clone().to(device) for name, tensor in before.items()}
            if isinstance(out_kind, str):
                out = now["gradient"] if out_kind == "gradient" else None
            else:
                out = torch.zeros(numel, device=device).to(out_kind)
            for _ in range(3):
                kernel.update(**now, out=out, ranges=ranges, factor=0.37)
            results.append([*now.values(), *([] if out is None else [out])])
        assert kernel.name == "triton"
        assert all(same_bits(a, b) for a, b in zip(*results, strict=True)), (gradient_dtype, out_kind, decoupled)


@needs_cuda
def test_cuda_sum_squares_stays_on_the_device_and_repeats() -> None:
    kernel = cuda_kernel()
    for dtype in DTYPES:
        values = [torch.randn(numel).to(dtype) for numel in (1, 4097, 1_000_003, 0)]
        together = kernel.sum_squares_all([each.cuda() for each in values])
        assert isinstance(together, torch.Tensor) and together.is_cuda and together.dtype is torch.float64
        for each, once in zip(values, together, strict=True):
            alone = kernel.sum_squares_all([each.cuda()])[0]
            assert isinstance(alone, torch.Tensor) and alone.is_cuda and alone.shape == ()
            assert float(alone) == float(once) == pytest.approx(float(cpu_kernel().sum_squares_all([each])[0]), rel=1e-13)


@needs_cuda
def test_cuda_kernels_never_wait_for_the_device() -> None:
    kernel, state = cuda_kernel(), {name: tensor.cuda() for name, tensor in random_state(5000, 3).items()}

    def work() -> None:
        kernel.update(**state, out=None, ranges=[replace(RANGE, numel=5000)], factor=1.0)
        kernel.sum_squares_all([state["gradient"]])
        kernel.accumulate(state["master"], state["gradient"])

    work()
    torch.cuda.synchronize()
    torch.cuda._sleep(1_000_000_000)  # clock cycles: half a second
    busy = torch.cuda.Event()
    busy.record()
    work()
    assert not busy.query()


@needs_cuda
def test_cuda_agrees_with_the_torch_fallback() -> None:
    for dtype in DTYPES:
        before = random_state(5000, 3, dtype)
        results = []
        for kernel in (cuda_kernel(), TorchKernel()):
            now = {name: tensor.cuda() for name, tensor in before.items()}
            kernel.update(**now, out=now["gradient"], ranges=[replace(RANGE, numel=5000)], factor=1.0)
            accumulator, out = torch.ones(5000, device="cuda"), torch.empty(5000, device="cuda", dtype=dtype)
            kernel.accumulate(accumulator, now["gradient"])
            kernel.cast(accumulator, out)
            results.append((now["master"], now["exp_avg"], now["exp_avg_sq"]))
            assert torch.equal(out, (1 + now["gradient"].float()).to(dtype))
        assert all((a - b).abs().max() <= 1e-6 for a, b in zip(*results, strict=True))
