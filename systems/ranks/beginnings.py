"""That ranks begin alike: with the same settings, and with the same first values of each parameter."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from itertools import zip_longest
from typing import Any, NamedTuple, Protocol

import torch
from pydantic import BaseModel
from torch import nn

from systems.errors import UnsupportedError
from systems.ranks.expert_exchange import reached
from systems.ranks.group_names import REPLICA
from systems.ranks.groups import cut, group_of, of_replicas
from systems.ranks.ranks import Ranks
from systems.settings import Settings

ALONE = "`ranks` is {}, and no other ranks are here: start the processes with torchrun, or leave `ranks` at 1"
NO_EXPERTS = (
    "`expert_ranks` is {}, and no module of the model says data_parallel = 'replica', as experts do that ranks share: leave it "
    "at 1"
)
NOT_REACHED = (
    "{} is an expert's (data_parallel = 'replica'), and no module around it has an exchange with dispatch and combine, "
    "by which tokens of other ranks reach it: give the layer one (docs/several-gpus.md), or leave `expert_ranks` at 1"
)
SHARED_WITH = (
    "module {} has a parameter of an expert's (data_parallel = 'replica') and is no expert: all ranks have to have its values, "
    "and not all have the expert; untie them, or leave `expert_ranks` at 1"
)
UNLIKE = "{} on rank 0 and {} on rank {} are experts of different shapes, or not both trained: give all ranks experts alike"
PIECE = 1 << 22  # elements that are summed at a time
ASKED = ("dtype", "accumulate", "clip", "recompute", "seed", "ranks", "expert_ranks", "adam")  # of the settings


def begin_alike(ranks: Ranks, settings: Settings, options: BaseModel, model: nn.Module, **more: object) -> None:
    """UnsupportedError on all ranks where one was asked something else than the first, where the model keeps what would be each
    rank's own, and where their link cannot do it. more: what was asked besides, by name.

    From here on they share experts as the settings say.
    """
    if settings.device not in ranks.devices:
        raise UnsupportedError(f"these ranks have no link between {settings.device} devices: use processes, a device each")
    assert ranks.size == settings.ranks, "the settings say how many ranks there are"
    experts = settings.expert_ranks

    def asked() -> tuple[dict[str, Any], set[str]]:
        if ranks.size > 1:
            _refuse_running_averages(model)
        replicas = of_replicas(model)
        if experts > 1:
            cut(ranks.size, experts)
            _check_experts(model, replicas, experts)
        theirs = frozenset[object]() if experts == 1 else replicas
        frozen = {name for name, parameter in model.named_parameters() if not (parameter.requires_grad or parameter in theirs)}
        return more | {name: getattr(settings, name) for name in ASKED} | options.model_dump(), frozen

    (first, frozen), *_ = told = ranks.together("settings", asked)
    for rank, (theirs, frozen_there) in enumerate(told):
        for name in first | theirs:
            if first.get(name) != theirs.get(name):
                raise UnsupportedError(
                    f"{name} is {first.get(name)!r} on rank 0 and {theirs.get(name)!r} on rank {rank}: give all ranks the same"
                )
        for name in sorted(frozen ^ frozen_there):
            here, there = ("frozen", "trained") if name in frozen else ("trained", "frozen")
            raise UnsupportedError(f"{name} is {here} on rank 0 and {there} on rank {rank}: give all ranks the same")
    ranks.divide(experts)


def smallest(ranks: Ranks, budgets: Callable[[], Sequence[int]]) -> list[int]:
    """Bytes that each rank has at least: of ranks that plan alike none can use more, on whichever host it is."""
    return [min(each) for each in zip(*ranks.together("budgets", lambda: list(budgets())), strict=True)]


def _check_experts(model: nn.Module, found: frozenset[nn.Parameter], expert_ranks: int) -> None:
    """UnsupportedError where there are none, where others have a part of them too, and where no tokens of other ranks come."""
    if not found:
        raise UnsupportedError(NO_EXPERTS.format(expert_ranks))
    inside = {part for module in model.modules() if group_of(module) == REPLICA for part in module.modules()}
    for name, module in model.named_modules():
        if module not in inside and not found.isdisjoint(module.parameters(recurse=False)):
            raise UnsupportedError(SHARED_WITH.format(name or "<root>"))
    away = found - {parameter for layer in reached(model).values() for parameter in layer.parameters()}
    for name, parameter in model.named_parameters():
        if parameter in away:
            raise UnsupportedError(NOT_REACHED.format(name))


def _refuse_running_averages(model: nn.Module) -> None:
    for name, module in model.named_modules():
        if getattr(module, "running_mean", None) is not None or getattr(module, "running_var", None) is not None:
            raise UnsupportedError(
                f"module {name or '<root>'} ({type(module).__name__}) keeps running averages, which on several ranks would be "
                "each rank's own: use a norm without them (LayerNorm, GroupNorm, track_running_stats=False), or one rank"
            )


class HasShape(Protocol):
    """A parameter."""

    @property
    def name(self) -> str: ...

    @property
    def shape(self) -> tuple[int, ...]: ...

    @property
    def trainable(self) -> bool: ...

    @property
    def group(self) -> str: ...


class FirstValuesAlike:
    """parameters: in order of numbers. initial: fills a parameter's first fp32 value, by its number.

    names: of all parameters, by expert rank, once they are checked; empty where each rank has all of them.
    """

    def __init__(self, ranks: Ranks, parameters: Sequence[HasShape], initial: Callable[[int, torch.Tensor], None]) -> None:
        self._ranks, self._parameters, self._initial = ranks, parameters, initial
        self._sums: dict[int, int] = {}
        self.names: list[list[str]] = []

    def fill(self, number: int, out: torch.Tensor) -> None:
        """What `initial` does."""
        self._initial(number, out)
        if self._ranks.size > 1:
            self._sums[number] = sum_of_bits(out)

    def check(self) -> None:
        """UnsupportedError on all ranks where a parameter's values differ. What was not filled, because only others have a part
        of it, is filled here.
        """
        if self._ranks.size == 1:
            return

        def mine() -> list[_First]:
            for number, parameter in enumerate(self._parameters):
                if number not in self._sums:
                    self.fill(number, torch.empty(parameter.shape, dtype=torch.float32))
            return [
                _First(p.name, self._sums[number], p.group, (p.shape, p.trainable)) for number, p in enumerate(self._parameters)
            ]

        told, experts = self._ranks.together("first values", mine), self._ranks.expert_ranks
        for rank, theirs in enumerate(told):
            for one, other in zip_longest(told[0], theirs):
                if experts > 1 and None not in (one, other) and one.group == other.group == REPLICA:
                    if one.kind != other.kind:
                        raise UnsupportedError(UNLIKE.format(one.name, other.name, rank))
                elif one != other:
                    raise UnsupportedError(_differ(one, other, 0, rank))
            for one, other in zip(told[rank % experts], theirs, strict=True):
                if one != other:
                    raise UnsupportedError(_differ(one, other, rank % experts, rank))
        if experts > 1:
            _refuse_one_name(told[:experts])
            self.names = [[each.name for each in theirs] for theirs in told[:experts]]


class _First(NamedTuple):
    """What a rank has of a parameter. bits: their sum. kind: what all ranks have alike of an expert."""

    name: str
    bits: int
    group: str
    kind: tuple[tuple[int, ...], bool]


def _differ(one: _First | None, other: _First | None, first: int, rank: int) -> str:
    there = one or other
    assert there is not None
    if one is not None and other is not None and one.name != other.name:
        return f"parameter {one.name} of rank {first} is {other.name} on rank {rank}: give both the same names"
    return (
        f"the first values of {there.name} are not the same on ranks {first} and {rank}: make the model with the same seed "
        "on all ranks, or load the same weights"
    )


def _refuse_one_name(told: Sequence[Sequence[_First]]) -> None:
    """told: by expert rank."""
    owner: dict[str, int] = {}
    for expert_rank, theirs in enumerate(told):
        for name in (each.name for each in theirs if each.group == REPLICA):
            if owner.setdefault(name, expert_rank) != expert_rank:
                raise UnsupportedError(
                    f"ranks {owner[name]} and {expert_rank} both have an expert's parameter {name}: build each rank's model "
                    "with its own part of the experts, under their global numbers"
                )


def sum_of_bits(values: torch.Tensor) -> int:
    """Of fp32 values, the same for the same bits."""
    bits = values.detach().reshape(-1).view(torch.int32)
    return sum(int(piece.sum(dtype=torch.int64)) for piece in bits.split(PIECE)) if bits.numel() else 0
