"""The optimizer of a run, as its flags name it: --optimizer, --hyper, --lr and --weight-decay."""

from __future__ import annotations

from dataclasses import fields
from typing import Any

from harness.spec import RunSpec
from systems.optimizers.choice import hyperparameters, rules
from systems.registry import split_assignments
from systems.settings import AdamSettings, Hyperparameters


def hyperparameters_of(spec: RunSpec) -> Hyperparameters:
    """ValueError for an optimizer that there is not, or a hyperparameter that it has not."""
    given: dict[str, Any] = split_assignments("hyper", spec.hyper)
    for name in given.keys() & {"lr", "weight_decay"}:
        raise ValueError(f"--hyper {name}={given[name]}: it has a flag of its own, --{name.replace('_', '-')}")
    rule = rules().get(spec.optimizer)
    decays = rule is None or any(each.name == "weight_decay" for each in fields(rule.hyperparameters))
    return hyperparameters(spec.optimizer, {"lr": spec.lr, **({"weight_decay": spec.weight_decay} if decays else {}), **given})


def as_settings(hyper: Hyperparameters) -> dict[str, Any]:
    """The field of Settings that they belong into."""
    return {"adam" if isinstance(hyper, AdamSettings) else "optimizer": hyper}
