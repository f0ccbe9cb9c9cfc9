"""torch's DistributedDataParallel: plain PyTorch with everything on each device, as people train what fits.

Note [What is fair to DDP]
    weights=masters, the default: 16-bit parameters and gradients, fp32 masters and moments in torch's fused AdamW. It is
    the recipe of every other system here, so the numbers can be set beside theirs: 16 bytes a parameter, and 4 more for
    one bucket at a time while its gradients are raised to fp32.
    weights=autocast: fp32 parameters that are their own masters, matmuls in the compute dtype under autocast. The usual
    script; 16 bytes a parameter, norms in fp32, every weight cast anew in each forward pass.
    weights=compute: parameters, gradients and moments all in the compute dtype, 8 bytes a parameter in bf16. The fastest
    plain PyTorch there is, and no equal: without masters small updates are rounded away.
    On several ranks gradients are reduced once a step, in the last micro-batch, as its users do it. Not so with masters: there
    each micro-batch's 16-bit gradients are reduced and then added in fp32, as in the reference recipe, for 2 bytes a parameter
    and micro-batch instead of 4 a step.
    Statistics say which one ran. The norm is computed only if clipping asks for it. With --dtype fp32 all three are one.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from systems.baselines.external import budget
from systems.baselines.external.engine import NO_DISK, PackageEngine, Update
from systems.baselines.external.faces import TORCH_DDP as FACE
from systems.baselines.external.faces import DdpOptions, Weights
from systems.baselines.external.package import Config, PackageStatistics, merge, read_config
from systems.baselines.external.process import PackageGroup, begin
from systems.baselines.external.torch_adam import OnParameters, UpdateChoice, WithMasters, arguments_of, check_arguments
from systems.baselines.external.weights import Masters, find_weights, materialise
from systems.errors import UnsupportedError
from systems.ranks.ranks import Ranks
from systems.recipe.model.adoption import place_buffers
from systems.recipe.model.units import FoundModel
from systems.recipe.recomputation.recompute import apply_recompute
from systems.settings import TORCH_DTYPE, Settings
from systems.system import Engine, RankedSystem

BYTES = {"masters": 16, "autocast": 16, "compute": 8}  # a trainable parameter in 16 bits, gradient included


class DdpEngine(PackageEngine):
    """config: arguments of DistributedDataParallel and of the optimizer."""

    system = "torch-ddp"

    def __init__(
        self,
        model: nn.Module,
        found: FoundModel,
        settings: Settings,
        ranks: Ranks,
        *,
        weights: Weights,
        limits: budget.BudgetInForce,
        config: Config,
        statistics: PackageStatistics,
    ) -> None:
        started = time.perf_counter()
        no_copy = {"h2d_bytes": 0, "d2h_bytes": 0}
        super().__init__(model, settings, limits, NO_DISK | no_copy, ranks)
        self._statistics = statistics
        self._names = [p.name for p in found.index.parameters]
        device = torch.device("cuda", torch.cuda.current_device()) if settings.device == "cuda" else torch.device("cpu")
        self._autocast_dtype = TORCH_DTYPE[settings.dtype] if weights == "autocast" and settings.dtype != "fp32" else None
        with contextlib.ExitStack() as undo:
            undo.callback(limits.lift)
            backends = {"cuda": "nccl"} if settings.device == "cuda" else {"cpu": "gloo"}
            undo.callback(PackageGroup(backends, ranks).close)
            undo.callback(apply_recompute(found, settings.recompute))
            dtype = torch.float32 if weights == "autocast" else TORCH_DTYPE[settings.dtype]
            masters = Masters(found, settings, ranks)
            self._parameters = materialise(found, masters, dtype, device=device)
            masters.check_alike()
            self._updates = self._make_updates(masters, weights, device, config["optimizer"])
            place_buffers(model, device)
            self._runs = DistributedDataParallel(model, **config["ddp"])
            self._exit = undo.pop_all()
        self._startup = {"initialize": time.perf_counter() - started}
        limits.look()

    def _make_updates(self, masters: Masters, weights: Weights, device: torch.device, arguments: Config) -> UpdateChoice:
        if weights != "masters" or self.settings.dtype == "fp32":
            return OnParameters(self._parameters, self.settings, arguments)
        updates = WithMasters(self._parameters, self.settings, arguments)
        for number in range(len(self._parameters)):
            updates.start_from(number, masters.value(number, device))
            masters.forget(number)
        return updates

    def _autocast(self) -> AbstractContextManager[object]:
        if self._autocast_dtype is None:
            return contextlib.nullcontext()
        return torch.autocast(self.settings.device, dtype=self._autocast_dtype)

    def _reduced(self, *, last: bool) -> AbstractContextManager[object]:
        """Around both passes of a micro-batch: whether its gradients are reduced, with those before it that were not."""
        if last or (self.ranks.size > 1 and isinstance(self._updates, WithMasters)):
            return contextlib.nullcontext()
        return self._runs.no_sync()

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        with self._reduced(last=self._micro_step + 1 >= self.settings.accumulate), self._autocast():
            return self._runs(*args, **kwargs)

    def _backward(self, loss: torch.Tensor, *, last: bool) -> None:
        with self._reduced(last=last):
            self._updates.scale(loss).backward()
        self._updates.take()

    def _update(self) -> Update:
        return self._updates.step()

    def set_lr(self, lr: float) -> None:
        self._updates.set_lr(lr)

    def train(self, mode: bool = True) -> None:
        self._runs.train(mode)

    def eval(self) -> None:
        self._runs.eval()

    def statistics(self) -> PackageStatistics:
        return self._statistics

    @contextmanager
    def masters(self, *, write: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        self.drain()
        named = list(zip(self._names, self._updates.values, strict=True))
        values = {name: value.detach().float().cpu().clone() for name, value in named}
        yield values
        if write:
            for name, value in named:
                value.copy_(self._edited(values, name, value.shape))
            self._updates.written()

    def _shut_down(self) -> None:
        self._exit.close()
        del self._runs, self._updates
        for parameter in self._parameters:
            parameter.data, parameter.grad = torch.empty(0, dtype=parameter.dtype), None


class TorchDdp(RankedSystem):
    """See the module's docstring."""

    name, summary, abilities = FACE.name, FACE.summary, FACE.abilities
    Options: type[BaseModel] = FACE.Options

    def initialize(self, model: nn.Module, settings: Settings, options: BaseModel, *, ranks: Ranks | None = None) -> Engine:
        assert isinstance(options, DdpOptions)
        mine = begin(model, settings, options, ranks, self.name)
        if settings.dtype == "fp16" and options.weights != "autocast":
            raise UnsupportedError("torch-ddp scales fp16's loss under autocast only: use `options=dict(weights='autocast')`")
        found = find_weights(model, settings, self.name)
        ours: Config = {
            "ddp": {"gradient_as_bucket_view": True, "find_unused_parameters": False, "static_graph": False},
            "optimizer": {"fused": True},
        }
        config = merge(ours, read_config(options.config)) if options.config else ours
        allowed = {"ddp": arguments_of(DistributedDataParallel), "optimizer": arguments_of(torch.optim.AdamW)}
        check_arguments(config, allowed, options.config)
        each = 16 if settings.dtype == "fp32" else BYTES[options.weights]
        on_host = settings.device == "cpu"
        need = each * found.index.numel(trainable_only=True) if on_host else 0
        budget.check_host(settings, system=self.name, need=need)
        statistics = PackageStatistics(
            package="torch",
            version=torch.__version__,
            config=config,
            config_file=options.config,
            dtypes=_dtypes(options.weights, settings.dtype),
            notes=[f"weights={options.weights}"] + ([budget.ONE_MEMORY] if on_host else []),
        )
        return DdpEngine(
            model,
            found,
            settings,
            mine,
            weights=options.weights,
            limits=budget.BudgetInForce(settings),
            config=config,
            statistics=statistics,
        )


def _dtypes(weights: Weights, dtype: str) -> dict[str, str]:
    if weights == "autocast" and dtype != "fp32":
        return {"weights": f"fp32 under {dtype} autocast", "gradients": "fp32", "states": "fp32"}
    return {"weights": dtype, "gradients": dtype, "states": dtype if weights == "compute" else "fp32"}


SYSTEM = TorchDdp()
