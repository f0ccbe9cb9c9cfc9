"""Moments and step counts of an engine in the format of torch's optimizers, both ways, through the user's own optimizer.

Note [Where the state is]
    It is the engine's. `optimizer.state_dict()` fills the optimizer with copies and empties it again, `load_state_dict()` hands
    what it is given to the engine as it is: torch would first cast moments to the dtype of their parameter.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from itertools import chain
from typing import Any, NamedTuple, Protocol

import torch

from systems.checkpoint import Part, TrainingState
from systems.errors import BudgetError, UnsupportedError
from systems.planning.layout import ModelIndex
from systems.ranks.beginnings import sum_of_bits
from systems.ranks.ranks import Ranks, SingleRank
from systems.ranks.side_by_side import side_by_side
from systems.recipe.step.control import StepControl
from systems.recipe.step.parameter_groups import check_flags
from systems.sizes import format_need, format_size

MOMENTS: tuple[Part, Part] = ("exp_avg", "exp_avg_sq")
BYTES = 8  # of moments, a trained parameter
GONE = (
    "the moments of this optimizer went with the engine that is closed: make a new optimizer, and load into it what "
    "state_dict() gave before close(), or use systems.load_checkpoint"
)
COPY = (
    "the moments of this optimizer are with the engine, and a copy of it, or what torch.save and pickle write, would have "
    "none: optimizer.state_dict() has them"
)
_MARK = "_engine_states"


class AdamMoments(TrainingState, Protocol):
    """An engine's state between two steps."""

    control: StepControl

    def write_moments(self, parameter: int, exp_avg: torch.Tensor, exp_avg_sq: torch.Tensor) -> None:
        """In the parameter's shape, fp32 on the CPU."""


class _GivenState(NamedTuple):
    """Of one parameter, as it was given."""

    step: int
    exp_avg: torch.Tensor
    exp_avg_sq: torch.Tensor


