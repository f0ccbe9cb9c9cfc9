"""Checkpoints of several ranks: what any number of them saved, any other loads, under any system, bit for bit."""

from __future__ import annotations

import errno
import os
import shutil
import signal
import subprocess
import sys
import threading
import warnings
from collections.abc import Callable
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from systems import checkpoint
from systems.checkpoint import CheckpointError, SaveError
from systems.errors import DivergedError
from systems.ranks.loopback import as_threads
from systems.ranks.processes import Processes
from systems.ranks.ranks import Ranks, SingleRank
from systems.settings import Settings
from systems.system import Engine
from tests.systems import every
from tests.systems.models_small import tokens
from tests.systems.running import AMPLE, AdamState, adam_states, parameters_of, settings
from tests.systems.test_checkpoint import contents
from tests.systems.test_ranks import loss_of, make, tight

ROOT = Path(__file__).resolve().parents[2]
SYSTEMS: dict[str, Any] = {**every.STRATEGIES, "resident": every.RESIDENT}
BEFORE, AFTER = 3, 2  # steps, saved between them
SAVED_BY = 2
MODELS = ("stack", "adapters")
MOST = 3  # micro-batches of a step


class State(NamedTuple):
    """losses: of each step since it began, this rank's micro-batches'. The rest: when it ended."""

    losses: list[list[float]]
    norms: list[float | None]
    parameters: dict[str, torch.Tensor]
    adam: dict[str, AdamState]


def train(engine: Engine, model: str, first: int, last: int, micro_batches: int) -> list[list[float]]:
    """Each step has so many micro-batches in all, which ranks take in turn."""
    ranks, losses = engine.ranks, []
    for batch in tokens(BEFORE + AFTER, MOST)[first:last]:
        chosen = batch[:micro_batches]
        mine = []
        for micro in chosen[ranks.rank :: ranks.size]:
            loss = loss_of(model)(engine, micro, chosen[:, :, 1:].numel())
            engine.backward(loss)
            mine.append(loss.item())
        engine.step()
        losses.append(mine)
    return losses


def state_of(engine: Engine, losses: list[list[float]]) -> State:
    engine.drain()
    return State(losses, [outcome.norm for outcome in engine.outcomes], parameters_of(engine), adam_states(engine))


def asked(system: str, model: str, size: int, **given: Any) -> Settings:
    budget = AMPLE if system == "resident" else tight(model, size)
    accumulate = MOST if size == 1 else 1
    wanted = {"ranks": size, "accumulate": accumulate, "clip": 0.5, "device_memory": budget, "host_memory": AMPLE}
    return settings(**(wanted | given))


def on_ranks(
    system: str, model: str, size: int, work: Callable[[Engine], Any], options: dict[str, Any] | None = None, **given: Any
) -> list[Any]:
    """What `work` returns on each rank."""
    chosen, models, wanted = SYSTEMS[system], [make(model) for _ in range(size)], asked(system, model, size, **given)

    def run(ranks: Ranks) -> Any:
        with chosen.initialize(models[ranks.rank], wanted, chosen.Options(**(options or {})), ranks=ranks) as engine:
            return work(engine)

    return as_threads(size, run) if size > 1 else [run(SingleRank())]


@cache
def without_interruption(model: str, micro_batches: int) -> tuple[State, State]:
    """Of one rank, when others saved, and in the end."""

    def work(engine: Engine) -> tuple[State, State]:
        between = state_of(engine, train(engine, model, 0, BEFORE, SAVED_BY))
        return between, state_of(engine, train(engine, model, BEFORE, BEFORE + AFTER, micro_batches))

    return on_ranks("resident", model, 1, work)[0]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Callable[[str, str], Path]:
    """Where a system's checkpoint of a model is, saved by several ranks."""

    @cache
    def save(system: str, model: str) -> Path:
        folder = tmp_path_factory.mktemp(f"{system}-{model}") / "here"

        def work(engine: Engine) -> None:
            train(engine, model, 0, BEFORE, SAVED_BY)
            rank = torch.tensor(engine.ranks.rank)
            checkpoint.save(engine, folder, beside={"same": torch.tensor(7)}, own={"rank": rank})

        on_ranks(system, model, SAVED_BY, work)
        return folder

    return save


def assert_same(expected: State, found: State, *, after: int = 0) -> None:
    """after: steps that were taken before."""
    assert found.norms == expected.norms[after:]
    assert found.parameters.keys() == expected.parameters.keys()
    for name, value in expected.parameters.items():
        assert torch.equal(value, found.parameters[name]), name
    assert found.adam.keys() == expected.adam.keys()
    for name, (first, second, steps) in expected.adam.items():
        assert torch.equal(first, found.adam[name].exp_avg) and torch.equal(second, found.adam[name].exp_avg_sq), name
        assert steps == found.adam[name].steps


