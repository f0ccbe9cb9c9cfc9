"""`harness max-scale` and `max-batch`: which sizes are tried, what bounds them, and what ends a search."""

from __future__ import annotations

import json
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from harness import cli, scale, store
from harness.candidates import Candidates, largest
from harness.likely import largest_planned, likely
from harness.record import Record
from harness.scale import BatchSpec, ScaleSpec
from harness.spec import RunSpec
from harness.stopping import Stop
from models import registry as models_registry
from systems.registry import split_assignments
from tests.harness.test_likeness import run as like_run

Status = Callable[[RunSpec], str]


@given(st.integers(0, 5000), st.integers(1, 5000), st.integers(1, 6000), st.booleans())
def test_the_search_is_exact_and_short(limit: int, first: int, most: int, guessed: bool) -> None:
    """From a guess as short as that is good: two sizes if it is right."""
    tried: list[int] = []

    def fits(number: int) -> bool:
        assert 1 <= number <= most
        assert number not in tried
        tried.append(number)
        return number <= limit

    step = 1 if guessed else min(first, most)
    assert largest(fits, first=first, step=step, most=most) == min(limit, most)
    off = abs(min(limit, most) - min(first, most)) if guessed else max(limit, first)
    assert len(tried) <= 2 * math.log2(max(off, 2)) + 3
    if guessed and off == 0:
        assert len(tried) <= 2


