"""What a user may choose, and what Elixir tells about its decisions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field, TypeAdapter

from systems.planning.policy.options import InputsOptions, StrategyStatistics
from systems.planning.policy.packing import ChunkRange
from systems.sizes import SizeOrUnlimited

_SIZE_OR_UNLIMITED: TypeAdapter[int | None] = TypeAdapter(SizeOrUnlimited)


def _cache(given: Any) -> int | Literal["auto"] | None:
    return "auto" if given == "auto" else _SIZE_OR_UNLIMITED.validate_python(given)


class ElixirOptions(ChunkRange, InputsOptions):
    """chunk_min, chunk_max, chunk_step: bytes of the searched chunk sizes; unset is a range that suits the model.

    cache: bytes of the R cache (C_SIZE), all movable bundles on the device together; auto takes what is left, inf sets
    no limit of its own. scatter (S_FLAG): chunks are split over ranks; of several, false goes without offload alone. offload
    (O_FLAG): chunks may live on the host; without it each of several ranks has its shards on the device.
    prefetch: bundles fetched ahead of their use, 0 for none. variant: write-back has no master shard on the host, so
    that an eviction writes 2 bytes a parameter.
    """

    cache: Annotated[int | Literal["auto"] | None, BeforeValidator(_cache)] = "auto"
    scatter: bool = True
    offload: bool = True
    prefetch: int = Field(default=8, ge=0)
    variant: Literal["master-shard", "write-back"] = "master-shard"

    may_help: ClassVar[Mapping[str, tuple[Any, str]]] = MappingProxyType(
        {**InputsOptions.may_help, "offload": (False, "each rank has its shards on the device")}
    )


class ElixirStatistics(StrategyStatistics):
    """Sizes in bytes of one rank's view. None: no step was planned yet.

    num_chunks counts chunks of the searched size; num_private bundles of tied or oversized parameters, num_fused small
    groups fused for good. utilization and wasted_bytes are of the chunks at their nominal size. resident: bundles on the
    device at the start of a step.
    """

    num_chunks: int
    chunk_size_bytes: int
    utilization: float
    wasted_bytes: int
    num_private: int
    num_fused: int
    num_bundles: int
    cache_bytes: int | None = None
    resident_bundles: int | None = None
