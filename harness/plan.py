"""`harness plan`: will it fit, and how fast, on hardware that need not be here. Trains nothing and needs no GPU.

The last line on stdout is one JSON object with the `spec` and `plan` of a run's record, and what was found beside them.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import asdict
from functools import cache, partial
from pathlib import Path
from typing import Any

from harness import trace
from harness.availability import load
from harness.command import command
from harness.optimizer import hyperparameters_of
from harness.output import result_console, say_json, waiting
from harness.plan_spec import ALL, PlanSpec
from harness.plan_table import show, show_ranking, show_rules
from harness.request import of_rank
from harness.spec import BadInputError, in_flags
from models import registry as models_registry
from models.loss import token_loss
from models.mixture_shape import divided_among
from models.shape import ModelShape
from systems import registry
from systems.errors import UnavailableError, UnsupportedError
from systems.optimizers.choice import chosen_by
from systems.planning import hardware
from systems.planning.allowance import CUDA, EXACT
from systems.planning.clock.perfetto import to_json
from systems.prediction.alternatives import OF_WORK, Alternative, alternatives
from systems.prediction.forecast import Forecast, Observations, Question, forecast
from systems.prediction.memory_rules import RULE, RuledNeed, ruled_needs
from systems.prediction.meta_step import Unfilled
from systems.prediction.needs import TierNeed
from systems.prediction.policies import left_out
from systems.prediction.ranking import ranked
from systems.prediction.remedies import LAYERS, Depths, DiskRoom, Remedy, remedies
from systems.system import System

FITS, DOES_NOT_FIT = 0, 1


def plan(spec: PlanSpec) -> int:
    """The exit code: 0 if it fits (of several systems, if one does), 1 if not. Raises BadInputError."""
    if spec.trace is not None:
        trace.prepare(Path(spec.trace))
    try:
        question, observations = question_of(spec)
        return _plan_all(spec, question, observations) if spec.system == ALL else _plan_one(spec, question, observations)
    except UnavailableError as error:
        raise BadInputError(str(error)) from None
    except ValueError as error:
        raise error if isinstance(error, BadInputError) else BadInputError(str(error)) from None


def observations_of(shape: ModelShape) -> Observations:
    with Unfilled():
        model = models_registry.build(shape)
    return Observations(model, partial(token_loss, objective=shape.objective))


def question_of(
    spec: PlanSpec, observed: Callable[[ModelShape], Observations] = observations_of
) -> tuple[Question, Observations]:
    """What is asked about, and the model it is asked of. observed: for who asks more than once of one shape."""
    profile = hardware.load(spec.hardware)
    shape = models_registry.resolve(spec.model, registry.split_assignments("set", spec.set))
    batch_size, seq_len = spec.batch_size or shape.batch_size, spec.seq_len or shape.seq_len
    shape.check_run(batch_size=batch_size, seq_len=seq_len)
    shape = of_rank(shape, 0, spec.ranks or profile.devices)
    question = Question(
        profile=profile,
        device_memory=profile.device_memory_bytes.value if spec.device_memory is None else spec.device_memory,
        host_memory=profile.host_memory_bytes.value if spec.host_memory is None else spec.host_memory,
        ranks=spec.ranks or profile.devices,
        batch_size=batch_size,
        seq_len=seq_len,
        dtype=spec.dtype,
        accumulate=spec.accumulate,
        recompute=spec.recompute,
        clip=spec.clip,
        seed=spec.seed,
        allowance=EXACT if spec.device == "cpu" else CUDA,
        disk_memory=_disk_memory(spec, profile),
        moments=chosen_by(hyperparameters_of(spec)).moments,
        expert_ranks=divided_among(shape),
    )
    return question, observed(shape)


def depths_of(spec: PlanSpec) -> Depths:
    """The same model with fewer layers, each built and observed once."""
    given = registry.split_assignments("set", spec.set)

    @cache
    def at(layers: int) -> Observations:
        return observations_of(models_registry.resolve(spec.model, given | {LAYERS: str(layers)}))

    return Depths(models_registry.resolve(spec.model, given).num_layers, at)


def _disk_memory(spec: PlanSpec, profile: hardware.HardwareProfile) -> int:
    """Of a node, 0 where no disk is asked for."""
    if spec.disk is None and spec.disk_memory is None:
        return 0
    if profile.disk_bytes is None:
        raise BadInputError(f"--disk: the profile {spec.hardware} has no disk: leave it out, or name a profile with one")
    return profile.disk_bytes.value if spec.disk_memory is None else spec.disk_memory


def _plan_one(spec: PlanSpec, question: Question, observations: Observations) -> int:
    system = load(spec.system)
    options = registry.parse_options(system, spec.option)
    if question.disk_memory and not system.abilities.disk:
        raise BadInputError(f"--disk: {spec.system} keeps no states on a disk: use one of this project's own strategies")
    console = result_console()
    try:
        with waiting(f"planning {spec.model} under {system.name}"):
            found = forecast(system, options, question, observations)
    except UnsupportedError as error:
        console.print(in_flags(str(error)), markup=False)
        say_json(json.dumps({**_asked(spec, question), **_refused(system.name, str(error))}))
        return DOES_NOT_FIT
    with waiting(f"planning what else {system.name} could do"):
        helpful = list(remedies(system, options, found, observations, depths=depths_of(spec), disk=_room(system, question)))
        better = alternatives(system, options, found, observations, helpful)
    show(found, helpful, better, console, title=_title(spec, question, system.name))
    if spec.trace is not None:
        _write_trace(Path(spec.trace), found)
    told = {**_told(found, spec, helpful), "alternatives": [_instead(one, spec, system.name) for one in better]}
    say_json(json.dumps({**_asked(spec, question), **told}))
    return FITS if found.fits else DOES_NOT_FIT


def _room(system: System, question: Question) -> DiskRoom | None:
    """The profile's disk, under any name."""
    there = question.profile.disk_bytes
    return None if there is None or not system.abilities.disk else DiskRoom("disk", there.value)


