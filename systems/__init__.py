"""Train a model whose states do not fit on its device: `engine = systems.initialize(model, system="elixir", ...)`."""

from __future__ import annotations

from contextlib import ExitStack, contextmanager
from typing import TYPE_CHECKING, Any, Literal

if TYPE_CHECKING:
    import os
    from collections.abc import Callable, Iterator, Mapping

    import torch
    from pydantic import BaseModel
    from transformers import PretrainedConfig

    from systems.prediction.estimate import Estimate
    from systems.settings import Settings
    from systems.system import Engine, RankedSystem

NO_DISK = "disk: {} keeps no states on a disk: leave it out, or use one of this project's own strategies"


def initialize(
    model: torch.nn.Module,
    *,
    system: str = "elixir",
    optimizer: torch.optim.Optimizer | None = None,
    device: str | torch.device = "cuda",
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    disk: str | os.PathLike[str] | None = None,
    disk_memory: int | str | None = None,
    dtype: str | torch.dtype = "bf16",
    accumulate: int = 1,
    clip: float = 0.0,
    recompute: Literal["none", "full"] | tuple[int, ...] = "none",
    seed: int = 0,
    weights: str | os.PathLike[str] | None = None,
    expert_ranks: int = 1,
    options: dict[str, Any] | None = None,
) -> Engine:
    """Put `model`, a transformers or plain PyTorch model with values, under a system; see systems.system.Engine.

    optimizer: a torch.optim.AdamW, Adam or SGD, or a systems.optimizers.lion.Lion, over model.parameters(); its groups are read
    at every step, so schedulers work on it, and its state_dict() and load_state_dict() are about the engine's moments.
    device: "cuda", the process's current one, "cpu" for the emulated one, or such a torch.device. dtype: of weights and
    gradients: "bf16", "fp16", "fp32", or as torch calls it. device_memory, host_memory: budgets, bytes or "40GiB"; None takes
    the smallest limit of the machine.
    disk: a folder for optimizer states that the host has no room for. disk_memory: budget of the files there.
    accumulate: backward passes a step, whose gradients are summed. clip: norm to clip gradients to, 0 for off.
    recompute: as in Settings.
    weights: a folder in transformers' format whose values the model starts with, whatever it has itself, so that it may be on
    the meta device (`model_of`): safetensors, read tensor by tensor into the master weights. What is missing there, of another
    shape, not finite or no floating-point number is refused by name; what the model has no place for is left out and told.
    expert_ranks: how many processes share one set of experts: see docs/several-gpus.md.
    options: the system's own, by name, e.g. {"prefetch": 4}.

    Several processes that torchrun starts train one model together, each on its own batches, and so do those of an initialized
    torch.distributed group. All of them initialize, step, read values and close alike, with the same arguments and values.
    A step's gradients are summed over micro-batches and ranks: divide each loss by what all of them count. host_memory is the
    host's, device_memory one device's. On close the engine ends the groups that were made here.

    Raises ValueError for a bad argument, BudgetError and UnsupportedError (ValueErrors too) if it cannot be done.
    """
    from torch import nn

    from systems.arguments import device_of, dtype_of, options_of, recompute_of, size_of
    from systems.machine.budgets import refuse_absent_device
    from systems.ranks.joining import expected, is_one_of_several
    from systems.registry import check_options, get
    from systems.settings import Settings
    from systems.system import on_ranks

    with expected():
        if not isinstance(model, nn.Module):
            raise ValueError(f"model is {type(model).__name__}: give a torch.nn.Module")
        chosen = get(system)
        if disk is not None and not chosen.abilities.disk:
            raise ValueError(NO_DISK.format(system))
        settings = Settings(
            device=device_of(device),
            device_memory=size_of("device_memory", device_memory),
            host_memory=size_of("host_memory", host_memory),
            disk=disk,
            disk_memory=size_of("disk_memory", disk_memory),
            dtype=dtype_of(dtype),
            accumulate=accumulate,
            clip=clip,
            recompute=recompute_of(recompute),
            seed=seed,
            expert_ranks=expert_ranks,
            optimizer=optimizer,
        )
        asked = check_options(chosen, options_of(options))
        refuse_absent_device(settings)
        if expert_ranks > 1 and not is_one_of_several():
            raise ValueError(f"expert_ranks is {expert_ranks}, and this process is alone: leave it out, or use torchrun")
    if is_one_of_several():
        return _initialize_on_ranks(on_ranks(chosen), model, settings, asked, weights)
    mine = chosen.look_for_room(model, settings, asked)
    with _first_values(weights, model, mine) as begun:
        return chosen.initialize(model, begun, asked)


