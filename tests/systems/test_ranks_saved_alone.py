"""What one rank alone cannot do as a checkpoint is saved or loaded, all are told of, whatever it is."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from systems import checkpoint
from systems.baselines.resident import ResidentState
from systems.ranks.loopback import as_threads
from systems.ranks.ranks import Ranks
from systems.substrate.bundle.values import StoredValues
from systems.system import Engine
from tests.systems.test_ranks import make
from tests.systems.test_ranks_saved import BEFORE, HERE, SAVED_BY, SAVING, SYSTEMS, asked, only_on, train

SEVERAL, LOADING = checkpoint.several, checkpoint.loading
ODD = ArithmeticError("something odd")
BY_BOTH = [(SEVERAL, "prove_folder"), (SEVERAL, "_digest"), (SAVING, "persistent_buffers"), (SAVING, "unsound")]
READ_BY = {"elixir": (StoredValues, "_values_here"), "resident": (ResidentState, "read")}
LOADED_BY_BOTH = [(SEVERAL, "host_identity"), (Path, "stat"), (LOADING, "read_manifest"), (LOADING, "beside_of_mine")]
LOADED_BY_BOTH += [(LOADING, "warn_of_other_ranks"), (LOADING, "_restore"), (LOADING, "copy_into")]
Failing = tuple[Any, str, int, int]  # the nth call of that name, on a rank
BUFFER = "seen"  # not the same on all ranks


def raised(engine: Engine, where: Failing, work: Callable[[], Any]) -> BaseException | None:
    """By work, where that call fails."""
    owner, name, rank, nth = where
    engine.ranks.exchange("all are here", None)
    with pytest.MonkeyPatch.context() as patch:
        if engine.ranks.rank == 0:
            patch.setattr(owner, name, only_on(rank, getattr(owner, name), ODD, nth=nth))
        engine.ranks.exchange("it fails from here on", None)
        told: BaseException | None = None
        try:
            work()
        except BaseException as error:  # noqa: BLE001 - looked at
            told = error
        engine.ranks.exchange("all have failed", None)
    return told


@pytest.mark.parametrize("system", ["elixir", "resident"])
@pytest.mark.filterwarnings("ignore:buffer seen differ")
def test_whatever_one_rank_raises_as_it_saves_or_loads_all_raise(system: str, tmp_path: Path) -> None:
    """No other waits for it, whichever call it is and whatever it raises; and then the engines go on. A warning raises where
    warnings are errors.
    """
    folder, models = tmp_path / "here", [make("stack") for _ in range(SAVED_BY)]
    for rank, model in enumerate(models):
        model.register_buffer(BUFFER, torch.tensor([float(rank)]))
    everyone = range(SAVED_BY)
    saving: list[Failing] = [(*step, rank, 1) for step in [*BY_BOTH, READ_BY[system]] for rank in everyone]
    saving += [(*READ_BY[system], rank, 2) for rank in everyone] + [(SEVERAL.warnings, "warn", 0, 1)]
    loading: list[Failing] = [(*step, rank, 1) for step in LOADED_BY_BOTH for rank in everyone]

    def work(ranks: Ranks) -> list[BaseException | None]:
        HERE.rank, chosen = ranks.rank, SYSTEMS[system]
        with chosen.initialize(models[ranks.rank], asked(system, "stack", SAVED_BY), chosen.Options(), ranks=ranks) as engine:
            train(engine, "stack", 0, 1, SAVED_BY)
            found = [raised(engine, where, lambda: checkpoint.save(engine, folder)) for where in saving]
            assert not folder.exists()
            checkpoint.save(engine, folder)
            found += [raised(engine, where, lambda: checkpoint.load(engine, folder)) for where in loading]
            checkpoint.load(engine, folder)
            train(engine, "stack", 1, BEFORE, SAVED_BY)
            return found

    for here, found in enumerate(as_threads(SAVED_BY, work)):
        for (_, name, rank, _), error in zip([*saving, *loading], found, strict=True):
            words = "something odd" if rank == here else f"rank {rank}: ArithmeticError: something odd"
            assert words in str(error), (name, rank, here, error)
