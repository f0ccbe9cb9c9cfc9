"""RoundPipe: layers stream through the device in stages, the optimizer runs on the CPU in a thread of its own.

Note [How RoundPipe is run]
    It pipelines an nn.Sequential, so the model is cut into one (external/sequential.py). It always recomputes: --recompute
    full is what it does, all but the last stage's blocks, whose forward and backward it runs as one. For that the loss
    must come with the call (`forward_backward`); called for logits alone it sends them through host memory and back.
    A micro-batch of the run is cut in two for the pipeline. Gradients of several micro-batches add up in the compute
    dtype, on the device. 16-bit parameters and gradients on the host are pinned by torch, which rounds each tensor up to
    a power of two; masters, their gradients and moments are fp32: about 20 bytes a parameter and the rounding.
    asynchronous=false (the default) waits for each update. asynchronous=true is RoundPipe's own default: a step computes
    with the parameters of the step before the last, so its losses are not comparable step by step.
    It drives every CUDA device that it sees. An error in one of its threads ends the process.
"""

from __future__ import annotations

import contextlib
import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
from pydantic import BaseModel
from torch import nn

from systems.baselines.external import budget, extensions
from systems.baselines.external.engine import NO_DISK, PackageEngine, Update
from systems.baselines.external.faces import INSTALL, RoundPipeOptions
from systems.baselines.external.faces import ROUNDPIPE as FACE
from systems.baselines.external.package import Config, PackageStatistics, merge, read_config, require, version_of
from systems.baselines.external.process import begin
from systems.baselines.external.sequential import cut
from systems.baselines.external.torch_adam import check_arguments, set_rate
from systems.baselines.external.weights import Masters, find_weights, materialise
from systems.errors import UnsupportedError
from systems.ranks.ranks import SingleRank
from systems.recipe.model.units import FoundModel
from systems.settings import TORCH_DTYPE, Settings
from systems.system import Engine, System

PLAN_SHARE = 0.6  # of the device that RoundPipe plans for layers, by its own default
ALLOWED = {"roundpipe": ("pin_model",), "run": ("num_microbatch", "preserve_rng_state", "recompute_grain")}

Batch = Mapping[str, torch.Tensor]


class _InputsKnownError(Exception):
    """Carries what a loss would call the model with."""

    def __init__(self, inputs: dict[str, Any]) -> None:
        self.inputs = inputs


