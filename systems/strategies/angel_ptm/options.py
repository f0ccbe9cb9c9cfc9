"""What a user may choose, and what Angel-PTM tells about its decisions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BaseModel, BeforeValidator, ConfigDict, Field, TypeAdapter, ValidationError

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


class AngelPTMOptions(BaseModel):
    """page: bytes of a page of parameters as computed with, rounded up to 256; its master and moments are pages of as many
    elements.

    cache: device memory for optimizer states, whose updates run there; auto takes what no parameter needs in its life-time,
    0 has none. nonfinite: skip waits with all updates for the norm, so that a step with a non-finite gradient changes
    nothing; stop updates during backward and ends the run at one (no clipping then). activations: host has the inputs of
    recomputed blocks wait for backward in host memory.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    page: Annotated[Size, Field(ge=256)] = 4 * MIB
    cache: Annotated[int | Literal["auto"], BeforeValidator(_cache)] = "auto"
    nonfinite: Literal["skip", "stop"] = "skip"
    activations: Literal["device", "host"] = "device"

    for_small_models: ClassVar[Mapping[str, Any]] = MappingProxyType({"page": 1280})  # a tensor takes several


class AngelPTMStatistics(BaseModel):
    """Sizes in bytes of one rank's view. None: no step was planned yet.

    num_shared_pages: pages of two tensors; num_small_pages: pages of one tensor that is smaller than a page. utilization,
    wasted_bytes: of all pages at their nominal size. minimum_bytes: least device memory without activations.
    cache_bytes: optimizer states on the device, optimizer_share_on_device of all trainable parameters. resident: layers on the
    device at the start of a step, moved_at_start of them moved at trigger 0, moved_later in the step; advanced: triggers by
    which phase 2 brought moves forward, all together. fetches, fetched_bytes, evictions: planned per step.
    """

    page_bytes: int
    num_pages: int
    num_shared_pages: int
    num_small_pages: int
    utilization: float
    wasted_bytes: int
    num_layers: int
    minimum_bytes: int
    cache_bytes: int | None = None
    optimizer_share_on_device: float | None = None
    resident: int | None = None
    moved_at_start: int | None = None
    moved_later: int | None = None
    advanced: int | None = None
    fetches_per_step: int | None = None
    fetched_bytes_per_step: int | None = None
    evictions_per_step: int | None = None
