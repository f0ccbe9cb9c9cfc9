"""Calls that go around an engine, and how they are refused: a compiled or transformed forward, a backward pass that it did not
begin.

Note [How a compiled forward is seen]
    torch.compile fixes the addresses of weights that an engine moves. While a forward is traced, `is_compiling` says so. The
    emulated device counts bytes by a dispatch mode, under which torch compiles nothing and says nothing: then the forward runs
    as it is, with the compiler's frame callback set.
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
    "torch.compile fixes the addresses of weights: leave the model, its modules and the engine uncompiled, and compile what is "
    "not of the model"
)

STALE_LOSS = (
    "this loss was made in a step that is over, of weights that have changed since: go backward before step() or discard(), or "
    "run the forward pass anew; what the model made in one step is detached before it is used in another"
)


@torch._disable_dynamo
def _refuse() -> None:
    raise UnsupportedError(COMPILED)


def is_compiled(module: nn.Module) -> bool:
    """It, its call, or a `forward` of its own."""
    if isinstance(module, torch._dynamo.OptimizedModule) or getattr(module, "_compiled_call_impl", None) is not None:
        return True
    return hasattr(module.__dict__.get("forward"), "_torchdynamo_orig_callable")


def refuse_compiled(module: nn.Module, *_: Any) -> None:
    """A forward pre-hook: UnsupportedError if this call is compiled, or called from what is."""
    if torch.compiler.is_compiling() or is_compiled(module) or callable(get_eval_frame_callback()):
        _refuse()


def refuse_transformed() -> None:
    """UnsupportedError where a module with weights is called by torch.func: its tensors stand for others and have no memory."""
    if torch._C._functorch.maybe_current_level() is not None:
        raise UnsupportedError(
            "a module with weights is called by a transform of torch.func (vjp, grad, vmap and the like), and what it makes "
            "hides from the engine: call the module itself, and transform functions without weights"
        )
