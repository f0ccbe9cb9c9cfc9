"""What a user asks of `harness profile`. Nothing here imports torch, so bad input is told at once."""

from __future__ import annotations

from pydantic import BaseModel, ConfigDict, Field

from harness.spec import Device


class ProfileSpec(BaseModel):
    """Measure this machine's roofs into a hardware profile. The last line on stdout is the profile."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    out: str | None = Field(None, description="file to write the profile to; one that is there is never overwritten")
    device: Device | None = Field(None, description="cuda, or cpu for the host's part alone; default: cuda if there is one")
    disk: str | None = Field(None, description="folder on the disk to measure; default: no disk")
    like: str | None = Field(None, description="profile whose device stands for the one that is not here; default: none")
    ranks: int | None = Field(None, ge=2, le=64, description="processes whose collectives to measure; default: none")