def _plan_all(spec: PlanSpec, question: Question, observations: Observations) -> int:
    """Those that fit by predicted time, then those that do not by the device memory they need, then refusals."""
    console = result_console()
    better: list[Alternative] = []
    with waiting(f"planning {spec.model} under every system"):
        found, refused = ranked(registry.planners(), question, observations)
        improved, helpful = (found[0], []) if found and found[0].fits else _nearest(found, observations)
        if improved is not None:
            chosen = registry.get(improved.system)
            better = alternatives(chosen, chosen.Options(), improved, observations, helpful)
        ruled = ruled_needs(question, observations)
    show_ranking(found, refused, improved, helpful, better, console, title=_title(spec, question, "every system"))
    show_rules(ruled, console)
    ranking = [_told(one, spec, helpful if one is improved else []) for one in found] + [
        _refused(name, why) for name, why in refused.items()
    ]
    best = ranking[0] if ranking else _refused(ALL, "no system makes plans")
    instead = [] if improved is None else [_instead(one, spec, improved.system) for one in better]
    told = {**best, "alternatives": instead, "ranking": ranking}
    told["memory_rules"] = [_ruled(one) for one in ruled]
    say_json(json.dumps({**_asked(spec, question), **told}))
    return FITS if any(one.fits for one in found) else DOES_NOT_FIT


def _nearest(found: Sequence[Forecast], observations: Observations) -> tuple[Forecast | None, list[Remedy]]:
    """Where none fits: the fastest that would with other work, else with any other change; and the changes."""
    first: tuple[Forecast | None, list[Remedy]] = (None, [])
    for one in sorted(found, key=lambda each: each.simulation.step_time_s):
        system = registry.get(one.system)
        helpful = list(remedies(system, system.Options(), one, observations, disk=_room(system, one.question)))
        if any(OF_WORK.issuperset(remedy.changes) for remedy in helpful):
            return one, helpful
        if first[0] is None and helpful:
            first = one, helpful
    return first


