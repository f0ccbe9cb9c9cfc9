"""What a user asks of `harness plan`: the flags of `run`, and the hardware. Nothing here imports torch."""

from __future__ import annotations

from typing import ClassVar

from pydantic import Field, model_validator

from harness.spec import RunSpec

ALL = "all"


class PlanSpec(RunSpec):
    """Say whether a model fits a machine that need not be here, under a system, and how fast it would train.

    Budgets are the profile's unless given: --device-memory of one device, --host-memory and --disk-memory of one node, where
    --disk (any name) or a budget says that the disk is used. With --device cpu the
    device is the emulated one, whose memory is counted exactly; else a part of it is left to its allocator.
    """

    left_out: ClassVar[frozenset[str]] = frozenset(
        {"steps", "warmup", "lr", "weight_decay", "schedule", "data", "eval_every", "repeat", "timeout", "results", "tag"}
        | {"disk_rate", "checkpoint", "save_every", "resume", "weights", "phases", "wandb"}
    )
    """Flags of a run that would change nothing here."""

    system: str = Field(description="name of a system, or all: every one that makes plans, the fastest that fits first")
    ranks: int | None = Field(None, ge=1, description="data-parallel ranks; default: all devices of the profile")  # type: ignore[assignment]
    hardware: str = Field(description="a hardware profile: a name of `harness ls hardware`, or a path ending in .json")
    trace: str | None = Field(None, description=".json or .json.gz file for the simulated step, to open in ui.perfetto.dev")

    @model_validator(mode="after")
    def _disk_has_a_place(self) -> PlanSpec:
        """A disk that need not be here has no folder."""
        return self

    @model_validator(mode="after")
    def _one_system(self) -> PlanSpec:
        if self.system == ALL and self.option:
            raise ValueError(f"--option {self.option[0]} is of one system: leave it out of --system all")
        if self.system == ALL and self.trace is not None:
            raise ValueError("--trace is of one system: leave it out of --system all")
        return self
