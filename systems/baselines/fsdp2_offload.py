"""torch's FSDP2 with CPUOffloadPolicy: fp32 masters, gradients and moments on the host, one block at a time on the device.

Every block is a group of its own, the rest (embeddings, final norm, head) is the root's. Parameters are cast to the
compute dtype on the device after they are fetched, as fully_shard does it, so the host sends 4 bytes a parameter and
gets 4 back. With several micro-batches each one's gradient goes to the host and is added there in fp32: kept on the
device until the last, a whole model's gradient would have to fit there. The norm is computed only if clipping asks for
it. At one rank nothing is sharded; what is measured is its offload. On several each keeps its rows of every parameter, and
gradients are summed in the compute dtype, micro-batch by micro-batch.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import CPUOffloadPolicy, FSDPModule, MixedPrecisionPolicy, fully_shard
from torch.distributed.tensor import DTensor

from systems.baselines.external import budget
from systems.baselines.external.engine import NO_DISK, LateNumber, PackageEngine, Update
from systems.baselines.external.faces import FSDP2_OFFLOAD as FACE
from systems.baselines.external.faces import FsdpOptions
from systems.baselines.external.fsdp_memory import host_need, share_numel
from systems.baselines.external.package import Config, PackageStatistics, merge, read_config
from systems.baselines.external.process import PackageGroup, begin
from systems.baselines.external.shares import own_share, whole_value
from systems.baselines.external.torch_adam import adam, arguments_of, check_arguments, set_rate
from systems.baselines.external.weights import Masters, find_weights, materialise
from systems.errors import UnsupportedError
from systems.ranks.ranks import Ranks
from systems.recipe.model.adoption import place_buffers
from systems.recipe.model.units import FoundModel
from systems.recipe.recomputation.recompute import apply_recompute
from systems.settings import TORCH_DTYPE, Settings
from systems.system import Engine, RankedSystem


class FsdpEngine(PackageEngine):
    """config: arguments of fully_shard, its two policies, and the optimizer."""

    system = "fsdp2-offload"
    averages = False  # it is told to divide by 1

    def __init__(
        self,
        model: nn.Module,
        found: FoundModel,
        settings: Settings,
        ranks: Ranks,
        *,
        limits: budget.BudgetInForce,
        config: Config,
        statistics: PackageStatistics,
    ) -> None:
        started = time.perf_counter()
        super().__init__(model, settings, limits, NO_DISK, ranks)
        self._statistics = statistics
        self._names = [p.name for p in found.index.parameters]
        self._shapes = [torch.Size(p.shape) for p in found.index.parameters]
        self._owners = [owners[0] for owners in found.owners]
        cuda = settings.device == "cuda"
        device = torch.device("cuda", torch.cuda.current_device()) if cuda else torch.device("cpu")
        with contextlib.ExitStack() as undo:
            undo.callback(limits.lift)
            undo.callback(PackageGroup({"cpu": "gloo", "cuda": "nccl"} if cuda else {"cpu": "gloo"}, ranks).close)
            undo.callback(apply_recompute(found, settings.recompute))
            place_buffers(model, device)
            self._shard(found, config, device)
            self._optimizer = adam(self._parameters(), settings.adam, config["optimizer"])
            self._exit = undo.pop_all()
        self._startup = {"initialize": time.perf_counter() - started}
        limits.look()

    def _shard(self, found: FoundModel, config: Config, drawn_on: torch.device) -> None:
        """Block by block, each of which has its first values just before, so that no rank ever holds more than one as a whole.
        What is left is the root's.
        """
        masters, left = Masters(found, self.settings, self.ranks), dict.fromkeys(range(len(found.parameters)))
        mesh = init_device_mesh(self.settings.device, (self.ranks.size,))
        dtype = TORCH_DTYPE[self.settings.dtype]
        precision = MixedPrecisionPolicy(param_dtype=None if dtype == torch.float32 else dtype, **config["mixed_precision"])
        offload = CPUOffloadPolicy(**config["cpu_offload"])
        blocks = [unit for unit in found.index.units if unit.block is not None]
        for module, numbers in [*((found.modules[unit.index], unit.parameters) for unit in blocks), (self.module, tuple(left))]:
            mine = [number for number in numbers if number in left]
            materialise(found, masters, torch.float32, drawn_on=drawn_on, numbers=mine)
            fully_shard(module, mesh=mesh, mp_policy=precision, offload_policy=offload, **config["fully_shard"])
            if self.ranks.size > 1:
                assert isinstance(module, FSDPModule)
                module.set_gradient_divide_factor(1.0)
                module.set_force_sum_reduction_for_comms(True)
            for number in mine:
                masters.forget(number)
                del left[number]
        masters.check_alike()

    def _parameters(self) -> list[nn.Parameter]:
        """FSDP puts parameters of its own in place of the model's: they are looked up where they are."""
        found = []
        for module, attribute in self._owners:
            parameter = module._parameters[attribute]
            assert parameter is not None
            found.append(parameter)
        return found

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        return self.module(*args, **kwargs)

    def _backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()

    def _update(self) -> Update:
        norm = None
        if self.settings.clip > 0:
            total = torch.nn.utils.clip_grad_norm_(self._parameters(), self.settings.clip)
            norm = LateNumber(total.full_tensor() if isinstance(total, DTensor) else total)
        self._optimizer.step()
        self._optimizer.zero_grad(set_to_none=True)
        return Update(norm)

    def set_lr(self, lr: float) -> None:
        set_rate(self._optimizer, lr)

    def statistics(self) -> PackageStatistics:
        return self._statistics

    @contextmanager
    def masters(self, *, write: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        self.drain()
        for module in self.module.modules():
            if isinstance(module, FSDPModule):
                module.reshard()
        named = list(zip(self._names, map(_local, self._parameters()), strict=True))
        numels = [share_numel(shape, self.ranks.size) for shape in self._shapes]
        values = {
            name: whole_value(local, numel, shape, self.ranks, name)
            for (name, local), numel, shape in zip(named, numels, self._shapes, strict=True)
        }
        yield values
        if write:
            with torch.no_grad():
                for (name, local), numel, shape in zip(named, numels, self._shapes, strict=True):
                    mine = own_share(self._edited(values, name, shape), numel, self.ranks)
                    local.copy_(mine[: local.numel()].view(local.shape))

    def _shut_down(self) -> None:
        parameters = self._parameters()
        self._exit.close()
        del self._optimizer
        for parameter in parameters:
            parameter.grad = None
            _local(parameter).data = torch.empty(0)


def _local(parameter: torch.Tensor) -> torch.Tensor:
    """This rank's rows of it."""
    return parameter.to_local() if isinstance(parameter, DTensor) else parameter


class Fsdp2Offload(RankedSystem):
    """See the module's docstring."""

    name, summary, abilities = FACE.name, FACE.summary, FACE.abilities
    Options: type[BaseModel] = FACE.Options

    def initialize(self, model: nn.Module, settings: Settings, options: BaseModel, *, ranks: Ranks | None = None) -> Engine:
        assert isinstance(options, FsdpOptions)
        mine = begin(model, settings, options, ranks, self.name)
        if settings.dtype == "fp16":
            raise UnsupportedError("fsdp2-offload has no loss scale for gradients on the host: use `dtype='bf16'`")
        cuda = settings.device == "cuda"
        found = find_weights(model, settings, self.name)
        ours: Config = {
            "fully_shard": {"reshard_after_forward": True},
            "mixed_precision": {"cast_forward_inputs": True},
            "cpu_offload": {"pin_memory": cuda},
            "optimizer": {"fused": True},
        }
        config = merge(ours, read_config(options.config)) if options.config else ours
        allowed = {
            "fully_shard": arguments_of(fully_shard),
            "mixed_precision": arguments_of(MixedPrecisionPolicy),
            "cpu_offload": arguments_of(CPUOffloadPolicy),
            "optimizer": arguments_of(torch.optim.AdamW),
        }
        check_arguments(config, allowed, options.config)
        need = host_need(found.index, mine.size, cuda=cuda)
        budget.check_host(settings, system=self.name, need=need)
        statistics = PackageStatistics(
            package="torch",
            version=torch.__version__,
            config=config,
            config_file=options.config,
            dtypes={"weights": settings.dtype, "gradients": settings.dtype, "states": "fp32"},
            notes=[] if cuda else [budget.ONE_MEMORY],
        )
        limits = budget.BudgetInForce(settings)
        return FsdpEngine(model, found, settings, mine, limits=limits, config=config, statistics=statistics)


SYSTEM = Fsdp2Offload()
