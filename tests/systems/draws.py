"""What one seed says of a random run: the strategy and its options, the model, the recipe, the budgets, and who goes on midway.

Kinds of options are drawn by their types, so that a new strategy's own are among them: every choice and every switch, and the
numbers named here. All else has the value for small models.
"""

from __future__ import annotations

import random
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from types import MappingProxyType
from typing import Any, Literal, get_args, get_origin

import torch
from pydantic import BaseModel
from torch import nn
from torch.utils.checkpoint import checkpoint

from tests.systems import models_plain, models_small
from tests.systems.every import MANAGED, SYSTEMS
from tests.systems.models_plain import DIM, Stack, squared_error
from tests.systems.models_small import next_token_loss
from tests.systems.setups import blocks_of

NUMBERS: Mapping[str, Sequence[int]] = MappingProxyType({"prefetch": (0, 1, 2, 3, 8), "chunk_parameters": (1, 3, 5, 7)})
# With as many as by default a search takes seconds, or is refused.
FEW: Mapping[str, int] = MappingProxyType({"samples": 50, "bins": 8})
# What a variant refuses beside the options that it sets: it has its own value then.
REFUSED: Mapping[str, Mapping[str, Any]] = MappingProxyType({"paper": {"solver": "best"}})
# H3T refuses a block that edits its input: tests/systems/test_user_models.py.
ODD = [name for name in models_plain.CASES if name != "in-place"]
BLOCKS: Mapping[str, int] = MappingProxyType({"no-list": 0, "recurrent": 2})  # all other models have four
# A checkpoint has no attributes of Python's and no generators.
MORE_THAN_A_CHECKPOINT_HAS = {"stateful"}


@dataclass
class Pass:
    """One way through the maze. order: block numbers, repeats allowed. recompute: by block, how; absent is not at all."""

    order: Sequence[int]
    heads: Sequence[int]
    recompute: Mapping[int, bool]


class Maze(Stack):
    """Does what the pass says: any blocks in any order, some checkpointed, one or two heads, a scale of the root's own."""

    def __init__(self, *, tied: bool) -> None:
        super().__init__()
        self.heads = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(2)])
        if tied:
            self.heads[1].weight = self.head.weight
        self.scale = nn.Parameter(torch.tensor(0.9))
        self.way = Pass((0,), (0,), {})

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        x = self.head(x.to(self.scale.dtype)) * self.scale
        for number in self.way.order:
            block = self.blocks[number]
            if number in self.way.recompute and torch.is_grad_enabled():
                x = checkpoint(block, x, use_reentrant=self.way.recompute[number])
            else:
                x = block(x)
        return sum(self.heads[h](x) for h in self.way.heads) * self.scale


def random_pass(luck: random.Random) -> Pass:
    order = [luck.randrange(4) for _ in range(luck.choice((1, 3, 4, 6)))]
    if luck.random() < 0.5:
        order = [0, 1, 2, 3]
    recompute = {number: luck.random() < 0.5 for number in range(4) if luck.random() < 0.3}
    return Pass(order, luck.choice(((0,), (1,), (0, 1))), recompute)


@dataclass(frozen=True, kw_only=True)
class Part:
    """Who trains for a while. share: of the device memory that resident takes. disk: it has one, and a host too small.

    spare: of the host's memory that it needs, what is there beside; None is plenty.
    """

    system: str
    options: BaseModel
    share: float
    disk: bool = False
    jitter: bool = False
    spare: float | None = None

    @property
    def stops(self) -> bool:
        """It may update during backward: with one micro-batch it does, and a gradient that is not finite ends the run."""
        return getattr(self.options, "nonfinite", "skip") == "stop"

    @property
    def inputs_on_host(self) -> bool:
        return getattr(self.options, "activations", "device") == "host"