class RoundPipeEngine(PackageEngine):
    """roundpipe: the package. layers: the model in sequence. config: arguments of RoundPipe and of its run config."""

    system = "roundpipe"

    def __init__(
        self,
        model: nn.Module,
        found: FoundModel,
        settings: Settings,
        *,
        roundpipe: Any,
        layers: Callable[[], nn.Sequential],
        asynchronous: bool,
        limits: budget.BudgetInForce,
        config: Config,
        statistics: PackageStatistics,
    ) -> None:
        started = time.perf_counter()
        super().__init__(model, settings, limits, NO_DISK, SingleRank())
        self._package, self._statistics, self._asynchronous, self._run = roundpipe, statistics, asynchronous, config["run"]
        self._names = [p.name for p in found.index.parameters]
        with contextlib.ExitStack() as undo:
            undo.callback(limits.lift)
            masters = Masters(found, settings, self.ranks)
            device = torch.device("cuda", torch.cuda.current_device())
            parameters = materialise(found, masters, TORCH_DTYPE[settings.dtype], drawn_on=device)
            self._layers = layers().train()
            self.runs = roundpipe.RoundPipe(self._layers, optim_dtype=torch.float32, name="model", **config["roundpipe"])
            self._values = self._make_masters(parameters, masters, device)
            adam = settings.adam
            self._optimizer = roundpipe.optim.Adam(
                [value for value, p in zip(self._values, parameters, strict=True) if p.requires_grad],
                lr=adam.lr,
                betas=adam.betas,
                eps=adam.eps,
                weight_decay=adam.weight_decay,
                decoupled_weight_decay=adam.decoupled,
            )
            undo.pop_all()
        self._parameters = parameters
        self._startup = {"initialize": time.perf_counter() - started}
        limits.look()

    def _make_masters(self, parameters: list[nn.Parameter], masters: Masters, drawn_on: torch.device) -> list[torch.Tensor]:
        """RoundPipe makes fp32 copies of its 16-bit parameters; they get the values that every system starts from."""
        list(self.runs.optim_parameters())
        values: list[torch.Tensor] = []
        for number, parameter in enumerate(parameters):
            master = parameter.roundpipe_param_attr.optim  # type: ignore[attr-defined]
            if master is not None:
                master.data.copy_(masters.value(number, drawn_on))
            values.append(parameter if master is None else master)
            masters.forget(number)
        return values

    def _run_config(self, batch_size: int, kind: str) -> Any:
        """Of one call. Under a budget of the user's own its stages are planned for that, not for the whole device."""
        plan = None
        if self.settings.device_memory is not None:
            self.runs.model_timer.update_times()
            limit = PLAN_SHARE * self.settings.device_memory / (1 << 30)
            plan = self._package.ModelExecutePlan.auto(kind, self.runs, model_memory_limit=limit)
        parts = min(int(self._run["num_microbatch"]), batch_size)
        return self._package.RoundPipeRunConfig(**(self._run | {"num_microbatch": parts, "execute_plan": plan}))

    def _forward(self, *args: Any, **kwargs: Any) -> Any:
        inputs = {name: tensor.cpu() for name, tensor in kwargs.items()}
        kind = "train" if torch.is_grad_enabled() else "infer"
        run = self._run_config(len(next(iter(inputs.values()))), kind)
        run.output_device = torch.device("cuda", torch.cuda.current_device())
        return self.runs(*args, roundpipe_run_config=run, **inputs)

    def _backward(self, loss: torch.Tensor, *, last: bool) -> None:
        loss.backward()

    def forward_backward(self, loss: Callable[..., torch.Tensor], batch: Batch, label_count: int) -> torch.Tensor:
        """RoundPipe's own way: the last stage goes forward and backward in one, and the logits never leave the device."""
        self._begin_backward()
        on_host = {name: tensor.cpu() for name, tensor in batch.items()}
        inputs = _inputs(loss, on_host, label_count)

        def of_outputs(outputs: Any, part: Any) -> torch.Tensor:
            return loss(lambda **_: outputs, part, label_count)

        value = self.runs.forward_backward(
            input_kwargs=inputs,
            label=on_host,
            loss_fn=of_outputs,
            run_config=self._run_config(len(next(iter(inputs.values()))), "fused"),
        )
        return value.detach()

    def _update(self) -> Update:
        norms: list[float] = []

        def update() -> None:  # runs in RoundPipe's optimizer thread
            if self.settings.clip > 0:
                masters = [p for group in self._optimizer.param_groups for p in group["params"]]
                norms.append(float(torch.nn.utils.clip_grad_norm_(masters, self.settings.clip)))
            self._optimizer.step()
            self._optimizer.zero_grad(set_to_none=True)

        def norm() -> float:
            self._package.optim_stream.synchronize_optim()
            return norms[0]

        self.runs.step(update, self._asynchronous)
        return Update(norm if self.settings.clip > 0 else None)

    def drain(self) -> None:
        self._package.optim_stream.synchronize_optim()
        super().drain()

    def set_lr(self, lr: float) -> None:
        self._package.optim_stream.synchronize_optim()  # the rate is the queued update's until it has run
        set_rate(self._optimizer, lr)

    def train(self, mode: bool = True) -> None:
        self._layers.train(mode)

    def eval(self) -> None:
        self._layers.eval()

    def statistics(self) -> PackageStatistics:
        return self._statistics

    @contextmanager
    def masters(self, *, write: bool = False) -> Iterator[dict[str, torch.Tensor]]:
        self.drain()
        named = list(zip(self._names, self._values, self._parameters, strict=True))
        values = {name: value.detach().float().clone() for name, value, _ in named}
        yield values
        if write:
            for name, value, parameter in named:
                value.data.copy_(values[name])
                parameter.data.copy_(values[name])

    def _shut_down(self) -> None:
        self._package.optim_stream.synchronize_optim()
        del self.runs, self._optimizer, self._layers
        self._values = []
        for parameter in self._parameters:
            del parameter.roundpipe_param_attr  # type: ignore[attr-defined]
            parameter.data, parameter.grad = torch.empty(0, dtype=parameter.dtype), None


