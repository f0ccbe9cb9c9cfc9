"""Which rule a run follows: that of its torch optimizer, or of the hyperparameters it was given; the folder is the registry."""

from __future__ import annotations

import importlib
import math
import pkgutil
from collections.abc import Mapping
from dataclasses import dataclass, fields
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from pydantic import TypeAdapter, ValidationError

import systems.optimizers as folder
from systems.errors import UnsupportedError
from systems.messages import invalid_value, unknown_name
from systems.optimizers.rule import OptimizerRule
from systems.settings import AdamSettings, Hyperparameters, Settings


@dataclass(frozen=True)
class Chosen:
    """moments: see OptimizerRule.moments, of this run's hyperparameters. own: these, where no torch optimizer has them."""

    rule: OptimizerRule
    moments: tuple[str, ...]
    own: Hyperparameters | None

    @property
    def kept(self) -> tuple[str, tuple[str, ...]]:
        """Whose moments a checkpoint has, and which."""
        return self.rule.name, self.moments

    @property
    def described(self) -> str:
        """What ranks must have alike from the beginning."""
        if self.own is None or isinstance(self.own, AdamSettings):  # groups, and Settings.adam, are compared by themselves
            return " with ".join([self.rule.name, *self.moments])
        return repr(self.own)

    def check(self, hyper: Hyperparameters) -> None:
        """UnsupportedError for hyperparameters with other states than the run has memory for."""
        theirs = self.rule.moments(hyper)
        if theirs != self.moments:
            has, wants = (" and ".join(each) or "no state" for each in (self.moments, theirs))
            raise UnsupportedError(
                f"the optimizer keeps {has} of a parameter, and {hyper} asks for {wants}: give all parameter groups the same, "
                "from the beginning"
            )


def hyperparameters(name: str, given: Mapping[str, Any]) -> Hyperparameters:
    """Of the rule of that name. given: by name, values or texts, `0.9,0.99` for two. ValueError says what is allowed."""
    if name not in rules():
        raise ValueError(unknown_name("optimizer", name, rules()))
    kind = rules()[name].hyperparameters
    known = [each.name for each in fields(kind)]
    for key in given:
        if key not in known:
            raise ValueError(unknown_name(f"hyperparameter of {name}", key, known))
    values = {key: value.split(",") if isinstance(value, str) and "," in value else value for key, value in given.items()}
    try:
        found: Hyperparameters = TypeAdapter(kind).validate_python(values)
    except ValidationError as error:
        raise ValueError(invalid_value(error, lambda key, value: f"{key} of {name} {value!r}")) from None
    for key, value in vars(found).items():
        if not all(math.isfinite(number) and number >= 0 for number in (value if isinstance(value, tuple) else (value,))):
            raise ValueError(f"{key} of {name} is {value!r}: give a finite number of at least 0")
    return found


@cache
def rules() -> MappingProxyType[str, OptimizerRule]:
    """All that there are, by name."""
    modules = [importlib.import_module(f"{folder.__name__}.{each.name}") for each in pkgutil.iter_modules(folder.__path__)]
    found = [module.RULE for module in modules if hasattr(module, "RULE")]
    return MappingProxyType({rule.name: rule for rule in sorted(found, key=lambda rule: rule.name)})


def rule_of(optimizer: torch.optim.Optimizer) -> OptimizerRule:
    """UnsupportedError, by name, for one that no rule takes."""
    for rule in rules().values():
        if type(optimizer) in rule.taken:
            return rule
    kinds = sorted(_full_name(kind) for rule in rules().values() for kind in rule.taken)
    raise UnsupportedError(
        f"optimizer {_full_name(type(optimizer))} is not supported: give {', '.join(kinds[:-1])} or {kinds[-1]}, itself and no "
        "subclass, or add its rule (CONTRIBUTING.md)"
    )


def chosen_by(hyper: Hyperparameters) -> Chosen:
    """The rule whose hyperparameters these are."""
    rule = next(each for each in rules().values() if each.hyperparameters is type(hyper))
    return Chosen(rule, rule.moments(hyper), hyper)


def chosen(settings: Settings) -> Chosen:
    """What the settings ask for. UnsupportedError for an optimizer, or groups of one, that no engine can follow."""
    given: Any = settings.adam if settings.optimizer is None else settings.optimizer
    if isinstance(given, Hyperparameters):
        return chosen_by(given)
    if not isinstance(given, torch.optim.Optimizer):
        raise UnsupportedError(f"optimizer is {type(given).__name__}: give a torch.optim.Optimizer over model.parameters()")
    rule = rule_of(given)
    hypers = [rule.read(given, group) for group in given.param_groups]
    found = Chosen(rule, rule.moments(hypers[0]), None)
    for hyper in hypers:
        found.check(hyper)
    return found


def _full_name(kind: type) -> str:
    """As it is imported: torch.optim.SGD is not where it is defined."""
    name = f"torch.optim.{kind.__name__}"
    return name if getattr(torch.optim, kind.__name__, None) is kind else f"{kind.__module__}.{kind.__qualname__}"
