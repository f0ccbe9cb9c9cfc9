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

from systems.checkpoint import SQUARES, SharedState
from systems.errors import BudgetError, UnsupportedError
from systems.optimizers.choice import Chosen
from systems.planning.layout import ModelIndex
from systems.ranks.beginnings import sum_of_bits
from systems.ranks.group_names import REPLICA
from systems.ranks.ranks import Ranks, SingleRank
from systems.ranks.side_by_side import side_by_side
from systems.recipe.step.control import StepControl
from systems.recipe.step.parameter_groups import check_flags
from systems.sizes import format_need, format_size

GONE = (
    "the moments of this optimizer went with the engine that is closed: make a new optimizer, and load into it what "
    "state_dict() gave before close(), or use systems.load_checkpoint"
)
COPY = (
    "the moments of this optimizer are with the engine, and a copy of it, or what torch.save and pickle write, would have "
    "none: optimizer.state_dict() has them"
)
_MARK = "_engine_states"


class WrittenState(SharedState, Protocol):
    """An engine's state between two steps."""

    control: StepControl

    def write_moments(self, parameter: int, moments: Sequence[torch.Tensor]) -> None:
        """Each in the parameter's shape, fp32 on the CPU."""


class _GivenState(NamedTuple):
    """Of one parameter, as it was given."""

    step: int
    moments: tuple[torch.Tensor, ...]


