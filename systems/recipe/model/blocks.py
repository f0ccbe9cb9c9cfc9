"""Which modules are a model's transformer blocks: the unit of recomputation, and of FLOPs that are spent twice."""

from __future__ import annotations

import torch
from torch import nn


def has_forward(module: nn.Module) -> bool:
    """False for a mere container (ModuleList, ParameterDict, a bare Module), which nobody ever calls."""
    if isinstance(module, torch.jit.ScriptModule):  # whose class has none to ask for
        return hasattr(module, "forward")
    return type(module).forward is not nn.Module.forward or "forward" in vars(module)


def find_blocks(model: nn.Module) -> dict[str, nn.Module]:
    """Name to module of every block, in module order: block number i of a run is entry i.

    A block is an element, with parameters, of an outermost ModuleList of modules of one type. Lists one behind the other
    (an encoder's and a decoder's) are numbered on. A list of one counts too: a model of one layer, or ALBERT, which calls
    its one layer many times. In a list of lists the inner ones have the blocks.
    """
    found: dict[str, nn.Module] = {}
    lists: list[str] = []
    for name, module in model.named_modules():
        if any(name.startswith(outer) for outer in lists):
            continue
        if isinstance(module, nn.ModuleList) and len({type(child) for child in module}) == 1 and has_forward(module[0]):
            prefix = f"{name}." if name else ""
            lists.append(prefix)
            found |= {f"{prefix}{i}": child for i, child in enumerate(module) if any(True for _ in child.parameters())}
    return found