@dataclass(frozen=True, kw_only=True)
class Draw:
    """parts: one, or two of which the second goes on, at the step `handover`, from a checkpoint of the first."""

    seed: int
    model: str
    tied: bool
    frozen: tuple[int, ...]
    dtype: str
    clip: float
    accumulate: int
    recompute: Any
    steps: int
    parts: tuple[Part, ...]
    handover: int | None

    def early(self, part: Part) -> bool:
        """Updates begin during backward."""
        return part.stops

    def build(self, seed: int) -> Any:
        """seed: of the first weights."""
        torch.manual_seed(seed)
        if self.model in models_plain.CASES:
            return models_plain.build(self.model, seed)
        model = Maze(tied=self.tied) if self.model == "maze" else models_small.build(self.model, seed, tied=self.tied)
        for number in self.frozen:
            blocks_of(model)[number].requires_grad_(False)
        return model

    @property
    def loss(self) -> Any:
        if self.model in models_plain.CASES:
            return models_plain.CASES[self.model].loss
        return squared_error if self.model == "maze" else next_token_loss

    @property
    def given(self) -> dict[str, Any]:
        return dict(dtype=self.dtype, clip=self.clip, accumulate=self.accumulate, recompute=self.recompute)

    @property
    def features(self) -> list[str]:
        """What a summary counts."""
        found = {
            "early updates": any(map(self.early, self.parts)),
            "inputs on the host": any(part.inputs_on_host for part in self.parts),
            "recomputation": self.recompute != "none",
            "clipping": self.clip > 0,
            "micro-batches": self.accumulate > 1,
            "frozen blocks": bool(self.frozen),
            "checkpoint": self.handover is not None,
            "spare memory": any(part.spare is not None for part in self.parts),
            self.dtype: True,
        }
        return [name for name, is_there in found.items() if is_there]


def draw(seed: int) -> Draw:
    """The seed alone decides. Strategies take turns, so that as many seeds as there are strategies have them all."""
    luck = random.Random(seed)
    model = luck.choice(("maze", "maze", "maze", "opt", "gpt2", luck.choice(ODD), luck.choice(ODD)))
    parts = [_part(list(MANAGED)[seed % len(MANAGED)], model, luck)]
    steps, handover = luck.randint(3, 6), None
    if luck.random() < 0.25 and model not in MORE_THAN_A_CHECKPOINT_HAS:
        others = [name for name in SYSTEMS if name != parts[0].system]
        parts.append(_part(luck.choice(others), model, luck))
        handover = luck.randint(1, steps - 1)
    blocks = range(BLOCKS.get(model, 4))
    drawn = Draw(
        seed=seed,
        model=model,
        tied=luck.random() < 0.6,
        frozen=_some(blocks, luck) if model not in models_plain.CASES and luck.random() < 0.3 else (),
        dtype=luck.choice(("fp32", "fp32", "bf16", "bf16", "fp16")),
        clip=luck.choice((0.0, 0.5, 2.0, 8.0)),
        accumulate=luck.randint(1, 3),
        recompute=luck.choice(("none", "none", "full", _some(blocks, luck))) if blocks else "none",
        steps=steps,
        parts=tuple(parts),
        handover=handover,
    )
    return _lawful(drawn)


def _lawful(drawn: Draw) -> Draw:
    """What a system refuses by name is told by its own tests."""
    if any(part.stops for part in drawn.parts):
        drawn = replace(drawn, clip=0.0, dtype="bf16" if drawn.dtype == "fp16" else drawn.dtype)
    if any(part.inputs_on_host for part in drawn.parts):
        drawn = replace(drawn, recompute="full")
    return drawn


def _some(blocks: Sequence[int], luck: random.Random) -> tuple[int, ...]:
    """Not all of them."""
    return tuple(sorted(luck.sample(blocks, luck.randint(1, len(blocks) - 1))))


def _part(system: str, model: str, luck: random.Random) -> Part:
    options = drawn_options(SYSTEMS[system].Options, luck)
    if "activations" in type(options).model_fields and BLOCKS.get(model) == 0:
        options = options.model_copy(update={"activations": "device"})
    managed = system in MANAGED
    share, on_disk = luck.uniform(0.35, 1.1), getattr(options, "states", None) == "disk"
    return Part(
        system=system,
        options=options,
        share=share,
        disk=(managed and MANAGED[system].abilities.disk and luck.random() < 0.15) or on_disk,
        jitter=managed and luck.random() < 0.15,
        spare=luck.choice((None, 0.0, 0.05, 0.2, 0.5)) if managed else None,
    )


def drawn_options(kind: type[BaseModel], luck: random.Random) -> BaseModel:
    found: dict[str, Any] = {}
    for name, field in kind.model_fields.items():
        if get_origin(field.annotation) is Literal:
            found[name] = luck.choice(get_args(field.annotation))
        elif field.annotation is bool:
            found[name] = luck.random() < 0.5
        elif name in NUMBERS:
            found[name] = luck.choice(NUMBERS[name])
        elif name in FEW:
            found[name] = FEW[name]
    variant = str(found.get("variant"))
    rules: Mapping[str, Any] = getattr(kind, "rules", {}).get(variant, {})
    refused = REFUSED.get(variant, {})
    return kind(**{n: value for n, value in found.items() if n not in rules and (n not in refused or refused[n] != value)})