def _inputs(loss: Callable[..., torch.Tensor], batch: Batch, label_count: int) -> dict[str, Any]:
    """What the loss calls the model with."""

    def ask(**kwargs: Any) -> Any:
        raise _InputsKnownError(kwargs)

    try:
        loss(ask, batch, label_count)
    except _InputsKnownError as known:
        return known.inputs
    raise AssertionError("the loss did not call the model")


class RoundPipeSystem(System):
    """See the module's docstring."""

    name, summary, abilities = FACE.name, FACE.summary, FACE.abilities
    Options: type[BaseModel] = FACE.Options

    def initialize(self, model: nn.Module, settings: Settings, options: BaseModel) -> Engine:
        assert isinstance(options, RoundPipeOptions)
        begin(model, settings, options, None, self.name)
        self._check(settings)
        found = find_weights(model, settings, self.name)
        cut(model, self.name)
        dropout = any(isinstance(m, nn.Dropout) and m.p > 0 for m in model.modules())
        ours: Config = {
            "roundpipe": {"pin_model": "alloc"},
            "run": {"num_microbatch": 2, "preserve_rng_state": dropout, "recompute_grain": "stage"},
        }
        config = merge(ours, read_config(options.config)) if options.config else ours
        check_arguments(config, ALLOWED, options.config)
        budget.check_host(settings, system=self.name, need=_host_need(found, settings, config))
        package = require("roundpipe", INSTALL, self.name)
        require("roundpipe.optim_stream", INSTALL, self.name)
        builder = require("roundpipe.optim.optim_builder", INSTALL, self.name)
        with extensions.building():
            extensions.tell_of_build("RoundPipe's Adam", "roundpipe_optim_adam")
            builder.load_optim_function("adam")
        statistics = PackageStatistics(
            package="roundpipe",
            version=version_of("roundpipe"),
            config=config | {"asynchronous": options.asynchronous},
            config_file=options.config,
            notes=["a step uses the parameters of the step before the last"] if options.asynchronous else [],
        )
        return RoundPipeEngine(
            model,
            found,
            settings,
            roundpipe=package,
            layers=lambda: cut(model, self.name),
            asynchronous=options.asynchronous,
            limits=budget.BudgetInForce(settings),
            config=config,
            statistics=statistics,
        )

    def _check(self, settings: Settings) -> None:
        if settings.device != "cuda":
            raise UnsupportedError(f"{self.name} runs on CUDA only: take another system with `device='cpu'`")
        if torch.cuda.device_count() != 1:
            count = torch.cuda.device_count()
            raise UnsupportedError(f"{self.name} takes all {count} CUDA devices that it sees: set CUDA_VISIBLE_DEVICES to one")
        if settings.recompute != "full":
            raise UnsupportedError(f"{self.name} recomputes every block, and cannot do otherwise: use `recompute='full'`")
        if settings.dtype == "fp16":
            raise UnsupportedError(f"{self.name} is run without a loss scale: use `dtype='bf16'`")


def _host_need(found: FoundModel, settings: Settings, config: Config) -> int:
    """Parameters and gradients in the compute dtype, pinned tensor by tensor; masters, their gradients and moments."""
    width = TORCH_DTYPE[settings.dtype].itemsize
    pin = budget.pinned_bytes if config["roundpipe"]["pin_model"] == "alloc" else int
    need = 0
    for parameter in found.index.parameters:
        need += pin(width * parameter.numel)
        if parameter.trainable:
            need += budget.pinned_bytes(width * parameter.numel) + 16 * parameter.numel
    return need


SYSTEM = RoundPipeSystem()
