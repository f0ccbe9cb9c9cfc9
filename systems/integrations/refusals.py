"""What of transformers' training arguments an engine cannot do, or does in its own way: told before anything is built."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from transformers import Trainer

from systems.errors import UnsupportedError
from systems.messages import unknown_name

GIVEN = ("system", "device_memory", "host_memory", "disk", "disk_memory", "recompute", "weights", "options")
"""What `offload` may say: arguments of `systems.initialize`."""

SAID_ELSEWHERE: Mapping[str, str] = {
    "accumulate": "gradient_accumulation_steps",
    "clip": "max_grad_norm",
    "device": "use_cpu, without which it is the GPU if there is one",
    "dtype": "bf16 or fp16, without which it is the model's own",
    "model": "model",
    "optimizer": "optimizers, or optim, learning_rate and the like",
    "seed": "seed",
}
"""Arguments of `systems.initialize` that Trainer's own say."""

OF_OWN_LOOPS: Mapping[str, str] = {
    "expert_ranks": "Trainer saves whole models, which ranks that share experts lack: write a loop around systems.initialize",
}
"""Arguments of `systems.initialize` that Trainer cannot do, and what to do instead."""

REFUSED: Mapping[str, str] = {
    "deepspeed": "an engine places and moves all states itself: leave it out, or use transformers.Trainer",
    "fsdp": "an engine keeps and gathers each rank's part itself: leave it out, or use transformers.Trainer",
    "parallelism_config": "an engine's ranks each have batches of their own: leave it out, or use transformers.Trainer",
    "torch_compile": "an engine moves weights between a model's calls, which a compiled graph does not have: leave it off",
    "gradient_checkpointing": "an engine recomputes blocks itself: leave it off, and give offload=dict(recompute='full')",
    "activation_checkpointing": "an engine recomputes blocks itself: leave it off, and give offload=dict(recompute='full')",
    "auto_find_batch_size": "a budget is looked at before a step and says what it needs: leave it off, and choose a batch size",
    "fp16_full_eval": "an engine evaluates in the dtype it trains in: leave it off",
    "bf16_full_eval": "an engine evaluates in the dtype it trains in: leave it off",
}
"""Training arguments that have to be off, and what to do instead; names that a version of transformers lacks are off."""


def check_offload(offload: Mapping[str, Any]) -> None:
    """ValueError for a name that `offload` has no room for, and for what is no mapping of names."""
    if not isinstance(offload, Mapping):
        raise ValueError(f"offload is {offload!r}: give a dict, such as dict(system='elixir', device_memory='20GiB')")
    for name in offload:
        if name in SAID_ELSEWHERE:
            raise ValueError(f"offload has {name}: leave it out, the training arguments say it: {SAID_ELSEWHERE[name]}")
        if name in OF_OWN_LOOPS:
            raise UnsupportedError(f"offload has {name}: leave it out; {OF_OWN_LOOPS[name]}")
        if name not in GIVEN:
            raise ValueError(unknown_name("entry of offload", str(name), GIVEN))


def check_arguments(args: Any) -> None:
    """args: transformers.TrainingArguments. UnsupportedError in one line."""
    for name, instead in REFUSED.items():
        if getattr(args, name, None):
            raise UnsupportedError(f"{name} is set: {instead}")
    if args.n_gpu > 1:
        raise UnsupportedError(
            f"{args.n_gpu} GPUs are seen by one process, over which Trainer would copy the model (DataParallel): start a "
            "process for each, as torchrun does, or show it one with CUDA_VISIBLE_DEVICES"
        )
    if args.mixed_precision not in ("no", "bf16", "fp16"):
        raise UnsupportedError(f"mixed precision is {args.mixed_precision!r}: an engine trains in bf16, fp16 or fp32")
    if args.load_best_model_at_end and args.save_only_model:
        raise UnsupportedError(
            "load_best_model_at_end takes the best weights from an engine's checkpoint, which save_only_model leaves out: "
            "leave save_only_model off"
        )


def check_launcher(trainer: Any) -> None:
    """UnsupportedError where `accelerate launch` asks for what `check_arguments` refuses."""
    for name in ("deepspeed", "fsdp"):
        if getattr(trainer, f"is_{name}_enabled"):
            raise UnsupportedError(f"{name} is asked for by what launched this process: {REFUSED[name]}")


def check_version(called: Iterable[str]) -> None:
    """called: methods of Trainer that are taken over. UnsupportedError where it lacks one, which would never be called."""
    missing = [name for name in called if not hasattr(Trainer, name)]
    if missing:
        raise UnsupportedError(
            f"this version of transformers has another Trainer, without {', '.join(missing)}: use one that this library knows"
        )
