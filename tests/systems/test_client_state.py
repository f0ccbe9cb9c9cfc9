"""What a loop keeps in a checkpoint of its own: it comes back as it was, or is refused by name before anything is written."""

from __future__ import annotations

import json
import math
import warnings
from collections import OrderedDict
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import given as over
from hypothesis import settings as hypothesis_settings
from hypothesis import strategies as st
from safetensors.torch import load_file, save_file

import systems
from systems import checkpoint
from systems.checkpoint import CheckpointError
from systems.checkpoint.client_state import DEEPEST, client_state_of, client_state_tensor
from systems.errors import UnsupportedError
from systems.system import Engine
from tests.systems.running import parameters_of
from tests.systems.test_checkpoint import SYSTEMS, begin, contents, data, rehash, steps_of
from tests.systems.test_ranks_saved import on_ranks, outcomes_of, train

LEAVES = st.none() | st.booleans() | st.integers() | st.floats(allow_nan=False) | st.text()
NESTED = st.recursive(LEAVES, lambda each: st.lists(each) | st.dictionaries(st.text(), each), max_leaves=20)
STATE = {"step": 2, "schedule": {"last_lr": [1e-4], "best": math.inf}, "data": {"epoch": 0, "at": [3, 1]}, "seeds": [1 << 80]}


@over(state=st.dictionaries(st.text(), NESTED))
@hypothesis_settings(deadline=None, max_examples=200)
def test_json_comes_back_as_it_was(state: dict[str, Any]) -> None:
    found = client_state_of(client_state_tensor(state), "it")
    assert found == state and json.dumps(found) == json.dumps(state), "and types are the same"


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.one_in(6)
def test_a_checkpoint_gives_it_back_under_any_system(system: str, tmp_path: Path) -> None:
    for saves, loads in ((system, "resident"), ("resident", system)):
        with begin(saves) as engine:
            steps_of(engine, 0, 1)
            systems.save_checkpoint(engine, tmp_path / "here", client_state=STATE)
        with begin(loads, seed=1) as engine:
            assert systems.load_checkpoint(engine, tmp_path / "here") == STATE
            systems.save_checkpoint(engine, tmp_path / "here")  # the next one has none unless it is given
            assert systems.load_checkpoint(engine, tmp_path / "here") == {}


def test_a_schedule_and_its_groups_go_through_it(tmp_path: Path) -> None:
    """As docs/own-loop.md has it: tuples become lists, which torch takes for betas."""
    state = {"order": OrderedDict(a=(1, 2)), "number": np.float64(0.1), "flag": True}
    with begin("elixir") as engine:
        systems.save_checkpoint(engine, tmp_path / "here", client_state=state)
        found = systems.load_checkpoint(engine, tmp_path / "here")
    assert found == {"order": {"a": [1, 2]}, "number": 0.1, "flag": True} and found["flag"] is True


def circle() -> dict[str, Any]:
    found: dict[str, Any] = {}
    found["again"] = found
    return found


def deep(levels: int) -> dict[str, Any]:
    found: Any = 1
    for _ in range(levels):
        found = [found]
    return {"deep": found}


def doubled(levels: int) -> dict[str, Any]:
    """Each level has the one below it twice: few objects, and JSON of 2**levels."""
    found: Any = [1]
    for _ in range(levels):
        found = [found, found]
    return {"doubled": found}


def chained(levels: int) -> dict[str, Any]:
    """Each is in the next one, and was seen before it."""
    found: list[Any] = [[]]
    for _ in range(levels):
        found.append([found[-1]])
    return {"chained": found}


def optimizer_state() -> dict[str, Any]:
    weight = torch.nn.Parameter(torch.ones(2))
    optimizer = torch.optim.AdamW([weight])
    weight.grad = torch.ones(2)
    optimizer.step()
    return optimizer.state_dict()


REFUSED: list[tuple[str, Any, str]] = [
    ("tensor", {"a": [0, {"b": torch.ones(1)}]}, "client_state['a'][1]['b'] is Tensor, which JSON does not have: give"),
    ("array", {"a": np.ones(2)}, "client_state['a'] is ndarray, which JSON does not have: give .tolist() of it"),
    ("numpy integer", {"a": np.int64(2)}, "client_state['a'] is int64, which JSON does not have: give .tolist() of it"),
    ("bytes", {"a": b"x"}, "client_state['a'] is bytes, which JSON does not have: give numbers, strings"),
    ("set", {"a": {1}}, "client_state['a'] is set"),
    ("object", {"a": Path("x")}, "client_state['a'] is PosixPath"),
    ("optimizer", {"adam": optimizer_state()}, "client_state['adam'] is an optimizer's state_dict(), whose moments the"),
    ("key", {"milestones": {30: 1}}, "client_state['milestones'] has the key 30, and those of JSON are strings: write '30'"),
    ("no mapping", [1], "client_state is list: give a dict"),
    ("circle", circle(), f"is more than {DEEPEST} deep, or in itself"),
    ("deep", deep(DEEPEST), f"is more than {DEEPEST} deep"),
    ("doubled", doubled(DEEPEST - 5), "as JSON, 16MiB at most: keep what is large in a file"),
    ("chained", chained(DEEPEST), f"is more than {DEEPEST} deep"),
    ("long key", {"a": {("x" * 10_000,): 1}}, "client_state['a'] has the key ('xxx"),
    ("digits", {"a": 10**5000}, "client_state cannot be saved, which is kept as JSON"),
    ("large", {"a": "x" * checkpoint.CLIENT_STATE_BYTES}, "as JSON, 16MiB at most: keep what is large in a file"),
]


