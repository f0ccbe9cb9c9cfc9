"""What a user may choose, and what Angel-PTM tells about its decisions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError

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
    """

    page: Annotated[Size, Field(ge=256)] = 4 * MIB
    cache: Annotated[int | Literal["auto"], BeforeValidator(_cache)] = "auto"
    variant: Literal["base", "paper"] = "base"

    rules: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {"paper": {"cache": "auto", "nonfinite": "stop", "run_ahead": False}}
    )
    for_small_models: ClassVar[Mapping[str, Any]] = MappingProxyType({"page": 1280})  # a tensor takes several


class AngelPTMStatistics(StrategyStatistics):
    """Sizes in bytes of one rank's view. None: no step was planned yet.

    num_shared_pages: pages of two tensors; num_small_pages: pages of one tensor that is smaller than a page. utilization,
    wasted_bytes: of all pages at their nominal size. cache_bytes: optimizer states on the device. resident: layers on the
    device at the start of a step, moved_at_start of them moved at trigger 0, moved_later in the step; advanced: triggers by
    which phase 2 brought moves forward, all together. On several ranks moves are those of pages from the host, each layer is
    gathered besides (fetches_per_step), and gathers are advanced.
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
