"""Storages that move under autograd's saved views, and the NaNs behind a released one."""

from __future__ import annotations

import gc
import subprocess
import sys
import weakref
from collections.abc import Sequence
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F

from systems.substrate.bundle import poison as poisons
from systems.substrate.bundle.addresses import Rebind, rebind_by_extension, rebind_by_swap, tensor_at
from systems.substrate.bundle.poison import Poison
from systems.substrate.bundle.storage import RebindableStorage

CPU = torch.device("cpu")
DTYPES = (torch.float32, torch.bfloat16, torch.float16, torch.float64)
DEVICES = [
    pytest.param(torch.device("cpu"), id="cpu"),
    pytest.param(
        torch.device("cuda", 0),
        id="cuda",
        marks=pytest.mark.skipif(not torch.cuda.is_available(), reason="needs a CUDA device"),
    ),
]


def rebinds() -> list[Rebind]:
    """Each way there is to rebind, whichever this torch would choose."""
    return [rebind_by_extension(), *([rebind_by_swap] if hasattr(torch.UntypedStorage, "_swap_data_ptr_") else [])]


@pytest.fixture(params=rebinds(), ids=["extension", "swap"][: len(rebinds())])
def rebind(request: pytest.FixtureRequest) -> Rebind:
    way: Rebind = request.param
    return way


def reserved_bytes(poison: Poison) -> int:
    """Physical memory behind the NaNs: 0 until a storage needed it."""
    return poison._backing.page.nbytes if poison._backing else 0


def loss_of(weights: Sequence[torch.Tensor], x: torch.Tensor) -> torch.Tensor:
    for weight in weights:  # F.linear saves weight.t(); a product saves the weight itself
        x = F.linear(x, weight).tanh() * weight[0]
    return x.float().square().sum()


@pytest.mark.parametrize("device", DEVICES)
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=str)
def test_saved_views_follow_a_rebind_between_forward_and_backward(
    rebind: Rebind, dtype: torch.dtype, device: torch.device
) -> None:
    generator = torch.Generator().manual_seed(0)
    values = torch.randn(2 * 64, generator=generator).to(device, dtype)
    x = torch.randn(3, 8, generator=generator).to(device, dtype)
    plain = [values[at : at + 64].view(8, 8).clone().requires_grad_() for at in (0, 64)]
    loss_of(plain, x).backward()

    storage = RebindableStorage(values.nbytes, device, Poison(values.nbytes, device), rebind=rebind)
    weights = [torch.nn.Parameter(storage.view(dtype, at, (8, 8))) for at in (0, 64)]
    first, second = values.clone(), values.clone()
    assert loss_of(weights, x).isnan()
    storage.point_at(first.data_ptr())
    assert all(
        weight.data_ptr() == first.data_ptr() + at * first.element_size() for weight, at in zip(weights, (0, 64), strict=True)
    )
    loss = loss_of(weights, x)
    storage.release()
    first.fill_(7.0)  # the memory has another owner by now
    storage.point_at(second.data_ptr())
    loss.backward()
    for mine, right in zip(weights, plain, strict=True):
        assert mine.grad is not None and right.grad is not None and torch.equal(mine.grad, right.grad)

    loss = loss_of(weights, x)
    storage.release()
    loss.backward()
    assert all(weight.grad is not None and weight.grad.isnan().any() for weight in weights)  # a use after release shows
    storage.poison.check()


