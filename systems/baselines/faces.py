"""What the reference and the scripted system say of themselves: Note [Faces] in systems/registry.py."""

from __future__ import annotations

import signal
from typing import Literal

from pydantic import BaseModel, ConfigDict, Field

from systems.face import Abilities, Face
from systems.sizes import Size


class ResidentOptions(BaseModel):
    """resident takes no options."""

    model_config = ConfigDict(extra="forbid", frozen=True)


class DummyOptions(BaseModel):
    """What happens when. Times in seconds; the *_at options name a step, from 1; null is never.

    Where 0 is allowed it stands for initialize.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    step_time_s: float = Field(0.0, ge=0, description="slept in each optimizer step")
    micro_step_time_s: float = Field(0.0, ge=0, description="slept in each micro-batch's backward pass")
    eval_time_s: float = Field(0.0, ge=0, description="slept in each forward pass of a validation batch")
    startup_time_s: float = Field(0.0, ge=0, description="slept in initialize")
    slow_steps: int = Field(0, ge=0, description="the first so many steps take slow_factor times as long")
    slow_factor: float = Field(10.0, gt=0, description="how much longer slow_steps take")
    drain_time_s: float = Field(0.0, ge=0, description="work each step queues in the background and does not wait for")
    bytes_per_step: int = Field(0, ge=0, description="counted as h2d_bytes in each step")
    skip_at: int | None = Field(None, ge=1, description="this step is skipped")
    nan_at: int | None = Field(None, ge=1, description="the loss of this step is NaN")
    diverge_at: int | None = Field(None, ge=1, description="this step says that training diverges")
    oom_at: int | None = Field(None, ge=1, description="this step finds no memory in oom_tier")
    oom_tier: Literal["device", "host", "disk"] = Field("device", description="the memory that oom_at lacks")
    disk_full_at: int | None = Field(None, ge=1, description="this step finds no room in a file, as the system says it")
    crash_at: int | None = Field(None, ge=0, description="this step raises RuntimeError")
    exit_at: int | None = Field(None, ge=0, description="this step ends the process with exit_code, without a word")
    exit_code: int = Field(3, ge=0, le=255, description="the code that exit_at ends with")
    signal_at: int | None = Field(None, ge=0, description="this step sends the process `signal`")
    signal: int = Field(int(signal.SIGKILL), ge=1, le=64, description="the signal that signal_at sends")
    segfault_at: int | None = Field(None, ge=0, description="this step reads a null pointer")
    hang_at: int | None = Field(None, ge=0, description="this step never ends")
    child_at: int | None = Field(None, ge=1, description="this step starts a process that outlives it")
    host_need: Size = Field(0, description="refused if the host budget is smaller")
    refuse: Literal["never", "budget", "unsupported", "unavailable", "missing-package"] = Field(
        "never", description="how initialize refuses"
    )
    rank: int | None = Field(None, ge=0, description="of several ranks the one that all this is of; null is all of them")
    extra_exchange_at: int | None = Field(None, ge=1, description="in this step something is told that other ranks do not")
    odd_statistics: bool = Field(False, description="statistics() holds what no record can hold")


RESIDENT = Face(
    name="resident",
    summary="reference recipe, everything on the device",
    Options=ResidentOptions,
    abilities=Abilities(trace=True, optimizers=True, ranks=True),
)
DUMMY = Face(
    name="dummy",
    summary="scripted times and failures, trains nothing; for testing the harness",
    Options=DummyOptions,
    abilities=Abilities(model=False, ranks=True),
)
