"""Options and statistics that every strategy has: a strategy's own derive from these, and their texts say what is its own."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Any, ClassVar, Literal, Self

from pydantic import BaseModel, ConfigDict, model_validator

from systems.planning.strategy import TO_WAIT


class StrategyOptions(BaseModel):
    """nonfinite: with skip a step with a non-finite gradient changes nothing; stop updates during backward and ends the run at
    one (no clipping then). run_ahead: with skip, host memory to spare lets updates run ahead of the norm, as many as make the
    step shorter, with the same results; without, and false, all of them wait for it. reduction: how gradients are summed over
    ranks; ordered adds in rank order, in fp32, with the same results everywhere; native is NCCL's own sum, which is faster.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    nonfinite: Literal["skip", "stop"] = "skip"
    run_ahead: bool = True
    reduction: Literal["ordered", "native"] = "ordered"

    may_help: ClassVar[Mapping[str, tuple[Any, str]]] = MappingProxyType(
        {
            "nonfinite": ("stop", "a step that is not finite ends the run"),
            "reduction": ("native", "sums depend on the number of ranks"),
        }
    )
    """Options by name: a value that shortens some models' steps, or makes them fit, and what it costs. A plan tries them."""
    rules: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType({})
    """By value of `variant`, where a strategy has several: the options that it sets, which cannot be given otherwise."""

    @property
    def to_wait(self) -> str:
        """What to change for updates that wait for the norm, in words of arguments: where the variant has stop, that."""
        if self.rules.get(str(getattr(self, "variant", None)), {}).get("nonfinite") != "stop":
            return TO_WAIT
        return f"`options=dict(variant={type(self).model_fields['variant'].default!r})`"

    @model_validator(mode="before")
    @classmethod
    def _set_by_variant(cls, given: Any) -> Any:
        """What is not given is as the variant has it."""
        return {**cls.rules.get(str(given.get("variant")), {}), **given} if isinstance(given, Mapping) else given

    @model_validator(mode="after")
    def _as_the_variant_has_it(self) -> Self:
        variant = str(getattr(self, "variant", None))
        for name, value in self.rules.get(variant, {}).items():
            if getattr(self, name) != value:
                raise ValueError(f"variant={variant} has {name}={value}, {getattr(self, name)} is given: leave {name} out")
        return self


class InputsOptions(StrategyOptions):
    """activations: host has the inputs of recomputed blocks wait for backward in host memory."""

    activations: Literal["device", "host"] = "device"

    may_help: ClassVar[Mapping[str, tuple[Any, str]]] = MappingProxyType(
        {**StrategyOptions.may_help, "activations": ("host", "inputs of recomputed blocks wait in host memory")}
    )


class StrategyStatistics(BaseModel):
    """None: no step was planned yet. Filled in by `StrategyBase` from the plan.

    minimum_bytes: least device memory without activations. optimizer_share_on_device: of all trainable parameters. fetches,
    fetched_bytes, evictions (written back or not): planned per step.
    """

    model_config = ConfigDict(extra="forbid")

    minimum_bytes: int
    optimizer_share_on_device: float | None = None
    fetches_per_step: int | None = None
    fetched_bytes_per_step: int | None = None
    evictions_per_step: int | None = None
