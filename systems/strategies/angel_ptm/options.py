"""What a user may choose, and what Angel-PTM tells about its decisions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, model_validator

from systems.planning.policy.options import InputsOptions, StrategyStatistics
from systems.sizes import Size

MIB = 1 << 20
_SIZE: TypeAdapter[int] = TypeAdapter(Size)


def _cache(given: Any) -> int | Literal["auto"]:
    if given == "auto":
        return "auto"
    try:
        return _SIZE.validate_python(given)
    except ValidationError:
        raise ValueError(f"{given!r} is neither a size (40GiB, 64MiB or plain bytes) nor auto") from None


class AngelPTMOptions(InputsOptions):
    """page: bytes of a page of parameters as computed with, rounded up to 256; its master and moments are pages of as many
    elements.

    It is what moves with variant=paper on one rank; else a layer's pages move together.

    cache: device memory for optimizer states, whose updates run there; auto takes what no parameter needs in its life-time,
    0 has none. variant: base is the fastest; paper is Algorithm 1 as it is printed, with updates as soon as gradients have
    arrived on the host.

    states: with disk all optimizer states have their home there, not only those that the host lacks memory for.
    max_staleness: updates run behind the steps (Algorithm 2), by so many at most, with nonfinite=stop. At 0 each step waits for
    those before it, with the same results as without.
    """

    page: Annotated[Size, Field(ge=256)] = 4 * MIB
    cache: Annotated[int | Literal["auto"], BeforeValidator(_cache)] = "auto"
    states: Literal["host", "disk"] = "host"
    variant: Literal["base", "paper"] = "base"
    max_staleness: Annotated[int, Field(ge=0, le=1_000_000)] | None = None

    rules: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {"paper": {"cache": "auto", "nonfinite": "stop", "run_ahead": False, "max_staleness": None}}
    )
    for_small_models: ClassVar[Mapping[str, Any]] = MappingProxyType({"page": 1280})  # a tensor takes several

    @model_validator(mode="before")
    @classmethod
    def _stops_where_lock_free(cls, given: Any) -> Any:
        """A gradient that is not finite cannot be taken out of a sum."""
        if not isinstance(given, Mapping) or given.get("max_staleness") is None:
            return given
        if given.get("nonfinite", "stop") != "stop":
            raise ValueError(
                f"max_staleness has nonfinite=stop, for no gradient can be taken out of a sum, {given['nonfinite']} is given: "
                "leave nonfinite out"
            )
        return {"nonfinite": "stop", **given}


class AngelPTMStatistics(StrategyStatistics):
    """Sizes in bytes of one rank's view. None: no step was planned yet.

    num_shared_pages: pages of two tensors; num_small_pages: pages of one tensor that is smaller than a page. utilization,
    wasted_bytes: of all pages at their nominal size. cache_bytes: optimizer states on the device. resident: layers on the
    device at the start of a step, moved_at_start of them moved at trigger 0, moved_later in the step; advanced: triggers by
    which phase 2 brought moves forward, all together. On several ranks moves are those of pages from the host, each layer is
    gathered besides (fetches_per_step), and gathers are advanced.
    staleness_max, staleness_mean: of all layers that a step read, how many steps' gradients they lacked; updates_behind: of a
    layer, that ran behind the steps. None without max_staleness.
    """

    variant: Literal["base", "paper"]
    page_bytes: int
    num_pages: int
    num_shared_pages: int
    num_small_pages: int
    utilization: float
    wasted_bytes: int
    num_layers: int
    cache_bytes: int | None = None
    resident: int | None = None
    moved_at_start: int | None = None
    moved_later: int | None = None
    advanced: int | None = None
    staleness_max: int | None = None
    staleness_mean: float | None = None
    updates_behind: int | None = None