CASES = [(system, system, model, size) for system in SYSTEMS for model in MODELS for size in (1, 2, 3)]
IN_TURN = list(SYSTEMS)[1:] + list(SYSTEMS)[:1]
CASES += [(system, other, "stack", 3) for system, other in zip(SYSTEMS, IN_TURN, strict=True)]


@pytest.mark.parametrize(("before", "after", "model", "size"), CASES)
@pytest.mark.filterwarnings("ignore:the checkpoint in .* was saved by 2 ranks")
def test_training_goes_on_as_if_it_had_not_stopped(
    before: str, after: str, model: str, size: int, saved: Callable[[str, str], Path]
) -> None:
    between, whole = without_interruption(model, size)

    def work(engine: Engine) -> tuple[State, State]:
        loop = checkpoint.load(engine, saved(before, model)).position
        assert loop.steps == BEFORE
        loaded = state_of(engine, [])
        return loaded, state_of(engine, train(engine, model, BEFORE, BEFORE + AFTER, size))

    folder = saved(before, model)
    for rank, (loaded, found) in enumerate(on_ranks(after, model, size, work)):
        assert_same(between, loaded, after=BEFORE)
        assert_same(whole, found, after=BEFORE)
        assert found.losses == [each[rank::size] for each in whole.losses]
    assert len(list(folder.iterdir())) == 2


@pytest.mark.parametrize(
    "options", [{"scatter": False, "offload": False}, {"offload": False}, {"offload": False, "cache": 40_000}]
)
def test_what_rests_on_the_device_is_saved_and_loaded(options: dict[str, Any], tmp_path: Path) -> None:
    """Every rank having all of it, or each its shard; and given back at close."""
    _, whole = without_interruption("stack", SAVED_BY)
    modules = list[Any]()

    def save(engine: Engine) -> None:
        train(engine, "stack", 0, BEFORE, SAVED_BY)
        checkpoint.save(engine, tmp_path / "here")

    def load(engine: Engine) -> State:
        checkpoint.load(engine, tmp_path / "here")
        modules.append(engine.module)
        return state_of(engine, train(engine, "stack", BEFORE, BEFORE + AFTER, SAVED_BY))

    on_ranks("elixir", "stack", SAVED_BY, save, options, device_memory=AMPLE)
    for found in on_ranks("elixir", "stack", SAVED_BY, load, options, device_memory=AMPLE):
        assert_same(whole, found, after=BEFORE)
    for module in modules:
        assert all(torch.equal(each.detach(), whole.parameters[name]) for name, each in module.named_parameters())


HERE = threading.local()  # rank: of the thread


def outcomes_of(system: str, work: Callable[[Engine], Any], size: int = SAVED_BY) -> list[Any]:
    """What `work` returns or raises on each rank, one of whose engines may be used on."""

    def caught(engine: Engine) -> Any:
        HERE.rank = engine.ranks.rank
        try:
            return work(engine)
        except BaseException as error:  # noqa: BLE001 - every rank's is looked at
            return error

    return on_ranks(system, "stack", size, caught)


def only_on(rank: int, real: Callable[..., Any], error: BaseException, *, nth: int = 1) -> Callable[..., Any]:
    """Fails on that rank, whose threads for files are known by the names of these, at its nth call."""
    left = [nth]

    def fails(*given: Any, **more: Any) -> Any:
        named = next((each.name for each in given if isinstance(each, Path) and each.name.startswith("state-")), None)
        mine = named.startswith(f"state-{rank}-") if named is not None else getattr(HERE, "rank", None) == rank
        if mine:
            left[0] -= 1
            if left[0] == 0:
                raise error
        return real(*given, **more)

    return fails


SAVING, TENSORS = checkpoint.saving, checkpoint.tensors
NO_SPACE = OSError(errno.ENOSPC, "No space left on device", "it")
BY_RANK_0 = [
    (SAVING, "locked"),
    (SAVING, "_tidy"),
    (SAVING, "_check_disk"),
    (Path, "mkdir"),
    (SAVING, "sealed"),
    (SAVING, "write_whole"),
]
BY_EACH = [(TENSORS, "save_file"), (Path, "chmod"), (TENSORS, "flush"), (TENSORS, "hash_of"), (TENSORS, "open_regular")]
FILE_STEPS = [(*step, 0, 1) for step in BY_RANK_0] + [(Path, "mkdir", 0, number) for number in (2, 3)]
FILE_STEPS += [(*step, rank, number) for step in BY_EACH for rank in range(SAVED_BY) for number in (1, 2)]