@contextmanager
def _first_values(weights: str | os.PathLike[str] | None, model: torch.nn.Module, settings: Settings) -> Iterator[Settings]:
    """Around the making of an engine: the settings with what the folder has. Nothing of the model is changed if that fails."""
    if weights is None:
        yield settings
        return
    from dataclasses import replace

    from systems.pretrained import folder_weights
    from systems.recipe.model.units import find_units
    from systems.settings import TORCH_DTYPE

    found = folder_weights(model, weights)
    carried = find_units(model, TORCH_DTYPE[settings.dtype]).carried
    with found.beside(model, [name for name, parameter in carried.items() if not parameter.is_meta]):
        yield replace(settings, initial_weights=found)


def _initialize_on_ranks(
    chosen: RankedSystem,
    model: torch.nn.Module,
    settings: Settings,
    options: BaseModel,
    weights: str | os.PathLike[str] | None,
) -> Engine:
    """The ranks that are made here end with the engine."""
    from dataclasses import replace

    from systems.machine.threads import share_cores
    from systems.ranks.joining import joined
    from systems.ranks.launchers import chosen_threads
    from systems.ranks.side_by_side import side_by_side

    ranks = joined(settings.device)
    try:
        with ExitStack() as stack:
            with side_by_side(ranks, "what is there for an engine"):
                share_cores(ranks.local_size, chosen_threads())
                mine = replace(settings, ranks=ranks.size, local_ranks=ranks.local_size)
                mine = chosen.look_for_room(model, mine, options)
                begun = stack.enter_context(_first_values(weights, model, mine))
            return chosen.initialize(model, begun, options, ranks=ranks)
    except BaseException:
        ranks.close()
        raise


def model_of(folder: str | os.PathLike[str]) -> torch.nn.Module:
    """The transformers model that a folder's config.json describes, in training mode, its parameters on the meta device, in
    fp32: for `initialize(model, weights=folder)`, and for an optimizer over its parameters. It takes next to no memory.

    Its class is the first of `architectures`, or else the causal language model of its type. No code of the folder is run, and
    nothing is downloaded. An engine exchanges parameters on the meta device for others: the optimizer that it is given follows
    them, what else was made of the old ones does not.

    Raises UnsupportedError for what is no folder, has no such file, or describes no model of transformers.
    """
    from systems.pretrained import model_of as build

    return build(folder)


