"""transformers' Trainer over an engine: its loop, data, schedules, logs and callbacks, with our step in place of torch's.

Trainer calls a stand-in of the model, which runs the engine, hands losses to the engine's backward, and steps a stand-in of the
optimizer. Clipping is the engine's, so that its norm is the one that is logged. Nothing is moved, wrapped or cast by Trainer or
Accelerate.
"""

from __future__ import annotations

from collections.abc import Mapping
from types import TracebackType
from typing import Any, Self

import torch

import systems
from systems.integrations.checkpoints import CheckpointedTrainer
from systems.integrations.refusals import check_arguments, check_launcher, check_offload, check_version
from systems.integrations.stand_ins import ModelStandIn, OptimizerStandIn

TAKEN_OVER = (
    "create_accelerator_and_postprocess",
    "create_optimizer",
    "save_model",
    "_build_accelerator_args",
    "_clip_grad_norm",
    "_get_grad_norm",
    "_load_best_model",
    "_load_from_checkpoint",
    "_load_optimizer_and_scheduler",
    "_load_rng_state",
    "_maybe_log_save_evaluate",
    "_move_model_to_device",
    "_save",
    "_save_optimizer_and_scheduler",
    "_save_rng_state",
    "_wrap_model",
)
"""Methods of Trainer, some of which are not public."""


class OffloadTrainer(CheckpointedTrainer):
    """A transformers.Trainer whose model need not fit on the device; arguments as there, and `offload`.

    offload: what `systems.initialize` takes of system, device_memory, host_memory, disk, disk_memory, recompute, weights and
    options. The rest follows from the training arguments: max_grad_norm is the engine's clip, gradient_accumulation_steps
    its accumulate; bf16 or fp16 its dtype, without them the model's own. The engine is made when training or evaluation
    first needs it, and stays open until `close`, which gives the model its weights back; `with` closes too.

    Raises UnsupportedError for training arguments that an engine cannot follow, ValueError for an odd entry of `offload`.
    """

    def __init__(self, *args: Any, offload: Mapping[str, Any] | None = None, **kwargs: Any) -> None:
        check_version(TAKEN_OVER)
        check_offload(offload or {})
        self.offload = dict(offload or {})
        super().__init__(*args, **kwargs)

    # ---- what Trainer makes at its beginning

    def create_accelerator_and_postprocess(self) -> None:
        check_arguments(self.args)
        super().create_accelerator_and_postprocess()
        check_launcher(self)
        self.accelerator.backward = self._backward  # which `training_step` calls, whatever else a version of it does

    def _build_accelerator_args(self, **kwargs: Any) -> dict[str, Any]:
        """The engine casts, and scales an fp16 loss."""
        return super()._build_accelerator_args(**kwargs) | {"mixed_precision": "no"}

    def _move_model_to_device(self, model: Any, device: Any) -> None:
        """The engine does."""

    def create_optimizer(self, model: Any = None) -> torch.optim.Optimizer:
        """With the engine, which takes its groups."""
        if self.engine is None or self.engine.module is not self.model:  # one of `model_init` is another every time
            self.close()
            optimizer, args = super().create_optimizer(model), self.args
            self.model_dtype = next((p.dtype for p in self.model.parameters() if p.is_floating_point()), torch.float32)
            self.engine = systems.initialize(
                self.model,
                optimizer=optimizer,
                device=args.device,
                dtype=self.model_dtype if args.mixed_precision == "no" else args.mixed_precision,
                accumulate=args.gradient_accumulation_steps,
                clip=max(0.0, args.max_grad_norm or 0.0),
                seed=args.seed,
                **self.offload,
            )
            self.optimizer = OptimizerStandIn(self.engine, optimizer)
        return self.optimizer

    def _wrap_model(self, model: Any, training: bool = True, dataloader: Any = None) -> Any:
        """Since it is not the model, Trainer does not have Accelerate prepare it, which would move it."""
        return ModelStandIn(self._started())

    # ---- a step

    def _backward(self, loss: torch.Tensor, **_: Any) -> None:
        """Ranks' gradients are summed; Trainer counts on their mean."""
        assert self.engine is not None
        ranks = self.engine.ranks.size
        self.engine.backward(loss / ranks if ranks > 1 else loss)

    def _clip_grad_norm(self, model: Any) -> None:
        """The engine clips, in its step, to what `create_optimizer` told it."""

    def _get_grad_norm(self, model: Any, grad_norm: Any = None) -> None:
        """See _maybe_log_save_evaluate."""

    def _maybe_log_save_evaluate(self, tr_loss: torch.Tensor, grad_norm: Any, *args: Any, **kwargs: Any) -> None:
        """After the step, when its norm is known."""
        if self.control.should_log and self.engine is not None:
            self.engine.drain()
            grad_norm = self.engine.outcomes[-1].norm if self.engine.outcomes else None
        super()._maybe_log_save_evaluate(tr_loss, grad_norm, *args, **kwargs)

    # ---- the end

    def close(self) -> None:
        """The model has its weights again, as after `engine.close()`. All ranks close; a second time is nothing."""
        if self.engine is not None:
            self.engine.close()

    def __enter__(self) -> Self:
        return self

    def __exit__(self, kind: type[BaseException] | None, error: BaseException | None, where: TracebackType | None) -> None:
        if self.engine is not None:
            self.engine.__exit__(kind, error, where)
