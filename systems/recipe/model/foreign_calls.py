"""Calls that go around an engine, and how they are refused: a compiled or transformed forward, a backward pass that it did not
begin.

Note [Compiled forwards]
    A module's `forward` that was compiled before it came to an engine is called like any other, in the module's hooks: torch
    guards what weights are like, not where they lie, so that they may move. What is compiled around hooks hides a unit from
    the engine and is refused: while it is traced `is_compiling` says so. The emulated device counts bytes by a dispatch mode,
    under which torch compiles nothing and says nothing: a forward runs as it is, with the compiler's frame callback set.
    There, compiled forwards are refused altogether. A CUDA device is under such a mode while reads are watched, and asks torch
    for what is uncompiled then: of what it meets under a mode unasked, torch may compile nothing later either.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import nn
from torch._C._dynamo.eval_frame import get_eval_frame_callback

from systems.errors import UnsupportedError

FOREIGN_BACKWARD = (
    "a backward pass came through this engine's model, and this engine did not begin it: call engine.backward(loss) instead of "
    "loss.backward() or torch.autograd.grad; a loss goes through one engine, so detach what another engine's model made"
)
COMPILED = (
    "torch.compile hides modules from the engine: compile neither the model, its modules nor the engine, but what is not of "
    "the model, or on a CUDA device the forward of blocks, before initialize: block.forward = torch.compile(block.forward)"
)
ORIGINAL = "_torchdynamo_orig_callable"  # what torch's wrapper of a compiled function has

STALE_LOSS = (
    "this loss was made in a step that is over, of weights that have changed since: go backward before step() or discard(), or "
    "run the forward pass anew; what the model made in one step is detached before it is used in another"
)


@torch._disable_dynamo
def _refuse() -> None:
    raise UnsupportedError(COMPILED)


def is_compiled(module: nn.Module) -> bool:
    """It, or its call with all hooks."""
    return isinstance(module, torch._dynamo.OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None


def has_compiled_forward(module: nn.Module) -> bool:
    """A `forward` of its own that was compiled."""
    return hasattr(module.__dict__.get("forward"), ORIGINAL)


def refuse_compiled(module: nn.Module, *_: Any) -> None:
    """A forward pre-hook: UnsupportedError if this call is compiled, or called from what is."""
    around = hasattr(module.__dict__.get("forward"), ORIGINAL)  # the engine's own, since: see `_Forward` in calls.py
    if around or torch.compiler.is_compiling() or module._compiled_call_impl is not None or callable(get_eval_frame_callback()):
        _refuse()


def refuse_transformed() -> None:
    """UnsupportedError where a module with weights is called by torch.func: its tensors stand for others and have no memory."""
    if torch._C._functorch.maybe_current_level() is not None:
        raise UnsupportedError(
            "a module with weights is called by a transform of torch.func (vjp, grad, vmap and the like), and what it makes "
            "hides from the engine: call the module itself, and transform functions without weights"
        )
