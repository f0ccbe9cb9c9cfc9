"""What a plan could ask instead: each that is named helps, has the step that is said, and can be asked for as it is written."""

from __future__ import annotations

import json
import shlex
from dataclasses import replace
from typing import Any

import pytest

from harness import cli
from systems import registry
from systems.prediction.alternatives import GAIN, MOST, Alternative, _of_options, alternatives
from systems.prediction.forecast import Forecast, Question, forecast
from systems.prediction.remedies import remedies
from tests.prediction.test_forecast import MIB, STRATEGIES, observations, question

MODEL = "opt-tiny"


def asked(system: str, about: Question, **options: Any) -> tuple[Forecast, list[Alternative]]:
    chosen = registry.get(system)
    given = chosen.Options(**options)
    found = forecast(chosen, given, about, observations(MODEL))
    return found, alternatives(chosen, given, found, observations(MODEL), remedies(chosen, given, found, observations(MODEL)))


QUESTIONS = [
    question(device_memory=64 * MIB, recompute="full"),
    question(device_memory=4 * MIB, batch_size=2, seq_len=16),
    question(device_memory=4 * MIB, batch_size=2, seq_len=16, recompute="full", host_memory=5 * MIB),
    question(device_memory=2 * MIB, batch_size=16),
    question("h200-141g-x2", ranks=2, device_memory=8 * MIB, recompute="full"),
]


@pytest.mark.parametrize("about", QUESTIONS, ids=range(len(QUESTIONS)))
@pytest.mark.parametrize("system", [*STRATEGIES, "resident"])
@pytest.mark.one_in(18)
def test_each_helps_and_has_the_step_that_is_said(system: str, about: Question) -> None:
    found, better = asked(system, about)
    assert len(better) <= MOST
    rates = [one.tokens_per_s for one in better]
    assert rates == sorted(rates, reverse=True)
    assert not found.fits or all(rate > GAIN * found.tokens_per_s for rate in rates)
    chosen = registry.get(system)
    for one in better:
        changed: Any = one.changes
        given = chosen.Options(**one.options)
        instead = forecast(chosen, given, replace(about, **changed), observations(MODEL))
        assert instead.fits and one.changes.keys() | one.options.keys()
        assert (instead.simulation.step_time_s, instead.tokens_per_s) == (one.step_time_s, one.tokens_per_s)


@pytest.mark.long
def test_some_are_found_of_each_kind() -> None:
    named = [one for system in STRATEGIES for about in QUESTIONS for one in asked(system, about)[1]]
    assert {name for one in named for name in (*one.changes, *one.options)} >= {"recompute", "batch_size", "nonfinite"}


def test_at_most_three_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where all that fits counts as help."""
    monkeypatch.setattr("systems.prediction.alternatives.GAIN", 0.0)
    _, better = asked("elixir", QUESTIONS[-1])
    monkeypatch.setattr("systems.prediction.alternatives.MOST", 10)
    _, every = asked("elixir", QUESTIONS[-1])
    assert len(every) > MOST and better == every[:MOST]


def test_nothing_is_named_where_the_device_computes_all_the_time() -> None:
    found, better = asked("resident", question(device_memory=64 << 30, batch_size=4096, seq_len=64))
    assert found.simulation.step_time_s < GAIN * found.simulation.bounds_s["compute"] and better == []


def test_what_a_variant_s_rules_set_is_no_advice() -> None:
    """`nonfinite` cannot be given with it."""
    options = registry.get("h3t").Options
    for variant, ruled in (("paper", True), ("global-offload", False)):
        tried = [given for _, given, _ in _of_options(options(variant=variant), question())]
        assert ({"nonfinite": "stop"} in tried) == (not ruled)


@pytest.mark.parametrize("system", STRATEGIES)
@pytest.mark.one_in(3)
def test_what_may_help_is_an_option_with_another_value(system: str) -> None:
    options = registry.get(system).Options
    may_help: Any = options.may_help  # type: ignore[attr-defined]
    for name, (value, what) in may_help.items():
        assert getattr(options.model_validate({name: value}), name) == value != getattr(options(), name) and what


NORM_BOUND = ("--model", "opt-1.3b", "--set", "num_layers=6", "--batch-size", "4", "--seq-len", "128", "--recompute", "full")


def test_a_plan_names_them_as_they_can_be_asked_for(capsys: pytest.CaptureFixture[str]) -> None:
    """Where the norm is the bound: updates during backward, and more tokens a step."""
    words = ["plan", "--system", "elixir", "--hardware", "h100-80g-x1", *NORM_BOUND, "--device-memory", "2GiB"]
    words += ["--host-memory", "8GiB", "--option", "prefetch=4"]
    assert cli.main(words) == 0
    out, shown = capsys.readouterr()
    told, lines = json.loads(out), " ".join(shown.split())
    instead = told["alternatives"]
    assert {"nonfinite": "stop"} in [one["options"] for one in instead] and 0 < len(instead) <= MOST
    for one in instead:
        step = f"{one['predicted_step_time_s']:.4g} s a step, {one['tokens_per_s']:.4g} tokens/s"
        faster = one["predicted_step_time_s"] < told["plan"]["predicted_step_time_s"]
        assert f"{'faster' if faster else 'more tokens a second'}: {one['what']} (" in lines and step in lines
        assert cli.main(shlex.split(one["command"])[1:]) == 0
        again = json.loads(capsys.readouterr().out)
        assert again["spec"]["option"][0] == "prefetch=4"
        assert again["plan"]["predicted_step_time_s"] == one["predicted_step_time_s"] and again["fits"]


def test_of_all_systems_the_first_is_advised(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--system", "all", "--model", MODEL, "--hardware", "h100-80g-x1", "--device", "cpu", "--recompute", "full"]
    assert cli.main(words) == 0
    out, shown = capsys.readouterr()
    told = json.loads(out)
    first = told["ranking"][0]["system"]
    assert told["alternatives"] and f"{first} could do more:" in shown
    assert all(f"--system {first}" in one["command"] for one in told["alternatives"])


def test_what_does_not_fit_is_told_with_the_step_of_what_would(capsys: pytest.CaptureFixture[str]) -> None:
    words = ["plan", "--system", "elixir", "--model", MODEL, "--hardware", "h100-80g-x1", "--device", "cpu"]
    assert cli.main([*words, "--device-memory", "2MiB", "--batch-size", "32"]) == 1
    out, shown = capsys.readouterr()
    told, lines = json.loads(out), " ".join(shown.split())
    assert told["alternatives"]
    for one in told["alternatives"]:
        assert lines.count(f"would fit: {one['what']} (") == 1
        assert f"{one['predicted_step_time_s']:.4g} s a step, {one['tokens_per_s']:.4g} tokens/s" in lines


def test_what_a_variant_sets_itself_is_no_alternative() -> None:
    def offered(**given: Any) -> set[str]:
        return {name for about in QUESTIONS[:2] for one in asked("patrickstar", about, **given)[1] for name in one.options}

    assert "nonfinite" in offered(run_ahead=False)
    assert "nonfinite" not in offered(variant="paper")