class Told(NamedTuple):
    """On one rank, of a save in which a file step failed on some rank. changed: files of the folder."""

    error: BaseException | None
    changed: set[str]
    entries: int


def save_failing(engine: Engine, folder: Path, step: tuple[Any, str, int, int], error: BaseException) -> Told:
    owner, name, rank, number = step
    before = contents(folder)
    engine.ranks.exchange("all have looked", None)
    with pytest.MonkeyPatch.context() as patch:
        if engine.ranks.rank == 0:
            patch.setattr(owner, name, only_on(rank, getattr(owner, name), error, nth=number))
        engine.ranks.exchange("it fails from here on", None)
        told: BaseException | None = None
        try:
            checkpoint.save(engine, folder)
        except BaseException as caught:  # noqa: BLE001 - looked at by the test
            told = caught
        engine.ranks.exchange("all have failed", None)
    after = contents(folder)
    changed = {path for path in {*before, *after} if before.get(path) != after.get(path)}
    engine.ranks.exchange("all have looked again", None)
    return Told(told, changed, len(list(folder.iterdir())))


@pytest.mark.parametrize("system", ["elixir", "resident"])
@pytest.mark.parametrize("error", [NO_SPACE, KeyboardInterrupt()], ids=["no space", "Ctrl-C"])
def test_a_save_that_fails_on_one_rank_leaves_the_last_one_and_is_told_on_all(
    system: str, error: BaseException, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whichever file step it is, and the engine goes on."""
    folder = tmp_path / "here"
    monkeypatch.setattr(TENSORS, "FILE_BYTES", 20_000)

    def work(engine: Engine) -> tuple[list[Told], State]:
        losses = train(engine, "stack", 0, BEFORE, SAVED_BY)
        checkpoint.save(engine, folder)
        losses += train(engine, "stack", BEFORE, BEFORE + 1, SAVED_BY)
        told = [save_failing(engine, folder, step, error) for step in FILE_STEPS]
        losses += train(engine, "stack", BEFORE + 1, BEFORE + AFTER, SAVED_BY)
        checkpoint.save(engine, folder)
        return told, state_of(engine, losses)

    found = outcomes_of(system, work)
    assert [each for each in found if isinstance(each, BaseException)] == []
    for step, *told in zip(FILE_STEPS, *(told for told, _ in found), strict=True):
        rank = step[2]
        assert [(each.changed, each.entries) for each in told] == [(set(), 2)] * SAVED_BY, step
        if error is NO_SPACE:
            assert all(isinstance(each.error, OSError | ValueError) for each in told), step
            assert all("No space left on device" in str(each.error) for each in told), step
            assert f"rank {rank}: " in str(told[1 - rank].error), step
            for each in told:
                assert not isinstance(each.error, SaveError) or "one before it is still there" in str(each.error), step
        else:
            assert isinstance(told[rank].error, KeyboardInterrupt), step
            assert f"rank {rank}: KeyboardInterrupt: KeyboardInterrupt" in str(told[1 - rank].error), step
    for _, state in found:
        assert_same(without_interruption("stack", SAVED_BY)[1], state)
    assert checkpoint.position(folder).steps == BEFORE + AFTER
    assert len(list(folder.rglob("state-1-*"))) > 2


def test_what_fails_once_the_manifest_is_there_leaves_the_new_one(tmp_path: Path) -> None:
    folder = tmp_path / "here"

    def work(engine: Engine) -> Told:
        checkpoint.save(engine, folder)
        train(engine, "stack", 0, 1, SAVED_BY)
        return save_failing(engine, folder, (SAVING, "flush", 0, 1), NO_SPACE)

    for told in outcomes_of("elixir", work):
        assert isinstance(told.error, SaveError) and told.entries == 2
    assert checkpoint.position(folder).steps == 1


def test_where_only_rank_0_sees_the_folder_it_writes_all(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def work(engine: Engine) -> None:
        checkpoint.save(engine, tmp_path / "here")

    def unseen(folder: Path) -> None:
        if HERE.rank:
            raise FileNotFoundError(errno.ENOENT, "No such file or directory", str(folder))

    monkeypatch.setattr(checkpoint.several, "prove_folder", unseen)
    assert outcomes_of("elixir", work, 3) == [None] * 3
    names = {path.name for path in (tmp_path / "here").rglob("state-*")}
    assert names and all(name.startswith("state-0-") for name in names)
    with on_one_rank() as engine, pytest.warns(UserWarning, match="was saved by 3 ranks"):
        checkpoint.load(engine, tmp_path / "here")


def on_one_rank(system: str = "elixir", model: str = "stack") -> Engine:
    found: Engine = SYSTEMS[system].initialize(make(model), asked(system, model, 1), SYSTEMS[system].Options())
    return found


def refusals(told: list[Any], kind: type[BaseException], words: str) -> None:
    """Every rank was told so."""
    for each in told:
        assert isinstance(each, kind) and words in str(each), told


def test_what_is_not_finite_on_one_rank_is_refused_on_all(tmp_path: Path) -> None:
    """Its shard has a NaN."""
    name = "blocks.1.up.weight"

    def work(engine: Any) -> None:
        values = engine.values
        if engine.ranks.rank == 1:
            stored, place = values.pieces_of(next(p.index for p in engine.index.parameters if p.name == name))[0]
            stored.state.moments[0][place.here][0] = torch.nan
        checkpoint.save(engine, tmp_path / "here")

    refusals(outcomes_of("elixir", work), DivergedError, f"exp_avg of {name} has values that are not finite")
    assert list(tmp_path.iterdir()) == []


def test_ranks_name_one_folder(tmp_path: Path) -> None:
    told = outcomes_of("resident", lambda engine: checkpoint.save(engine, tmp_path / f"of-{engine.ranks.rank}"))
    refusals(told, ValueError, "of-0 on rank 0 and ")
    assert list(tmp_path.iterdir()) == []


def test_a_step_in_progress_on_one_rank_is_told_on_all(tmp_path: Path) -> None:
    def work(engine: Any) -> None:
        if engine.ranks.rank == 1:
            engine._in_step = True
        checkpoint.save(engine, tmp_path / "here")

    refusals(outcomes_of("resident", work), ValueError, "a step is in progress")


@pytest.mark.parametrize("system", ["elixir", "resident"])
def test_one_rank_s_refusal_is_everybody_s_before_values_change(
    system: str, saved: Callable[[str, str], Path], tmp_path: Path
) -> None:
    """A bit of a file is not what was saved, which the rank finds out that checks this one; or there is no checkpoint."""
    source = saved("elixir", "stack")

    def work(engine: Engine) -> tuple[BaseException, bool]:
        before = parameters_of(engine)
        try:
            checkpoint.load(engine, folder)
        except CheckpointError as error:
            after = parameters_of(engine)
            return error, all(torch.equal(value, after[name]) for name, value in before.items())
        raise AssertionError("it was loaded")

    for number, path in enumerate(sorted(source.rglob("state-*"))):
        folder = tmp_path / str(number)
        shutil.copytree(source, folder)
        damaged = folder / path.relative_to(source)
        content = bytearray(damaged.read_bytes())
        content[-1] ^= 1
        damaged.write_bytes(content)
        for error, unchanged in outcomes_of(system, work):
            assert unchanged and "is damaged: its content is not what was saved" in str(error)
    folder = tmp_path / "none"
    for error, unchanged in outcomes_of(system, work):
        assert unchanged and "there is no checkpoint" in str(error)


def test_ranks_load_one_checkpoint(saved: Callable[[str, str], Path], monkeypatch: pytest.MonkeyPatch) -> None:
    """And not two that are in folders of the same name, as on hosts that share no disk."""
    real = checkpoint.loading.read_manifest

    def work(engine: Engine) -> None:
        checkpoint.load(engine, saved("elixir", "stack"))

    def other(source: Path) -> Any:
        found = real(source)
        return found if HERE.rank == 0 else found.model_copy(update={"steps": 99})

    monkeypatch.setattr(checkpoint.loading, "read_manifest", other)
    refusals(outcomes_of("elixir", work), CheckpointError, "ranks 0 and 1 find different checkpoints in")


@pytest.mark.parametrize("size", [1, 2, 3])
def test_what_ranks_have_for_themselves_comes_back_to_as_many(size: int, saved: Callable[[str, str], Path]) -> None:
    folder = saved("resident", "stack")
    assert checkpoint.ranks_of(folder) == SAVED_BY
    with warnings.catch_warnings(record=True) as told:
        warnings.simplefilter("always")
        found = on_ranks("resident", "stack", size, lambda engine: checkpoint.load(engine, folder).beside)
    said = [str(each.message) for each in told if "dropout begins anew" in str(each.message)]
    if size == SAVED_BY:
        assert [int(beside["rank"]) for beside in found] == [0, 1] and not said
    else:
        assert all("rank" not in beside for beside in found) and len(said) == 1
        assert f"was saved by 2 ranks and goes on with {size} rank" in said[0] and "another global batch" in said[0]
    assert all(int(beside["same"]) == 7 and {"same"} <= beside.keys() <= {"same", "rank"} for beside in found)


def test_one_rank_s_checkpoint_has_no_word_of_ranks(tmp_path: Path) -> None:
    with on_one_rank() as engine:
        checkpoint.save(engine, tmp_path / "here", beside={"same": torch.tensor(7)}, own={"rank": torch.tensor(0)})
        beside = checkpoint.load(engine, tmp_path / "here").beside
    assert beside.keys() == {"same", "rank"} and checkpoint.ranks_of(tmp_path / "here") == 1
    assert {path.name for path in (tmp_path / "here").rglob("*.safetensors")} == {
        "state-00000.safetensors",
        checkpoint.BUFFERS,
        checkpoint.BESIDE,
    }


def test_no_rank_has_more_than_one_tensor_and_a_file_in_memory(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """And of a tensor only its own part, unless it writes it."""
    monkeypatch.setattr(TENSORS, "FILE_BYTES", 40_000)
    held, real = list[tuple[int, int]](), TENSORS.save_file

    def save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
        held.append((len(tensors), sum(each.nbytes for each in tensors.values())))
        real(tensors, path)

    monkeypatch.setattr(TENSORS, "save_file", save_file)
    assert outcomes_of("angel-ptm", lambda engine: checkpoint.save(engine, tmp_path / "here")) == [None] * SAVED_BY
    assert all(number == 1 or nbytes <= 40_000 // SAVED_BY for number, nbytes in held)


def save_and_die(rank: int, meet: Path, folder: Path) -> None:
    """In a process of its own, of two: saves, and again after one more step, in which rank 1 is killed. Rank 0 tells what it
    was told beside the folder.
    """
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{meet}", rank=rank, world_size=SAVED_BY)
    chosen, ranks = SYSTEMS["elixir"], Processes()
    wanted = settings(ranks=SAVED_BY, clip=0.5, device_memory=AMPLE, host_memory=AMPLE)
    engine = chosen.initialize(make("stack"), wanted, chosen.Options(), ranks=ranks)
    train(engine, "stack", 0, BEFORE, SAVED_BY)
    checkpoint.save(engine, folder)
    checkpoint.load(engine, folder)
    train(engine, "stack", BEFORE, BEFORE + 1, SAVED_BY)
    TENSORS.FILE_BYTES = 20_000
    real, left = TENSORS.save_file, [3]

    def save_file(tensors: dict[str, torch.Tensor], path: Path) -> None:
        left[0] -= 1
        if rank == 1 and left[0] == 0:
            os.kill(os.getpid(), signal.SIGKILL)
        real(tensors, path)

    TENSORS.save_file = save_file
    try:
        checkpoint.save(engine, folder)
    except Exception as error:  # noqa: BLE001 - told
        (folder.parent / "told").write_text(f"{type(error).__name__}: {error}")
    os._exit(0)  # without waiting for who is gone


@pytest.mark.long
def test_a_rank_that_is_killed_while_saving_leaves_the_last_one(tmp_path: Path) -> None:
    folder, variables = tmp_path / "here", {**os.environ, "PYTHONPATH": str(ROOT), "GLOO_SOCKET_IFNAME": "lo"}
    script = "import sys, pathlib, tests.systems.test_ranks_saved as saved; rank, *paths = sys.argv[1:]; "
    script += "saved.save_and_die(int(rank), *map(pathlib.Path, paths))"
    words = [[sys.executable, "-c", script, str(rank), str(tmp_path / "meet"), str(folder)] for rank in range(SAVED_BY)]
    started = [subprocess.Popen(each, env=variables, cwd=ROOT) for each in words]
    assert [each.wait(timeout=120) for each in started] == [0, -signal.SIGKILL]
    assert (tmp_path / "told").read_text().startswith("PeerGoneError: another rank is gone")
    assert len(list(folder.iterdir())) == 2, "nothing unfinished is left"
    with on_one_rank() as engine:
        with pytest.warns(UserWarning, match="was saved by 2 ranks"):
            checkpoint.load(engine, folder)
        assert_same(without_interruption("stack", 1)[0], state_of(engine, []), after=BEFORE)
        train(engine, "stack", BEFORE, BEFORE + AFTER, 1)
        assert_same(without_interruption("stack", 1)[1], state_of(engine, []), after=BEFORE)
