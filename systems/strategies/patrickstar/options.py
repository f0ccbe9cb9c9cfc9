"""What a user may choose, and what PatrickStar tells about its decisions."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType
from typing import Annotated, Any, ClassVar, Literal

from pydantic import BeforeValidator, Field

from systems.planning.policy.options import InputsOptions, StrategyStatistics
from systems.planning.policy.packing import ChunkRange

Variant = Literal["base", "paper", "spongebob", "static-partition", "osc"]
PAPER: Mapping[str, Any] = MappingProxyType({"prefetch": 0, "run_ahead": False, "nonfinite": "skip"})


def _prefetch(given: Any) -> Any:
    return 0 if str(given).strip() == "off" else given


class PatrickStarOptions(ChunkRange, InputsOptions):
    """chunk_min, chunk_max, chunk_step: bytes of the searched sizes of a parameter chunk as computed with (the paper's range
    of 128 to 512 Mi elements in 16 bit is 256MiB to 1GiB, its step 64MiB); unset is a range that suits the model, and, but
    with variant=base, the paper's where a block is as large as its smallest chunk.

    warmup_share: part of the device that chunks may take in the warm-up step; static-partition keeps it for good.
    prefetch: chunks fetched ahead of their use; off (or 0) is the paper's: fetched when needed, compute waits.
    variant: base, this strategy's best; paper, the paper's own rules, which set prefetch, run_ahead and nonfinite; or an
    ablation of the paper's, which is under the same rules but for one. spongebob moves tensors instead of chunks;
    static-partition traces nothing: chunks have a fixed share of the device and go in chunk-list order, as in the warm-up, and
    the optimizer is on the CPU; osc keeps the optimizer chunks on the CPU.
    """

    warmup_share: float = Field(default=0.2, gt=0, le=1)
    prefetch: Annotated[int, BeforeValidator(_prefetch), Field(ge=0)] = 8
    variant: Variant = "base"

    rules: ClassVar[Mapping[str, Mapping[str, Any]]] = MappingProxyType(
        dict.fromkeys(("paper", "spongebob", "static-partition", "osc"), PAPER)
    )

    @property
    def as_published(self) -> bool:
        """The paper's rules hold, all of them or all but one."""
        return self.variant != "base"

    @property
    def traces(self) -> bool:
        """The memory tracer decides how much model data fits."""
        return self.variant != "static-partition"

    @property
    def places_optimizer(self) -> bool:
        """Optimizer chunks may go to the device."""
        return self.variant in ("base", "paper", "spongebob")


class PatrickStarStatistics(StrategyStatistics):
    """Sizes in bytes of one rank's view. None: no step was planned yet.

    chunk_lists: bytes of the four aligned lists, out-of-chunk parameters included. chunk_size_elements, utilization,
    fragmentation: of the chunks at their nominal size, as in table 3, in whole communication groups; num_chunks: of all ranks;
    num_groups: bundles of them, a chunk a rank; num_out_of_chunks: bundles of tied or oversized parameters.
    gradients: where they are on the device; num_ranged: bundles whose gradients have memory of their own.
    model_bytes_per_parameter: of the four lists and those ranges, each byte once. copied_bytes: parameters on the device at
    the start of a step whose host memory is kept beside them.
    margin_bytes, margin_chunks: what the device has left beside all parameters and the highest non-model memory. Positive:
    optimizer chunks (all three lists of one chunk) that it holds; negative: parameter chunks that spill, as in table 4. With
    variant=base more may be on the device than that.
    kept_gradients: bundles whose gradient stays on the device until ADAM, unless it is evicted.
    non_model_bytes: the curve of figure 2, one entry a moment.
    written_back_bytes_per_step: planned, of parameters; gradients that are evicted would go to the host anyway.
    """

    variant: Variant
    chunk_lists: dict[str, int]
    num_chunks: int
    num_groups: int
    chunk_size_elements: int
    chunk_size_bytes: int
    utilization: float
    fragmentation: float
    num_out_of_chunks: int
    num_bundles: int
    warmup_share: float
    gradients: str
    num_ranged: int | None = None
    kept_gradients: int | None = None
    model_bytes_per_parameter: float | None = None
    copied_bytes: int | None = None
    margin_bytes: int | None = None
    margin_chunks: int | None = None
    non_model_peak_bytes: int | None = None
    non_model_bytes: list[int] | None = None
    resident_bundles: int | None = None
    written_back_bytes_per_step: int | None = None
