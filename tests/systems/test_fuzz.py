"""Random runs of every strategy beside resident, bit for bit (invariants 1 to 5, 11, 14, 15); `make fuzz` has thousands."""

from __future__ import annotations

import tempfile
from pathlib import Path
from typing import Any, Literal, get_args, get_origin

import pytest
import torch

from systems.substrate.engine import ManagedEngine
from tests.systems.draws import draw
from tests.systems.every import MANAGED, SYSTEMS
from tests.systems.random_loops import check

MORE = range(100, 200)  # in the long tests


def pytest_generate_tests(metafunc: pytest.Metafunc) -> None:
    """--draws and --seed say which; else one of every strategy, and more in the long tests."""
    if "seed" not in metafunc.fixturenames:
        return
    count, first = metafunc.config.getoption("draws"), metafunc.config.getoption("seed")
    if count is None:
        seeds: list[Any] = [*range(len(MANAGED)), *(pytest.param(seed, marks=pytest.mark.slow) for seed in MORE)]
    else:
        seeds = list(range(first, first + count))
    metafunc.parametrize("seed", seeds)


@pytest.mark.filterwarnings("ignore:None of the inputs have requires_grad:UserWarning")  # of a checkpoint at the model's input
@pytest.mark.one_in(3)
def test_a_random_loop_equals_resident(seed: int, record_property: Any) -> None:
    """The properties are for the summary: tests/systems/conftest.py."""
    record_property("strategy", draw(seed).parts[0].system)
    with tempfile.TemporaryDirectory() as folder:  # not one of pytest's, which stay
        record_property("features", check(seed, Path(folder)))


def test_what_is_wrong_is_found_and_says_how_to_see_it_again(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """A last bit of one weight after each step."""
    step, seed = ManagedEngine._finish_step, list(MANAGED).index("random")

    def spoil(engine: ManagedEngine) -> None:
        step(engine)
        with engine.summon(write=True) as values:
            value = next(iter(values.values())).flatten()
            value[0] = torch.nextafter(value[0], torch.tensor(torch.inf))

    monkeypatch.setattr(ManagedEngine, "_finish_step", spoil)
    with pytest.raises(AssertionError) as found:
        check(seed, tmp_path)
    assert any(f"make fuzz SEED={seed} DRAWS=1" in note for note in found.value.__notes__)


def test_a_seed_says_everything_and_seeds_have_all_that_there_is() -> None:
    draws = [draw(seed) for seed in range(1000)]
    assert draws == [draw(seed) for seed in range(1000)]
    assert {drawn.parts[0].system for drawn in draws[: len(MANAGED)]} == set(MANAGED)
    assert {drawn.parts[1].system for drawn in draws if drawn.handover} == set(SYSTEMS)
    assert all(drawn.parts[0].system != drawn.parts[1].system for drawn in draws if drawn.handover)
    features = {feature for drawn in draws for feature in drawn.features}
    assert features == {
        "early updates",
        "inputs on the host",
        "recomputation",
        "clipping",
        "micro-batches",
        "frozen blocks",
        "spare memory",
        "checkpoint",
        "fp32",
        "bf16",
        "fp16",
    }
    for name, system in MANAGED.items():
        of_it = [drawn.parts[0].options for drawn in draws if drawn.parts[0].system == name]
        for option, field in system.Options.model_fields.items():
            if get_origin(field.annotation) is Literal:
                assert {getattr(options, option) for options in of_it} == set(get_args(field.annotation)), (name, option)