class OptimizerStates:
    """parameters: the model's, in index order, as the optimizer knows them.

    UnsupportedError for an optimizer that has a state which no engine can take over.
    """

    def __init__(
        self,
        optimizer: torch.optim.Optimizer,
        chosen: Chosen,
        index: ModelIndex,
        parameters: Sequence[torch.nn.Parameter],
    ) -> None:
        before = vars(optimizer).get(_MARK)
        if before is not None:
            if before._state is not None:
                raise UnsupportedError("the optimizer is with an engine that is open: close that first, or make a new one")
            before._check_open()
        self._optimizer, self._chosen, self._index = optimizer, chosen, index
        self._parameters = list(parameters)
        self._number = {id(p): i for i, p in enumerate(parameters)}
        self._state: Callable[[str], WrittenState] | None = None
        self._room: Callable[[int], int] = _none
        self._ranks: Ranks = SingleRank()
        self._used = False
        self._loading: dict[int, _GivenState] = {}
        self._handles: list[Any] = []
        found = ((self._number.get(id(p)), entry) for p, entry in optimizer.state.items())
        self._found = self._checked(found, "the optimizer")

    def attach(self, state: Callable[[str], WrittenState], room: Callable[[int], int], ranks: Ranks) -> None:
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
                    moments.write_moments(number, _fp32(entry.moments))
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
            need = 4 * len(self._chosen.moments) * sum(self._index.parameters[n].numel for n in stepped)
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
        mine, ranks = frozenset(stepped), self._ranks
        if ranks.expert_ranks > 1:  # experts that only others have may have stepped there, and all read alike
            stepped = sorted(set().union(*ranks.exchange("optimizer.state_dict()", stepped)))
        try:
            for number in stepped:
                parts = {part: moments.read(number, part) for part in self._chosen.moments}
                if number not in mine:
                    continue
                if self._chosen.rule.counted:
                    parts = {"step": torch.tensor(float(updates[number]), dtype=torch.float32), **parts}
                if parts:
                    optimizer.state[self._parameters[number]] = parts
        except BaseException:
            optimizer.state.clear()
            raise

    def _empty(self, optimizer: torch.optim.Optimizer, state_dict: dict[str, Any]) -> None:
        optimizer.state.clear()

    def _moments(self, what: str) -> WrittenState:
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
                moments.write_moments(described.index, _fp32(entry.moments))
            elif control.updates[described.index]:
                zero = torch.zeros(()).expand(described.shape)
                moments.write_moments(described.index, [zero] * len(self._chosen.moments))
            control.updates[described.index] = 0 if entry is None else entry.step
        control.ruin(None)
        self._moments("optimizer.load_state_dict()")  # waits for the last copy to a device
        optimizer.state.clear()

    def _checked(self, entries: Iterable[tuple[int | None, Any]], what: str) -> dict[int, _GivenState]:
        return {
            described.index: _entry(self._chosen, described.name, described.shape, entry, what)
            for number, entry in entries
            if not _is_none(entry)
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
            described = index.parameters[number]
            first = rank % ranks.expert_ranks if described.group == REPLICA else 0
            if told[first].get(number) != theirs.get(number):
                raise UnsupportedError(
                    f"{what}: the state of parameter {described.name} is not the same on ranks {first} and {rank}: give all "
                    "ranks the same"
                )


def _digest(entry: _GivenState) -> tuple[int, ...]:
    return entry.step, *map(sum_of_bits, _fp32(entry.moments))


def states_of(
    optimizer: object, chosen: Chosen, index: ModelIndex, parameters: Sequence[torch.nn.Parameter]
) -> OptimizerStates | None:
    """None where no torch optimizer is followed."""
    if not isinstance(optimizer, torch.optim.Optimizer):
        return None
    return OptimizerStates(optimizer, chosen, index, parameters)


def _is_none(entry: Any) -> bool:
    """Of a parameter that was never updated, or whose optimizer keeps nothing of it."""
    return isinstance(entry, Mapping) and all(value is None for value in entry.values())


def _entry(chosen: Chosen, name: str, shape: tuple[int, ...], entry: Any, what: str) -> _GivenState:
    def refuse(problem: str) -> UnsupportedError:
        return UnsupportedError(f"{what}: the state of parameter {name} {problem}")

    if not isinstance(entry, Mapping):
        raise refuse(f"is {type(entry).__name__}: give what {_kinds(chosen, 'or')} keeps")
    if "max_exp_avg_sq" in entry:
        raise refuse("has max_exp_avg_sq, of amsgrad=True, which is not supported: leave it off")
    kept = [*["step"][: chosen.rule.counted], *chosen.moments]
    if set(entry) != set(kept):
        verb = "keeps" if len(chosen.rule.taken) == 1 else "keep"
        raise refuse(f"has {', '.join(map(str, entry))}: {_kinds(chosen, 'and')} {verb} {_listed(kept, 'and') or 'none here'}")
    step = float(entry.get("step", 1))  # one that is not counted was taken, for there is a state
    if not (step >= 0 and step.is_integer()):
        raise refuse(f"has the step count {step}: give a whole number of at least 0")
    for part in chosen.moments:
        tensor = entry[part]
        if not isinstance(tensor, torch.Tensor) or not tensor.is_floating_point() or tensor.layout is not torch.strided:
            raise refuse(f"has no dense floating tensor as {part}")
        if tuple(tensor.shape) != tuple(shape):
            raise refuse(f"has {part} of shape {tuple(tensor.shape)}, the parameter's is {tuple(shape)}")
        if not bool(tensor.isfinite().all()):
            raise refuse(f"has a {part} that is not finite")
        if part == SQUARES and bool((tensor < 0).any()):
            raise refuse(f"has a negative {part}, which no Adam makes")
    return _GivenState(int(step), tuple(entry[part].detach() for part in chosen.moments))


def _kinds(chosen: Chosen, word: str) -> str:
    whose = "torch's " if chosen.rule.taken[0].__module__.startswith("torch.") else ""
    return whose + _listed([kind.__name__ for kind in chosen.rule.taken], word)


def _listed(names: Sequence[str], word: str) -> str:
    return f" {word} ".join([each for each in (", ".join(names[:-1]), *names[-1:]) if each])


def _none(wanted: int) -> int:
    return 0


def _fp32(moments: Sequence[torch.Tensor]) -> list[torch.Tensor]:
    return [each.to("cpu", torch.float32) for each in moments]
