"""One question asked of several systems, the best answer first."""

from __future__ import annotations

from collections.abc import Iterable

from systems.errors import UnsupportedError
from systems.prediction.forecast import Forecast, Observations, Question, forecast
from systems.system import System


def ranked(systems: Iterable[System], question: Question, observations: Observations) -> tuple[list[Forecast], dict[str, str]]:
    """(forecasts with default options, why the others cannot do it, by name): those that fit by predicted time, then those
    that do not by the device memory they need.
    """
    found: list[Forecast] = []
    refused: dict[str, str] = {}
    for system in systems:
        try:
            found.append(forecast(system, system.Options(), question, observations))
        except UnsupportedError as error:
            refused[system.name] = str(error)
    found.sort(key=lambda f: (not f.fits, f.simulation.step_time_s if f.fits else f.least_device_bytes))
    return found, refused