def estimate(
    model: torch.nn.Module | PretrainedConfig,
    *,
    system: str = "elixir",
    hardware: str | os.PathLike[str] | None = None,
    batch_size: int = 1,
    seq_len: int | None = None,
    optimizer: torch.optim.Optimizer | str = "adamw",
    device: str | torch.device = "cuda",
    device_memory: int | str | None = None,
    host_memory: int | str | None = None,
    disk_memory: int | str | None = None,
    ranks: int | None = None,
    dtype: str | torch.dtype = "bf16",
    accumulate: int = 1,
    clip: float = 0.0,
    recompute: Literal["none", "full"] | tuple[int, ...] = "none",
    options: dict[str, Any] | None = None,
    loss: Callable[..., torch.Tensor] | None = None,
) -> Estimate:
    """Whether `model` would fit a machine that need not be here, and how long its steps would take. Print it for a table.

    model: a module that takes token ids, on any device, the meta device too, or a transformers config. Nothing of it is
    changed, no weight is copied, nothing is computed: a step is observed on the meta device, planned and simulated.
    system: a name, or "all" for each that makes plans, the fastest that fits first; others (`deepspeed-zero3-offload`, ...) by
    their rules. hardware: a profile's name (`harness ls hardware`) or a .json file of `harness profile`; None: of the GPU
    here. batch_size: of one rank and micro-batch. seq_len: tokens; None: what the model takes, 1024 at most.
    optimizer: one, or the name of one in systems/optimizers. device: "cpu" asks about the emulated one, which counts exactly.
    device_memory of one device, host_memory of a node: None takes the profile's. disk_memory: of a node, for optimizer states;
    None: no disk. ranks: None takes all devices of the profile. loss: called with (model, batch, label_count), batch having
    input_ids and labels of (batch_size, seq_len); None: the model's own with labels, or cross entropy of its logits.
    All others are as in `initialize`.

    What does not fit is no error: see systems.prediction.estimate.SystemEstimate, why_not and remedies. Raises ValueError for a
    bad argument, UnsupportedError (a ValueError too) for a model whose step cannot be observed.
    """
    from systems.arguments import device_of, dtype_of, options_of, recompute_of, size_of
    from systems.planning.allowance import CUDA, EXACT
    from systems.prediction.estimate import either, estimated, longest, moments_of, profile_of
    from systems.prediction.forecast import Question
    from systems.registry import check_options, get, planners
    from systems.settings import Settings

    settings = Settings(  # which checks what the two calls have in common
        device=device_of(device),
        device_memory=size_of("device_memory", device_memory),
        host_memory=size_of("host_memory", host_memory),
        dtype=dtype_of(dtype),
        accumulate=accumulate,
        clip=clip,
        recompute=recompute_of(recompute),
    )
    if system == "all" and options:
        raise ValueError("options are of one system: leave them out of `system='all'`")
    chosen = list(planners()) if system == "all" else [get(system)]
    profile = profile_of(None if hardware is None else str(hardware))
    question = Question(
        profile=profile,
        device_memory=either(settings.device_memory, profile.device_memory_bytes),
        host_memory=either(settings.host_memory, profile.host_memory_bytes),
        disk_memory=size_of("disk_memory", disk_memory) or 0,
        ranks=profile.devices if ranks is None else ranks,
        batch_size=batch_size,
        seq_len=longest(model) if seq_len is None else seq_len,
        dtype=settings.dtype,
        accumulate=accumulate,
        recompute=settings.recompute,
        clip=clip,
        allowance=EXACT if settings.device == "cpu" else CUDA,
        moments=moments_of(optimizer),
    )
    return estimated(model, chosen, None if system == "all" else check_options(chosen[0], options_of(options)), question, loss)


def uses(module: torch.nn.Module, *parameters: torch.Tensor) -> None:
    """Say, before `initialize`, that the module's forward reads parameters which other modules of the model own.

    They are there for it, and their gradients awaited from it, from the first step on and under every plan. What is not said is
    found as it happens, by torch's operations, and planned for a step later; what a kernel reads by an address (a fused loss
    that is given lm_head.weight) is not found at all. The module is one of the model's, whose forward the model's own calls;
    they are held from its beginning to its end. A second call says it anew for the module, without parameters it takes it back.

    Raises ValueError for what is no module with a forward, or no Parameter, and UnsupportedError where an engine has them;
    `initialize` raises UnsupportedError where the parameters or the module are not its model's, or ranks say different things.
    """
    from systems.recipe.model.uses import uses as say

    say(module, *parameters)


def save_checkpoint(engine: Engine, folder: str | os.PathLike[str], *, client_state: Mapping[str, Any] | None = None) -> None:
    """Write what the engine has: weights, moments, counts, loss scale, buffers; see systems.checkpoint.save.

    client_state: what is the loop's, for `load_checkpoint` to give back: the step, what the optimizer's groups say (lr, betas,
    ...), a scheduler's state_dict(), the data's position, seeds. A mapping of JSON, 16MiB at most, tuples come back as lists;
    what is no JSON is refused by name before anything is written, and nothing is pickled. docs/own-loop.md has the lines.
    All ranks call it, with one folder; each has a client_state of its own.
    """
    from systems.checkpoint import save

    save(engine, folder, client_state=client_state)


def load_checkpoint(engine: Engine, folder: str | os.PathLike[str]) -> dict[str, Any]:
    """Restore what any system and any number of ranks saved of the same model; all ranks call it. See systems.checkpoint.load.

    Returns the client_state for the loop to go on from, empty if none was given: each rank's own where as many ranks load as
    saved, otherwise rank 0's on all, and a warning says so where the others' was another.
    """
    from systems.checkpoint import load

    return load(engine, folder).client_state