@pytest.mark.parametrize(("state", "message"), [case[1:] for case in REFUSED], ids=[case[0] for case in REFUSED])
@pytest.mark.one_in(2)
def test_what_is_no_json_is_refused_by_name_before_anything_is_written(state: Any, message: str, tmp_path: Path) -> None:
    with begin("elixir") as engine:
        with pytest.raises(UnsupportedError) as refused:
            systems.save_checkpoint(engine, tmp_path / "new" / "here", client_state=state)
        assert message in str(refused.value) and "\n" not in str(refused.value) and len(str(refused.value)) < 400
        assert not any(tmp_path.iterdir())
        systems.save_checkpoint(engine, tmp_path / "here", client_state=STATE)
        before = contents(tmp_path)
        with pytest.raises(UnsupportedError):
            systems.save_checkpoint(engine, tmp_path / "here", client_state=state)
        assert contents(tmp_path) == before
        steps_of(engine, 0, 1)
    assert doubled(10) == client_state_of(client_state_tensor(doubled(10)), "it")
    assert deep(DEEPEST - 1) == client_state_of(client_state_tensor(deep(DEEPEST - 1)), "it")


BROKEN: list[tuple[str, torch.Tensor]] = [
    ("no json", torch.frombuffer(bytearray(b"{"), dtype=torch.uint8)),
    ("no mapping", torch.frombuffer(bytearray(b"[1]"), dtype=torch.uint8)),
    ("no text", torch.full((3,), 255, dtype=torch.uint8)),
    ("deeper than is read", torch.frombuffer(bytearray(b"[" * 1_000_000), dtype=torch.uint8)),
    ("numbers", torch.ones(3)),
    ("a scalar", torch.tensor(3, dtype=torch.uint8)),
    ("large", torch.full((checkpoint.CLIENT_STATE_BYTES + 1,), 32, dtype=torch.uint8)),
]


@pytest.mark.parametrize("tensor", [case[1] for case in BROKEN], ids=[case[0] for case in BROKEN])
@pytest.mark.one_in(2)
def test_one_that_is_broken_is_refused_and_nothing_changes(tensor: torch.Tensor, tmp_path: Path) -> None:
    with begin("elixir") as engine:
        systems.save_checkpoint(engine, tmp_path / "here", client_state=STATE)
    path = data(tmp_path / "here") / checkpoint.BESIDE
    save_file({**load_file(path), "client_state": tensor}, path)
    rehash(tmp_path / "here")
    with begin("elixir", seed=1) as engine:
        before = parameters_of(engine)
        with pytest.raises(CheckpointError, match=r"client_state in .* is broken") as refused:
            systems.load_checkpoint(engine, tmp_path / "here")
        assert "\n" not in str(refused.value)
        assert all(torch.equal(value, before[name]) for name, value in parameters_of(engine).items())


def test_a_checkpoint_from_before_there_were_any_has_an_empty_one(tmp_path: Path) -> None:
    with begin("elixir") as engine:
        checkpoint.save(engine, tmp_path / "here", beside={"own": torch.ones(1)})
        path = data(tmp_path / "here") / checkpoint.BESIDE
        save_file({"own": torch.ones(1)}, path)
        rehash(tmp_path / "here")
        _, beside, client_state = checkpoint.load(engine, tmp_path / "here")
    assert beside.keys() == {"own"} and client_state == {}


# ---- several ranks


def of_rank(rank: int) -> dict[str, Any]:
    return {"step": 1, "at": 100 * rank}


@pytest.mark.parametrize("system", ["resident", "elixir", "angel-ptm"])
@pytest.mark.parametrize("alike", [True, False])
@pytest.mark.one_in(2)
def test_each_rank_has_its_own_and_other_numbers_of_ranks_the_first_s(system: str, alike: bool, tmp_path: Path) -> None:
    def save(engine: Engine) -> None:
        train(engine, "stack", 0, 1, 2)
        systems.save_checkpoint(engine, tmp_path / "here", client_state=of_rank(0 if alike else engine.ranks.rank))

    on_ranks(system, "stack", 2, save)
    for size in (1, 2, 3):
        with warnings.catch_warnings(record=True) as told:
            warnings.simplefilter("always")
            found = on_ranks("resident", "stack", size, lambda engine: systems.load_checkpoint(engine, tmp_path / "here"))
        assert found == [of_rank(rank if size == 2 and not alike else 0) for rank in range(size)]
        said = [str(each.message) for each in told if "client_state is rank 0's, and others had another" in str(each.message)]
        assert len(said) == (size != 2 and not alike)


def test_who_gives_none_gets_none(tmp_path: Path) -> None:
    def work(engine: Engine) -> dict[str, Any]:
        given = of_rank(0) if engine.ranks.rank == 0 else None
        systems.save_checkpoint(engine, tmp_path / "here", client_state=given)
        return systems.load_checkpoint(engine, tmp_path / "here")

    assert on_ranks("elixir", "stack", 2, work) == [of_rank(0), {}]


def test_what_one_rank_may_not_save_none_does(tmp_path: Path) -> None:
    def work(engine: Engine) -> None:
        given = {"a": engine.ranks.rank and {1}}
        systems.save_checkpoint(engine, tmp_path / "here", client_state=given)

    told = outcomes_of("elixir", work)
    assert all(isinstance(each, UnsupportedError) and "client_state['a'] is set" in str(each) for each in told)
    assert not any(tmp_path.iterdir())