@pytest.mark.parametrize("device", DEVICES)
def test_a_released_storage_is_nan_everywhere(device: torch.device) -> None:
    for nbytes in (1, 2, 8, 4096, 2 * poisons.PAGE, 5 * poisons.PAGE + 24):
        poison = Poison(nbytes, device)
        assert reserved_bytes(poison) == 0
        storage = RebindableStorage(nbytes, device, poison)
        assert storage.data_ptr == poison.data_ptr and not storage.resident
        for dtype in DTYPES:
            for shift in range(0, dtype.itemsize, 1 if device == CPU else dtype.itemsize):  # CUDA loads must be aligned
                numel = max(nbytes - shift, 0) // dtype.itemsize
                assert tensor_at(poison.data_ptr + shift, dtype, (numel,), device).isnan().all()
            assert storage.view(dtype, 0, (nbytes // dtype.itemsize,)).isnan().all()
        assert reserved_bytes(poison) == (poisons.PAGE if device == CPU else nbytes)


def test_a_large_range_needs_few_mappings_and_little_memory() -> None:
    nbytes = 3 << 30
    poison = Poison(nbytes, CPU)
    values = RebindableStorage(nbytes, CPU, poison).view(torch.bfloat16, 0, (nbytes // 2,))
    assert values[:: 1 << 16].isnan().all() and values[-(1 << 20) :].isnan().all()
    assert reserved_bytes(poison) <= 8 << 20
    assert Path("/proc/self/maps").read_text().count("memfd:poison") >= 384


@pytest.mark.parametrize("device", DEVICES)
def test_writing_a_released_parameter_is_found_and_undone(device: torch.device) -> None:
    poison = Poison(1 << 20, device)
    first, second = (RebindableStorage(1 << 20, device, poison) for _ in range(2))
    assert bool(poison.intact())
    poison.check()
    first.view(torch.bfloat16, 1000, (1,)).fill_(3.0)
    assert not bool(poison.intact())
    with pytest.raises(RuntimeError, match=r"released parameter was written"):
        poison.check()
    poison.check()
    assert second.view(torch.float32, 0, (1 << 18,)).isnan().all()


def test_without_shared_pages_a_buffer_serves(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr("os.memfd_create")
    poison = Poison(1000, CPU)
    assert RebindableStorage(1000, CPU, poison).view(torch.float16, 0, (500,)).isnan().all()
    assert reserved_bytes(poison) == 1000


def test_sizes_zero_and_tiny(rebind: Rebind) -> None:
    empty = RebindableStorage(0, CPU, Poison(0, CPU), rebind=rebind)
    view = empty.view(torch.float32, 0, (0, 3))
    empty.point_at(0)
    empty.release()
    assert view.shape == (0, 3) and empty.nbytes == 0
    byte = RebindableStorage(1, CPU, Poison(1, CPU), rebind=rebind)
    one, memory = byte.view(torch.uint8, 0, ()), torch.tensor([9], dtype=torch.uint8)
    byte.point_at(memory.data_ptr())
    assert one == 9 and one.untyped_storage().nbytes() == 1
    byte.release()
    assert one == 255


def test_what_does_not_fit_is_refused() -> None:
    poison = Poison(100, CPU)
    with pytest.raises(ValueError, match="101 bytes"):
        RebindableStorage(101, CPU, poison)
    storage = RebindableStorage(100, CPU, poison)
    with pytest.raises(ValueError, match="does not fit"):
        storage.view(torch.float32, 1, (5, 5))
    with pytest.raises(ValueError, match="does not fit"):
        storage.view(torch.float32, -1, (5,))
    with pytest.raises(ValueError, match="address 0"):
        storage.point_at(0)
    with pytest.raises(RuntimeError, match="resizable"):
        storage.view(torch.float32, 0, (25,)).resize_(26)


def test_poison_lives_as_long_as_a_view_and_no_longer(rebind: Rebind) -> None:
    poison = Poison(poisons.PAGE, CPU)
    storage = RebindableStorage(poisons.PAGE, CPU, poison, rebind=rebind)
    memory = torch.zeros(poisons.PAGE, dtype=torch.uint8)
    storage.point_at(memory.data_ptr())
    storage.release()
    view, alive = storage.view(torch.float32, 0, (100,)), weakref.ref(poison)
    del poison, storage
    gc.collect()
    assert alive() is not None and view.isnan().all()
    del view
    gc.collect()
    assert alive() is None


def resident_bytes() -> int:
    return int(Path("/proc/self/statm").read_text().split()[1]) * 4096


def test_many_rebinds_leak_nothing(rebind: Rebind) -> None:
    memory = [torch.zeros(1 << 16) for _ in range(2)]
    storage = RebindableStorage(1 << 18, CPU, Poison(1 << 18, CPU), rebind=rebind)
    view = storage.view(torch.float32, 0, (1 << 16,))

    def rounds(count: int) -> None:
        for turn in range(count):
            storage.point_at(memory[turn % 2].data_ptr())
            storage.release()

    rounds(1000)
    before = resident_bytes()
    rounds(50_000)
    assert resident_bytes() - before < 2 << 20
    assert view.isnan().all() and all((each == 0).all() for each in memory)


def test_interpreter_exit_frees_nothing_twice() -> None:
    script = """
import torch
from systems.substrate.bundle.addresses import *
from systems.substrate.bundle.poison import *
from systems.substrate.bundle.storage import *
device = torch.device("cpu")
storages = [RebindableStorage(1 << 20, device, Poison(1 << 20, device), rebind=rebind)
            for rebind in (rebind_by_extension(), default_rebind()) for _ in range(3)]
memory = torch.zeros(1 << 18)
views = [torch.nn.Parameter(storage.view(torch.float32, 0, (512, 512))) for storage in storages]
for storage in storages[::2]:
    storage.point_at(memory.data_ptr())
loss = sum(torch.nn.functional.linear(memory[:512], view).sum() for view in views)
print("done")
"""
    result = subprocess.run([sys.executable, "-X", "faulthandler", "-c", script], capture_output=True, text=True, timeout=120)
    assert (result.returncode, result.stdout.strip()) == (0, "done"), result.stderr
