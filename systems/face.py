"""What a system says of itself before anything that takes long is imported: name, summary, options, abilities.

A strategy's module imports no torch, and says it there. A baseline's imports what it trains with, so it has its face from a
module that does not: systems/registry.py reads from its source which.
"""

from __future__ import annotations

from dataclasses import dataclass

from pydantic import BaseModel


@dataclass(frozen=True, kw_only=True)
class Abilities:
    """What some systems can do and others cannot, and what a system needs.

    trace: its engines label their phases for a profile (systems/device/watch/labels.py). phases: they know `phases_s`
    (systems/reports.py).
    disk: optimizer states can be kept in Settings.disk.
    optimizers: it trains with any of systems/optimizers, not with Adam alone.
    ranks: several of them train one model; its system is a RankedSystem.
    model: it runs a model, so that the harness builds one for it.
    package: name by which the outside package that trains is imported; install: the command that brings it.
    """

    trace: bool = False
    phases: bool = False
    disk: bool = False
    optimizers: bool = False
    ranks: bool = False
    model: bool = True
    package: str | None = None
    install: str | None = None

    def __post_init__(self) -> None:
        if self.package is not None and self.install is None:
            object.__setattr__(self, "install", f"pip install {self.package}")


@dataclass(frozen=True, kw_only=True)
class Face:
    """Options: what `--option key=value` is checked against."""

    name: str
    summary: str
    Options: type[BaseModel]
    abilities: Abilities


OF_STRATEGIES = Abilities(trace=True, phases=True, disk=True, optimizers=True, ranks=True)
"""What the substrate can do with any of them."""
