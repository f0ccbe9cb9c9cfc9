"""What a simulated step can be limited by, in words: the names of Simulation.bounds_s."""

from __future__ import annotations

from collections.abc import Mapping
from types import MappingProxyType

LIMITS: Mapping[str, str] = MappingProxyType(
    {
        "compute": "what the device computes: matrix products, and the rest at its own DRAM's rate",
        "host-dram": "the host's DRAM, which CPU Adam and copies share",
        "cpu-adam": "CPU Adam",
        "pcie": "copies between host and device",
        "disk": "the disk, through which optimizer states go twice a step",
        "link": "collectives between the devices",
        "issue": "the host, which handles unit events and issues operations",
        "norm": "updates on the host that wait for the norm: they lie between a backward and the next forward's end",
    }
)
