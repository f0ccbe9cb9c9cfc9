"""torch's DistributedDataParallel at one rank: plain PyTorch with everything on the device, as people train what fits.

Note [What is fair to DDP]
    weights=fp32, the default: parameters and their gradients are fp32 and double as master weights, matmuls run in the
    compute dtype under autocast, AdamW is torch's fused one. That is the usual recipe, keeps a master, and needs 16
    bytes a parameter, as resident does; autocast casts every weight once in each forward pass.
    weights=compute: parameters, gradients and moments are all in the compute dtype, 8 bytes a parameter in bf16. It is
    the fastest plain PyTorch there is, and no equal: no master, so small updates are rounded away.
    Statistics say which one ran. The norm is computed only if clipping asks for it.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any, Literal

import torch
from pydantic import BaseModel, Field
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from systems.baselines.external import budget
from systems.baselines.external.engine import NO_DISK, NO_OTHER_RANK, LateNumber, PackageEngine, Update
from systems.baselines.external.package import Config, ConfigOptions, PackageStatistics, merge, read_config
from systems.baselines.external.process import OneRank
from systems.baselines.external.torch_adam import adam, check_arguments, set_rate
from systems.baselines.external.weights import Masters, materialise
from systems.errors import UnsupportedError
from systems.substrate.activations import apply_recompute
from systems.substrate.adoption import place_buffers
from systems.substrate.recipe import FP16_FIRST_SCALE, FP16_GROWTH_STEPS
from systems.substrate.units import FoundModel, find_units
from systems.system import TORCH_DTYPE, Engine, Settings


class DdpOptions(ConfigOptions):
    """How plain PyTorch holds its weights."""

    weights: Literal["fp32", "compute"] = Field(
        "fp32", description="fp32: masters under autocast; compute: everything in the compute dtype, no master"
    )


class DdpEngine(PackageEngine):
    """config: arguments of DistributedDataParallel and of the optimizer."""

    def __init__(
        self,
        model: nn.Module,
        found: FoundModel,
        settings: Settings,
        *,
        low_weights: bool,
        limits: budget.Limits,
        config: Config,
        statistics: PackageStatistics,
    ) -> None:
        started = time.perf_counter()
        no_copy = {"h2d_bytes": 0, "d2h_bytes": 0} if settings.device == "cuda" else {}
        super().__init__(model, settings, limits, NO_OTHER_RANK | NO_DISK | no_copy)
        self._statistics = statistics
        self._names = [p.name for p in found.index.parameters]
        device = torch.device("cuda", torch.cuda.current_device()) if settings.device == "cuda" else torch.device("cpu")
        dtype = TORCH_DTYPE[settings.dtype]
        self._low = None if low_weights or dtype == torch.float32 else dtype
        with contextlib.ExitStack() as undo:
            undo.callback(limits.lift)
            undo.callback(OneRank("nccl" if settings.device == "cuda" else "gloo").close)
            undo.callback(apply_recompute(found, settings.recompute))
            masters = Masters(found, settings)
            self._parameters = materialise(found, masters, dtype if low_weights else torch.float32, device)
            place_buffers(model, device)
            self._runs = DistributedDataParallel(model, **config["ddp"])
            self._optimizer = adam(self._parameters, settings.adam, config["optimizer"])
            self._scaler = torch.amp.GradScaler(
                settings.device,
                init_scale=FP16_FIRST_SCALE,
                growth_interval=FP16_GROWTH_STEPS,
                enabled=settings.dtype == "fp16",
            )
            self._exit = undo.pop_all()
        self._startup = {"initialize": time.perf_counter() - started}
        limits.look()

    def _autocast(self) -> AbstractContextManager[object]:
        if self._low is None:
            return contextlib.nullcontext()
        return torch.autocast(self.settings.device, dtype=self._low)

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        last = self._micro_step + 1 >= self.settings.accumulate
        with contextlib.nullcontext() if last else self._runs.no_sync(), self._autocast():
            return self._runs(*args, **kwargs)

    def _backward(self, loss: torch.Tensor, *, last: bool) -> None:
        with contextlib.nullcontext() if last else self._runs.no_sync():
            self._scaler.scale(loss).backward()

    def _update(self) -> Update:
        norm = None
        if self.settings.clip > 0:
            self._scaler.unscale_(self._optimizer)
            norm = LateNumber(torch.nn.utils.clip_grad_norm_(self._runs.parameters(), self.settings.clip))
        scale = float(self._scaler.get_scale())
        self._scaler.step(self._optimizer)
        self._scaler.update()
        self._optimizer.zero_grad(set_to_none=True)
        return Update(norm, scale, skipped=self._scaler.is_enabled() and float(self._scaler.get_scale()) < scale)

    def set_lr(self, lr: float) -> None:
        set_rate(self._optimizer, lr)

    def train(self, mode: bool = True) -> None:
        self._runs.train(mode)

    def eval(self) -> None:
        self._runs.eval()

    def statistics(self) -> PackageStatistics:
        return self._statistics

    @contextmanager
    def summon(self, *, write: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        self.drain()
        named = list(zip(self._names, self._parameters, strict=True))
        values = {name: parameter.detach().float().cpu().clone() for name, parameter in named}
        yield values
        if write:
            for name, parameter in named:
                parameter.data.copy_(values[name])

    def _shut_down(self) -> None:
        self._exit.close()
        del self._runs, self._optimizer
        for parameter in self._parameters:
            parameter.data, parameter.grad = torch.empty(0, dtype=parameter.dtype), None


class TorchDdp:
    """See the module's docstring."""

    name = "torch-ddp"
    summary = "plain PyTorch (DistributedDataParallel), everything on the device"
    Options: type[BaseModel] = DdpOptions

    def initialize(self, model: nn.Module, settings: Settings, options: BaseModel) -> Engine:
        assert isinstance(options, DdpOptions)
        budget.refuse_ranks_and_optimizer(settings, self.name)
        if options.weights == "compute" and settings.dtype == "fp16":
            raise UnsupportedError("torch-ddp cannot update weights in fp16: use --option weights=fp32 or --dtype bf16")
        found = find_units(model)
        ours: Config = {
            "ddp": {"gradient_as_bucket_view": True, "find_unused_parameters": False, "static_graph": False},
            "optimizer": {"fused": True},
        }
        config = merge(ours, read_config(options.config)) if options.config else ours
        check_arguments(config, {"ddp": DistributedDataParallel, "optimizer": torch.optim.AdamW}, options.config)
        low = options.weights == "compute"
        width = TORCH_DTYPE[settings.dtype].itemsize if low else 4
        trainable = found.index.numel(trainable_only=True)
        on_host = settings.device == "cpu"
        limits = budget.Limits(
            settings, system=self.name, host_need=width * (found.index.numel() + 3 * trainable) if on_host else 0
        )
        notes = [f"weights={options.weights}: " + ("no fp32 masters" if low and width < 4 else "fp32 masters, autocast")]
        statistics = PackageStatistics(
            package="torch",
            version=torch.__version__,
            config=config,
            config_file=options.config,
            notes=notes + ([budget.ONE_MEMORY] if on_host else []),
        )
        return DdpEngine(
            model, found, settings, low_weights=low, limits=limits, config=config, statistics=statistics
        )


SYSTEM = TorchDdp()