@pytest.fixture
def searched(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Callable[..., Any]:
    """A search whose runs are records that a script makes up. Gives (exit code, what was found, specs tried)."""
    tried: list[RunSpec] = []
    said: list[str] = []

    def go(
        status: Status, *arguments: str, ends_after: int | None = None, record: dict[str, Any] | None = None
    ) -> tuple[int, Any, list[RunSpec]]:
        def launch(spec: RunSpec, *, stop: Stop, **_: Any) -> Record:
            tried.append(spec)
            if ends_after == len(tried):
                stop.number = 2
            found = status(spec)
            tier = "host" if found in ("oom", "refused") else None
            reason = {} if found == "ok" else {"reason": {"message": f"it is {found}", "tier": tier}}
            found = found.removeprefix("unsupported, ")
            return like_run(run_id=f"run-{len(tried):02}", spec=spec, status=found, **reason, **(record or {}))

        monkeypatch.setattr(cli, "launch", launch)
        monkeypatch.setattr(cli, "say_json", said.append)
        code = cli.main([*arguments, "--results", str(tmp_path)])
        return code, json.loads(said[-1]) if said else None, tried

    return go


def layers(spec: RunSpec) -> int:
    return int(split_assignments("set", spec.set)["num_layers"])


LAYERS = ("max-scale", "--system", "dummy", "--model", "opt-tiny", "--device", "cpu")
BATCH = ("max-batch", "--system", "dummy", "--model", "opt-tiny", "--device", "cpu")


def test_layers_are_counted_up_from_the_model_s_own(searched: Callable[..., Any], tmp_path: Path) -> None:
    given = ("--set", "hidden_size=64", "ffn_size=128", "--steps", "5", "--tag", "x")
    code, found, tried = searched(lambda spec: "ok" if layers(spec) <= 11 else "oom", *LAYERS, *given)
    first = models_registry.resolve("opt-tiny").num_layers
    assert code == 0
    assert [layers(spec) for spec in tried][:2] == [first, 2 * first]
    assert all(spec.set[:2] == ("hidden_size=64", "ffn_size=128") for spec in tried)
    assert {(spec.steps, spec.tag, spec.repeat) for spec in tried} == {(5, "x", 1)}
    assert (found["largest"]["number"], found["smallest_too_large"]["number"]) == (11, 12)
    assert (found["searched"], found["bounded_by"]) == ("layers", "host")
    assert [trial["run_id"] for trial in found["trials"]] == [r.run_id for r in store.read_all(tmp_path)[0]]


def test_a_family_is_tried_by_its_named_sizes(searched: Callable[..., Any]) -> None:
    sizes = {size.name: models_registry.parameter_count(size) for size in models_registry.families()["opt"].sizes}
    arguments = ("max-scale", "--system", "dummy", "--family", "opt", "--device", "cpu")
    code, found, tried = searched(lambda spec: "ok" if sizes[spec.model] < 7e9 else "refused", *arguments)
    assert code == 0
    assert found["largest"]["model"] == max((n for n in sizes if sizes[n] < 7e9), key=sizes.__getitem__)
    assert found["smallest_too_large"]["model"] == min((n for n in sizes if sizes[n] >= 7e9), key=sizes.__getitem__)
    assert tried[0].model == min(sizes, key=sizes.__getitem__)
    code, found, _ = searched(lambda spec: "ok", *arguments)
    assert (code, found["bounded_by"], found["largest"]["model"]) == (0, "family", max(sizes, key=sizes.__getitem__))


def test_the_largest_batch(searched: Callable[..., Any]) -> None:
    code, found, tried = searched(lambda spec: "diverged" if (spec.batch_size or 0) <= 6 else "timeout", *BATCH)
    assert (code, [spec.batch_size for spec in tried]) == (0, [1, 2, 4, 8, 6, 7])
    assert (found["largest"]["number"], found["bounded_by"], found["searched"]) == (6, "timeout", "samples")
    code, found, _ = searched(lambda spec: "ok", *BATCH, "--most", "5")
    assert (code, found["largest"]["number"], found["bounded_by"]) == (0, 5, "most")


def test_where_nothing_fits_the_exit_code_says_so(searched: Callable[..., Any]) -> None:
    code, found, tried = searched(lambda spec: "refused", *LAYERS)
    assert (code, found["largest"], found["smallest_too_large"]["number"]) == (1, None, 1)
    assert len(tried) < 6


@pytest.mark.parametrize("status", ["failed", "unavailable", "unsupported, refused"])
def test_what_is_not_a_matter_of_memory_ends_the_search(searched: Callable[..., Any], status: str) -> None:
    code, found, tried = searched(lambda spec: "ok" if (spec.batch_size or 0) < 4 else status, *BATCH)
    assert (code, [spec.batch_size for spec in tried]) == (1, [1, 2, 4])
    assert (found["largest"]["number"], found["bounded_by"]) == (2, None)
    assert found["failed"]["status"] == status.removeprefix("unsupported, ")


def test_steps_that_had_no_plan_yet_say_nothing(searched: Callable[..., Any]) -> None:
    counters = {"timed_counters": {"steps_without_plan": 1}}
    code, found, tried = searched(lambda spec: "ok", *BATCH, record=counters)
    assert (code, len(tried), found["bounded_by"]) == (1, 1, None)
    assert "raise --steps" in found["failed"]["message"]


def test_a_signal_ends_the_search_and_what_was_found_is_told(searched: Callable[..., Any]) -> None:
    code, found, tried = searched(lambda spec: "ok", *BATCH, ends_after=3)
    assert (code, len(tried), found["largest"]["number"], found["bounded_by"]) == (130, 3, 2, None)


@pytest.mark.parametrize(("limit", "ends_after", "said"), [(4, 5, "largest seen to train"), (0, 2, "nothing was seen")])
def test_an_ended_search_does_not_say_what_bounds_it(
    searched: Callable[..., Any], limit: int, ends_after: int, said: str, capsys: pytest.CaptureFixture[str]
) -> None:
    """Of what did not fit it cannot say that it is the next size, nor that nothing smaller fits."""
    given = BATCH if limit else LAYERS
    size = (lambda spec: spec.batch_size) if limit else layers
    code, found, _ = searched(lambda spec: "ok" if size(spec) <= limit else "oom", *given, ends_after=ends_after)
    assert (code, found["bounded_by"]) == (130, None)
    assert found["smallest_too_large"] is not None
    assert said in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (LAYERS[:3], "give a --model, whose layers are counted up, or a --family"),
        ((*LAYERS, "--family", "opt"), "one of them"),
        ((*LAYERS, "--set", "num_layers=3"), "--set num_layers is what is searched for"),
        (("max-scale", "--system", "dummy", "--family", "otp"), "--family: unknown family 'otp': did you mean opt"),
        (("max-scale", "--system", "dummy", "--model", "opt-tny"), "unknown model 'opt-tny'"),
        ((*BATCH, "--batch-size", "3"), "--batch-size 3: the batch size is what is searched for"),
        ((*BATCH, "--repeat", "2"), "--repeat 2: a size is tried once"),
        ((*BATCH, "--trace", "x.json"), "--trace x.json: it is of one run"),
        ((*BATCH, "--checkpoint", "x"), "--checkpoint x: it is of one run"),
        ((*BATCH, "--most", "0"), "--most 0: input should be greater than or equal to 1"),
        (("max-batch", "--system", "dummy"), "--model is missing"),
        (("max-batch", "--system", "dmmy", "--model", "opt-tiny"), "unknown system 'dmmy': did you mean dummy?"),
    ],
)
def test_bad_input_is_one_line(arguments: tuple[str, ...], said: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert cli.main(list(arguments)) == 2
    complaint = capsys.readouterr().err
    assert said in complaint
    assert complaint.count("\n") == 1


def test_the_flags_are_run_s_and_two_more() -> None:
    assert set(ScaleSpec.model_fields) - set(RunSpec.model_fields) == {"family", "most"}
    assert set(BatchSpec.model_fields) - set(RunSpec.model_fields) == {"most"}
    assert Candidates("layers", ScaleSpec(system="x", model="y"), 1, 9).spec(4) == RunSpec(
        system="x", model="y", steps=3, set=("num_layers=4",)
    )


def test_what_the_forecast_says_is_tried_first(searched: Callable[..., Any], monkeypatch: pytest.MonkeyPatch) -> None:
    """And one more; a forecast that is wrong by a few costs a few tries."""
    monkeypatch.setattr(scale, "likely", lambda candidates, stopped: 11)
    _, found, tried = searched(lambda spec: "ok" if layers(spec) <= 11 else "oom", *LAYERS)
    assert [layers(spec) for spec in tried] == [11, 12] and found["largest"]["number"] == 11
    _, found, tried = searched(lambda spec: "ok" if layers(spec) <= 9 else "oom", *LAYERS)
    assert [layers(spec) for spec in tried[2:]] == [11, 10, 8, 9] and found["largest"]["number"] == 9


BATCHES = BatchSpec(
    system="elixir", model="opt-tiny", device="cpu", device_memory=4 << 20, seq_len=128, recompute="full", most=40
)


@pytest.mark.long
def test_what_is_likely_is_what_the_forecast_says_and_is_planned_elsewhere() -> None:
    """In a process of its own; where that dies, or nobody wants the answer, or there is no forecast, nothing is known."""
    samples = Candidates("samples", BATCHES, 1, BATCHES.most)
    found = likely(samples, lambda: False)
    assert found == largest_planned(samples) and found is not None and 1 < found < BATCHES.most
    assert likely(samples, lambda: True) is None
    nothing = Candidates("samples", BATCHES.model_copy(update={"option": ("no_such=1",)}), 1, 9)
    assert likely(nothing, lambda: False) is None
    for system in ("dummy", "no-such-system"):
        assert likely(Candidates("samples", BATCHES.model_copy(update={"system": system}), 1, 9), lambda: False) is None
    assert likely(Candidates("samples", BATCHES.model_copy(update={"ranks": 2}), 1, 9), lambda: False) is None
    tiny = BATCHES.model_copy(update={"device_memory": 1 << 10})
    assert largest_planned(Candidates("samples", tiny, 1, 9)) == 0


@pytest.mark.slow
def test_the_largest_batch_of_a_strategy_in_processes_of_their_own(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    """Two samples fit and a third does not."""
    arguments = ["max-batch", "--system", "elixir", "--model", "opt-tiny", "--device", "cpu", "--device-memory", "2600KiB"]
    code = cli.main([*arguments, "--seq-len", "128", "--recompute", "full", "--most", "3", "--results", str(tmp_path)])
    found = json.loads(capsys.readouterr().out.splitlines()[-1])
    assert code == 0
    assert (found["largest"]["number"], found["smallest_too_large"]["number"]) == (2, 3)
    assert found["bounded_by"] == "device"
    assert found["largest"]["device_peak_bytes"] <= 2600 << 10
    assert [record.status for record in store.read_all(tmp_path)[0]] == ["ok", "ok", "oom"]