def _title(spec: PlanSpec, question: Question, system: str) -> str:
    work = f"batch {question.batch_size} x {question.seq_len} tokens"
    if question.accumulate > 1:
        work += f" x {question.accumulate} micro-batches"
    ranks = f"{question.ranks} {'rank' if question.ranks == 1 else 'ranks'} of {spec.hardware}"
    return f"{spec.model} under {system}, {ranks}: {work}, {question.dtype}"


def _write_trace(path: Path, found: Forecast) -> None:
    try:
        trace.write(path, to_json({f"simulated {found.system}": found.simulation.events}))
    except OSError as error:
        raise BadInputError(f"--trace {path}: cannot be written: {error.strerror or error}") from None


def _asked(spec: PlanSpec, question: Question) -> dict[str, Any]:
    resolved = {
        "ranks": question.ranks,
        "batch_size": question.batch_size,
        "seq_len": question.seq_len,
        "tokens_per_step": question.tokens,
        "device_memory": question.device_memory,
        "host_memory": question.host_memory,
        "disk_memory": question.disk_memory,
    }
    return {"spec": spec.model_dump(mode="json"), "resolved": resolved}


def _told(found: Forecast, spec: PlanSpec, helpful: list[Remedy]) -> dict[str, Any]:
    simulation = found.simulation
    return {
        "plan": {
            "predicted_step_time_s": simulation.step_time_s,
            "predicted_device_peak_bytes": found.device_peak_bytes,
        },
        "system": found.system,
        "fits": found.fits,
        "why_not": None if found.why_not is None else in_flags(found.why_not),
        "least_device_bytes": found.least_device_bytes,
        "least_device_host_bytes": found.least_device_host_bytes,
        "tokens_per_s": found.tokens_per_s,
        "bound": simulation.bound,
        "bounds_s": dict(simulation.bounds_s),
        "busy_s": dict(simulation.busy_s),
        "bytes": dict(simulation.bytes),
        "tiers": {tier: _need(need) for tier, need in found.tiers.items()},
        "assumed": list(found.question.profile.assumed),
        "left_out": list(left_out(found.system, found.question.ranks)),
        "ahead": None if found.ahead is None else asdict(found.ahead),
        "statistics": dict(found.statistics),
        "remedies": [
            {"what": r.what, "changes": dict(r.changes), "command": command("plan", spec, r.changes)} for r in helpful
        ],
    }


def _instead(one: Alternative, spec: PlanSpec, system: str) -> dict[str, Any]:
    options = {**registry.split_assignments("option", spec.option), **one.options}
    changes = {**one.changes, "system": system, "option": tuple(f"{name}={value}" for name, value in options.items())}
    return {
        "what": one.what,
        "changes": dict(one.changes),
        "options": dict(one.options),
        "predicted_step_time_s": one.step_time_s,
        "tokens_per_s": one.tokens_per_s,
        "command": command("plan", spec, changes),
    }


def _need(need: TierNeed) -> dict[str, Any]:
    return {
        "need_bytes": need.need_bytes,
        "have_bytes": need.have_bytes,
        "spare_bytes": need.spare_bytes,
        "parts": dict(need.parts),
    }


def _ruled(one: RuledNeed) -> dict[str, Any]:
    tiers = {"device": one.device, "host": one.host}
    return {"system": one.system, "fits": one.fits, "what": RULE, "tiers": {tier: _need(need) for tier, need in tiers.items()}}


def _refused(system: str, why: str) -> dict[str, Any]:
    nothing = {"predicted_step_time_s": None, "predicted_device_peak_bytes": None}
    return {"plan": nothing, "system": system, "fits": False, "why_not": in_flags(why)}
