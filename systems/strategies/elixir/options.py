"""What a user may choose, and what Elixir tells about its decisions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal, Self

from pydantic import BeforeValidator, Field, TypeAdapter, ValidationError, model_validator

from systems.planning.policy.options import InputsOptions, StrategyStatistics
from systems.planning.policy.packing import ChunkRange
from systems.sizes import SizeOrUnlimited

PAPER_CACHE = 2 << 30  # bytes: "users can set the size of the R cache to 1-2GB" ("Experimental Results")

_SIZE_OR_UNLIMITED: TypeAdapter[int | None] = TypeAdapter(SizeOrUnlimited)
_SWITCH: TypeAdapter[bool] = TypeAdapter(bool)


def _cache(given: Any) -> int | Literal["auto"] | None:
    return "auto" if given == "auto" else _SIZE_OR_UNLIMITED.validate_python(given)


def _is_off(given: Any) -> bool:
    try:
        return not _SWITCH.validate_python(given)
    except ValidationError:  # what is none is told as its field is looked at
        return False


class ElixirOptions(ChunkRange, InputsOptions):
    """chunk_min, chunk_max, chunk_step: bytes of the searched chunk sizes; unset is a range that suits the model.

    cache: bytes of the R cache (C_SIZE), parameters of all movable bundles on the device together, and with variant paper their
    gradients; auto takes what is left, inf sets no limit of its own. scatter (S_FLAG): chunks are split over ranks; of several,
    false goes without offload alone. offload (O_FLAG): chunks may live on the host; without it each of several ranks has its
    shards on the device.
    prefetch: bundles fetched ahead of their use, 0 for none. variant: master-shard is the default, and what is best here;
    write-back has no master shard on the host, so that an eviction writes 2 bytes a parameter; paper keeps to the paper's rules
    (see the package), has master shards too, and a cache of a constant size: 2GiB unless it is given.
    """

    cache: Annotated[int | Literal["auto"] | None, BeforeValidator(_cache)] = "auto"
    scatter: bool = True
    offload: bool = True
    prefetch: int = Field(default=8, ge=0)
    variant: Literal["master-shard", "write-back", "paper"] = "master-shard"

    may_help: ClassVar[Mapping[str, tuple[Any, str]]] = MappingProxyType(
        {**InputsOptions.may_help, "offload": (False, "each rank has its shards on the device")}
    )
    rules: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        {"paper": {"prefetch": 0, "run_ahead": False, "nonfinite": "skip", "activations": "device"}}
    )

    @model_validator(mode="before")
    @classmethod
    def _constant_cache(cls, given: Any) -> Any:
        """C where `paper` is not told: without scatter and offload it is all, as [False, False, inf] has it."""
        if not isinstance(given, Mapping) or given.get("variant") != "paper" or "cache" in given:
            return given
        whole = all(map(_is_off, (given.get("scatter"), given.get("offload"))))
        return {**given, "cache": "inf" if whole else PAPER_CACHE}

    @model_validator(mode="after")
    def _cache_of_paper(self) -> Self:
        if self.keeps_to_paper and self.cache == "auto":
            raise ValueError("variant=paper has a cache of a constant size, cache=auto is given: give bytes, as 2GiB, or inf")
        return self

    @property
    def keeps_to_paper(self) -> bool:
        return self.variant == "paper"


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