class OptimizerStates:
    """parameters: the model's, in index order, as the optimizer knows them.

    UnsupportedError for an optimizer that has a state which no engine can take over.
    """

    def __init__(self, optimizer: torch.optim.Optimizer, index: ModelIndex, parameters: Sequence[torch.nn.Parameter]) -> None:
        before = vars(optimizer).get(_MARK)
        if before is not None:
            if before._state is not None:
                raise UnsupportedError("the optimizer is with an engine that is open: close that first, or make a new one")
            before._check_open()
        self._optimizer, self._index = optimizer, index
        self._parameters = list(parameters)
        self._number = {id(p): i for i, p in enumerate(parameters)}
        self._state: Callable[[str], AdamMoments] | None = None
        self._room: Callable[[int], int] = _none
        self._ranks: Ranks = SingleRank()
        self._used = False
        self._loading: dict[int, _GivenState] = {}
        self._handles: list[Any] = []
        found = {self._number.get(id(p)): entry for p, entry in optimizer.state.items() if entry}
        self._found = self._checked(found.items(), "the optimizer")

    def attach(self, state: Callable[[str], AdamMoments], room: Callable[[int], int], ranks: Ranks) -> None:
        """The engine is there: it gets the state that the optimizer has, which then keeps none.

        state: of the engine, called with what it is wanted for; room: bytes of host memory that are
        left, told how many are wanted; ranks: with which all is asked and given alike from now on.
        """
        optimizer = self._optimizer
        before = vars(optimizer).get(_MARK)
        if before is not None:
            before._remove()
        self._state, self._room, self._ranks = state, room, ranks
        _check_alike(ranks, self._index, self._found, "the optimizer")
        with side_by_side(ranks, "the optimizer's state"):
            if self._found:
                moments = state("initialize")
                for number, entry in self._found.items():
                    moments.write_moments(number, _fp32(entry.exp_avg), _fp32(entry.exp_avg_sq))
                    moments.control.updates[number] = entry.step
        self._found = {}
        optimizer.state.clear()
        self._handles = [
            optimizer.register_state_dict_pre_hook(self._fill),
            optimizer.register_state_dict_post_hook(self._empty),
            optimizer.register_load_state_dict_pre_hook(self._take),
            optimizer.register_load_state_dict_post_hook(self._write),
            optimizer.register_step_pre_hook(self._before_step),
        ]
        setattr(optimizer, _MARK, self)
        vars(optimizer)["__getstate__"] = self._refuse_copy

    def end(self, *, used: bool) -> None:
        """The engine closes. An optimizer whose moments are gone says so from then on; another one is torch's again.

        used: there are moments.
        """
        self._state, self._used, self._room, self._found, self._loading = None, used, _none, {}, {}
        if not used:
            self._remove()

    def _remove(self) -> None:
        for handle in self._handles:
            handle.remove()
        self._handles = []
        if vars(self._optimizer).get(_MARK) is self:
            delattr(self._optimizer, _MARK)
            vars(self._optimizer).pop("__getstate__", None)

    def _check_open(self) -> None:
        if self._state is None and self._used:
            raise UnsupportedError(GONE)

    def _refuse_copy(self) -> Any:
        self._check_open()
        raise UnsupportedError(COPY)

    def _before_step(self, optimizer: torch.optim.Optimizer, args: Any, kwargs: Any) -> None:
        self._check_open()

    # ---- out of the engine

    def _fill(self, optimizer: torch.optim.Optimizer) -> None:
        with side_by_side(self._ranks, "optimizer.state_dict()"):
            moments = self._moments("optimizer.state_dict()")
            updates = moments.control.updates
            stepped = [d.index for d in self._index.parameters if d.trainable and updates[d.index]]
            need = BYTES * sum(self._index.parameters[n].numel for n in stepped)
            have = self._room(need)
            if need > have:
                raise BudgetError(
                    f"optimizer.state_dict() needs {format_need(need, have)} of host memory for the moments, "
                    f"{format_size(max(have, 0))} are left of the budget: raise host_memory, or use systems.save_checkpoint, "
                    "which copies one tensor at a time",
                    tier="host",
                    need=need,
                    have=max(have, 0),
                )
        optimizer.state.clear()
        try:
            for number in stepped:
                parts = {part: moments.read(number, part) for part in MOMENTS}
                step = torch.tensor(float(updates[number]), dtype=torch.float32)
                optimizer.state[self._parameters[number]] = {"step": step, **parts}
        except BaseException:
            optimizer.state.clear()
            raise

    def _empty(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        optimizer.state.clear()

    def _moments(self, what: str) -> AdamMoments:
        self._check_open()
        assert self._state is not None
        return self._state(what)

    # ---- into the engine

    def _take(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> dict[str, Any]:
        """What torch is left with has no state. ValueError, and nothing changed, for what the engine cannot take."""
        what = "optimizer.load_state_dict()"
        with side_by_side(self._ranks, what):
            self._moments(what)
            self._loading = {}
            saved = state_dict["param_groups"]
            check_flags(f"{what}: {type(optimizer).__name__}", saved)
            ours, theirs = ([len(group["params"]) for group in groups] for groups in (optimizer.param_groups, saved))
            if ours == theirs:
                ids = chain.from_iterable(group["params"] for group in saved)
                parameters = chain.from_iterable(group["params"] for group in optimizer.param_groups)
                number = {key: self._number[id(p)] for key, p in zip(ids, parameters, strict=True)}
                entries = ((number.get(key), entry) for key, entry in state_dict["state"].items())
                self._loading = self._checked(entries, what)
            elif self._ranks.size > 1:  # else torch says so
                raise ValueError(f"{what} has groups of {theirs} parameters, this optimizer of {ours}: give one of this model")
        _check_alike(self._ranks, self._index, self._loading, what)
        return {**state_dict, "state": {}}

    def _write(self, optimizer: torch.optim.Optimizer) -> None:
        """torch has taken the groups over. A parameter without a state has taken no step. Each rank writes what it has."""
        moments = self._moments("optimizer.load_state_dict()")
        loading, self._loading = self._loading, {}
        control = moments.control
        control.ruin("optimizer.load_state_dict() broke off, so that moments are of two states: load them into a new engine")
        for described in self._index.parameters:
            if not described.trainable:
                continue
            entry = loading.get(described.index)
            if entry is not None:
                moments.write_moments(described.index, _fp32(entry.exp_avg), _fp32(entry.exp_avg_sq))
            elif control.updates[described.index]:
                zero = torch.zeros(()).expand(described.shape)
                moments.write_moments(described.index, zero, zero)
            control.updates[described.index] = 0 if entry is None else entry.step
        control.ruin(None)
        self._moments("optimizer.load_state_dict()")  # waits for the last copy to a device
        optimizer.state.clear()

    def _checked(self, entries: Iterable[tuple[int | None, Any]], what: str) -> dict[int, _GivenState]:
        return {
            described.index: _entry(described.name, described.shape, entry, what)
            for number, entry in entries
            for described in [self._described(number, what)]
        }

    def _described(self, number: int | None, what: str) -> Any:
        if number is None:
            raise UnsupportedError(f"{what} has the state of a parameter that is not the model's: leave it out")
        described = self._index.parameters[number]
        if not described.trainable:
            raise UnsupportedError(
                f"{what} has a state of parameter {described.name}, which is frozen and keeps none: leave it out, or set "
                "requires_grad before initialize"
            )
        return described


def _check_alike(ranks: Ranks, index: ModelIndex, given: Mapping[int, _GivenState], what: str) -> None:
    """UnsupportedError on all ranks where one is given another state than the first."""
    if ranks.size == 1:
        return
    told = ranks.together(what, lambda: {number: _digest(entry) for number, entry in given.items()})
    for rank, theirs in enumerate(told):
        for number in sorted({*told[0], *theirs}):
            if told[0].get(number) != theirs.get(number):
                name = index.parameters[number].name
                raise UnsupportedError(
                    f"{what}: the state of parameter {name} is not the same on ranks 0 and {rank}: give all ranks the same"
                )


def _digest(entry: _GivenState) -> tuple[int, int, int]:
    return entry.step, sum_of_bits(_fp32(entry.exp_avg)), sum_of_bits(_fp32(entry.exp_avg_sq))


def states_of(
    optimizer: torch.optim.Optimizer | None, index: ModelIndex, parameters: Sequence[torch.nn.Parameter]
) -> OptimizerStates | None:
    return None if optimizer is None else OptimizerStates(optimizer, index, parameters)


def _entry(name: str, shape: tuple[int, ...], entry: Any, what: str) -> _GivenState:
    def refuse(problem: str) -> UnsupportedError:
        return UnsupportedError(f"{what}: the state of parameter {name} {problem}")

    if not isinstance(entry, Mapping):
        raise refuse(f"is {type(entry).__name__}: give what torch's AdamW or Adam keeps")
    if "max_exp_avg_sq" in entry:
        raise refuse("has max_exp_avg_sq, of amsgrad=True, which is not supported: leave it off")
    if set(entry) != {"step", *MOMENTS}:
        raise refuse(f"has {', '.join(map(str, entry))}: torch's AdamW and Adam keep step, exp_avg and exp_avg_sq")
    step = float(entry["step"])
    if not (step >= 0 and step.is_integer()):
        raise refuse(f"has the step count {step}: give a whole number of at least 0")
    for part in MOMENTS:
        tensor = entry[part]
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.layout is not torch.strided:
            raise refuse(f"has no dense floating tensor as {part}")
        if tuple(tensor.shape) != tuple(shape):
            raise refuse(f"has {part} of shape {tuple(tensor.shape)}, the parameter's is {tuple(shape)}")
        if not bool(tensor.isfinite().all()):
            raise refuse(f"has a {part} that is not finite")
    if bool((entry["exp_avg_sq"] < 0).any()):
        raise refuse("has a negative exp_avg_sq, which no Adam makes")
    return _GivenState(int(step), entry["exp_avg"].detach(), entry["exp_avg_sq"].detach())


def _none(wanted: int) -> int:
    return 0


def _fp32(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.to("cpu", torch.float32)
