"""DeepSpeed behind the protocol: one engine for every variant, since only the configuration differs.

Note [Same start, same gradients]
    DeepSpeed takes the 16-bit parameters and makes its fp32 masters of them; every system here starts from fp32 values
    and rounds those. So the masters are written again after initialisation. ZeRO-3 partitions real tensors, one at a
    time (`zero.Init(module=...)`): building under its context loses the padding row of an embedding.
    The loss arrives divided by the global label count. DeepSpeed would divide it by the number of micro-batches as
    well; `scale_wrt_gas=False` keeps it from that. Its step() also counts micro-batches, so it is called after each.
    Under ZeRO-3 each rank has an equal share of every parameter, padded behind the last; DeepSpeed's setter of a whole one
    reads beyond its end there, so each rank sets its own share.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import shutil
import time
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from systems.baselines.external import budget, deepspeed_global
from systems.baselines.external.engine import NO_DISK, LateNumber, PackageEngine, Update
from systems.baselines.external.package import Config, PackageStatistics
from systems.baselines.external.process import PackageGroup
from systems.baselines.external.shares import own_share, whole_value
from systems.baselines.external.weights import Masters, materialise
from systems.errors import UnsupportedError
from systems.ranks.ranks import Ranks
from systems.recipe.model.adoption import place_buffers
from systems.recipe.model.units import FoundModel
from systems.recipe.recomputation.recompute import apply_recompute
from systems.reports import MemoryReport
from systems.settings import TORCH_DTYPE, Settings


class DeepSpeedRun(PackageEngine):
    """deepspeed: the package. config: what it is given. disk: the folder it writes to, removed at the end, if it does.

    Bytes that go to disk and back are not counted by DeepSpeed.
    """

    def __init__(
        self,
        model: nn.Module,
        found: FoundModel,
        settings: Settings,
        ranks: Ranks,
        *,
        deepspeed: Any,
        limits: budget.BudgetInForce,
        config: Config,
        statistics: PackageStatistics,
        disk: Path | None,
    ) -> None:
        started = time.perf_counter()
        super().__init__(model, settings, limits, {} if disk else NO_DISK, ranks)
        self._disk = disk
        self._deepspeed, self._found, self._statistics = deepspeed, found, statistics
        self._stage = int(config["zero_optimization"]["stage"])
        self._names = [p.name for p in found.index.parameters]
        self._device = torch.device("cuda", torch.cuda.current_device()) if settings.device == "cuda" else torch.device("cpu")
        with contextlib.ExitStack() as undo:
            undo.callback(limits.lift)
            if disk is not None:
                undo.callback(shutil.rmtree, disk, ignore_errors=True)
            undo.enter_context(deepspeed_global.as_found(deepspeed))
            backends = {"cuda": "nccl"} if settings.device == "cuda" else {"cpu": "gloo"}
            undo.callback(PackageGroup(backends, ranks, **deepspeed_global.variables(settings, ranks)).close)
            if config["zero_optimization"].get("offload_optimizer", {}).get("super_offload"):
                deepspeed_global.take_own_cores(ranks)
            self._check_dtype()
            undo.callback(apply_recompute(found, settings.recompute))
            self._start(copy.deepcopy(config))  # DeepSpeed writes into what it is given
            self._exit = undo.pop_all()
        self._startup = {"initialize": time.perf_counter() - started}
        limits.look()

    def _check_dtype(self) -> None:
        accelerator = self._deepspeed.get_accelerator()
        if accelerator.device_name() != self.settings.device:
            raise UnsupportedError(
                f"DeepSpeed chose the {accelerator.device_name()} in this process before, {self.settings.device} is asked "
                "for: start a new process"
            )
        if self.settings.dtype == "fp16" and not accelerator.is_fp16_supported():
            raise UnsupportedError("DeepSpeed has no fp16 on this CPU: use `dtype='bf16'` or `dtype='fp32'`")

    def _start(self, config: Config) -> None:
        masters = Masters(self._found, self.settings, self.ranks)
        dtype = TORCH_DTYPE[self.settings.dtype]
        self._parameters = materialise(self._found, masters, dtype, drawn_on=self._device)
        masters.check_alike()
        place_buffers(self.module, self._device)
        if self._stage == 3:
            self._deepspeed.zero.Init(module=self.module, config_dict_or_path=config)
        self.runs, *_ = self._deepspeed.initialize(model=self.module, config=config)
        if self._disk is not None:
            for number, master in self._masters_on_disk(write=True):
                master.copy_(own_share(masters.value(number, self._device), master.numel(), self.ranks))
                masters.forget(number)
            return
        for number in range(len(self._parameters)):
            self._set_master(number, masters.value(number, self._device))
            masters.forget(number)

    def _masters_on_disk(self, *, write: bool) -> Iterator[tuple[int, torch.Tensor]]:
        """(number, this rank's share of the fp32 master) of every trained parameter, of one sub-group after the other, which is
        in memory meanwhile and goes back to the disk if it is written.

        DeepSpeed's own way moves a whole sub-group for each of its parameters: hours for a model of some size.
        """
        optimizer = self.runs.optimizer
        number_of = {id(parameter): number for number, parameter in enumerate(self._parameters)}
        for group, parameters in enumerate(optimizer.fp16_groups):
            swapped = optimizer._swappable_optimizer_subgroup(group)
            if swapped:
                optimizer._optimizer_states_and_gradient_swap_in(group)
            flat = optimizer.fp32_partitioned_groups_flat[group].data
            for parameter in parameters:
                _, offset, numel = optimizer.grad_position[optimizer.get_param_id(parameter)]
                yield number_of[id(parameter)], flat[offset : offset + numel]
            if swapped and write:
                optimizer._optimizer_states_and_gradient_swap_out(group)
            elif swapped:
                optimizer._release_swap_buffers(group)

    def _set_master(self, number: int, value: torch.Tensor) -> None:
        parameter: Any = self._parameters[number]
        utils = self._deepspeed.utils
        if self._stage == 3 and parameter.requires_grad:
            share = parameter.partition_numel()
            utils.safe_set_local_fp32_param(parameter, own_share(value, share, self.ranks))
        else:
            utils.safe_set_full_fp32_param(parameter, value)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.runs(*args, **kwargs)

    def _backward(self, loss: torch.Tensor, *, last: bool) -> None:
        self.runs.backward(loss, scale_wrt_gas=False)
        if not last:
            self.runs.step()

    def _update(self) -> Update:
        scale = float(getattr(self.runs.optimizer, "loss_scale", 1.0))
        self.runs.step()
        skipped = not self.runs.was_step_applied()
        norm = None if skipped else self.runs.get_global_grad_norm()
        return Update(None if norm is None else LateNumber(norm), scale, skipped)

    def set_lr(self, lr: float) -> None:
        """SuperOffload reads the rate when an update starts, which is during backward: there it counts a step later."""
        optimizer = self.runs.optimizer
        for inner in (optimizer.optimizer, getattr(optimizer, "backup_optimizer", None)):
            for group in getattr(inner, "param_groups", ()):
                group["lr"] = lr

    def train(self, mode: bool = True) -> None:
        self.runs.train(mode)

    def eval(self) -> None:
        self.runs.eval()

    def memory(self) -> MemoryReport:
        """disk_peak_bytes: of the files there are; DeepSpeed makes none smaller."""
        used = None if self._disk is None else sum(path.stat().st_size for path in self._disk.rglob("*") if path.is_file())
        return dataclasses.replace(super().memory(), disk_peak_bytes=0 if used is None else used)

    def statistics(self) -> PackageStatistics:
        runs = self.runs
        resolved: dict[str, str | int | float | bool | None] = {
            "accelerator": self._deepspeed.get_accelerator().device_name(),
            "zero_optimizer": type(runs.optimizer).__name__,
            "optimizer": type(runs.optimizer.optimizer).__name__,
            "gradient_clipping": runs.gradient_clipping(),
            "overlap_comm": runs.zero_overlap_comm(),
        }
        placed = getattr(runs.optimizer, "subgroup_to_device", None)
        if placed is not None:
            resolved |= {"sub_groups": len(placed), "sub_groups_on_cpu": sum(p == "cpu" for p in placed.values())}
        return self._statistics.model_copy(update={"resolved": resolved})

    @contextmanager
    def masters(self, *, write: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        self.drain()
        values = {}
        on_disk = self._masters_on_disk(write=False) if self._disk is not None else ()
        shares = {number: value.float().cpu().clone() for number, value in on_disk}  # read before anything is exchanged
        masters = {self._names[number]: self._whole(number, shares.pop(number)) for number in sorted(shares)}
        for name, parameter in zip(self._names, self._parameters, strict=True):
            value = masters[name] if name in masters else self._deepspeed.utils.safe_get_full_fp32_param(parameter)
            if value is None:  # frozen: there is no master
                with self._gathered(parameter):
                    value = parameter.detach().clone()
            values[name] = value.float().cpu().clone().view(self._shape(parameter))
        yield values
        if not write:
            return
        edited = {name: self._edited(values, name, value.shape) for name, value in values.items()}
        for number, (name, parameter) in enumerate(zip(self._names, self._parameters, strict=True)):
            value = edited[name].to(self._device)
            if self._disk is None:
                self._set_master(number, value)
            with self._gathered(parameter, write=True), torch.no_grad():
                parameter.copy_(value)
        for number, master in self._masters_on_disk(write=True) if self._disk is not None else ():
            master.copy_(own_share(edited[self._names[number]], master.numel(), self.ranks))

    def _whole(self, number: int, share: torch.Tensor) -> torch.Tensor:
        return whole_value(share, share.numel(), self._shape(self._parameters[number]), self.ranks, self._names[number])

    def _gathered(self, parameter: nn.Parameter, *, write: bool = False) -> contextlib.AbstractContextManager[Any]:
        if self._stage != 3:
            return contextlib.nullcontext()
        return self._deepspeed.zero.GatheredParameters([parameter], modifier_rank=0 if write else None)

    def _shape(self, parameter: nn.Parameter) -> torch.Size:
        return getattr(parameter, "ds_shape", parameter.shape)

    def _shut_down(self) -> None:
        worker = getattr(self.runs.optimizer, "superoffload_cpu_optimizer", None)
        try:
            if worker is not None:
                worker.close()
            self.runs.destroy()
        finally:
            self._exit.close()
            for parameter in self._parameters:
                parameter.data, parameter.grad = torch.empty(0, dtype=parameter.dtype), None
            del self.runs
