"""Wrong names in a request, found before anything that takes long is imported and before any process is started."""

from __future__ import annotations

from collections.abc import Sequence

from harness.plan_spec import ALL, PlanSpec
from harness.spec import BadInputError, RunSpec
from models import registry as models_registry
from systems import registry
from systems.errors import UnavailableError
from systems.messages import unknown_name
from systems.planning import hardware


def check_run(spec: RunSpec) -> None:
    """Of its system, that one's options, and its model. Raises BadInputError."""
    check_system(spec.system, spec.option)
    if spec.model is not None:  # a search over a family has none
        check_model(spec.model, spec.set)


def check_plan(spec: PlanSpec) -> None:
    """The same, and of the hardware."""
    if spec.system != ALL:
        check_system(spec.system, spec.option)
    check_model(spec.model, spec.set)
    try:
        hardware.load(spec.hardware)
    except ValueError as error:
        raise BadInputError(f"--hardware: {error}") from None


def check_system(name: str, options: Sequence[str]) -> None:
    """One that does not load is no wrong name: its run says so."""
    known = registry.find()
    if name not in known:
        raise BadInputError(unknown_name("system", name, known))
    if not options:
        return
    try:
        registry.parse_options(registry.face(name, known), options)
    except UnavailableError:
        return
    except ValueError as error:
        raise BadInputError(str(error)) from None


def check_model(name: str, changes: Sequence[str]) -> None:
    """A user's own, which has to be looked at or called, is left to the run."""
    if models_registry.is_external(name):
        return
    try:
        models_registry.resolve(name, registry.split_assignments("set", changes))
    except ValueError as error:
        raise BadInputError(str(error)) from None


def check_family(name: str) -> None:
    known = models_registry.families()
    if name not in known:
        raise BadInputError(f"--family: {unknown_name('family', name, known)}")
