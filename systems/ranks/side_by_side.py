"""What ranks do side by side: all bring it to an end, or none, and what went wrong on one is told on all of them."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextlib import contextmanager

from systems.ranks.ranks import Ranks
from systems.ranks.told import ToldError


@contextmanager
def side_by_side(ranks: Ranks, what: str) -> Iterator[None]:
    """Around what each rank does alone, without a collective in it; all ranks come to its end. As Ranks.together, of more than
    a value, and whatever is raised, Ctrl-C too.

    Where it raises, so it does on all ranks: its own error on each that has one, on the others the first one's, of the same
    class where that is one that is told in a line (ValueError, OSError, this project's own), else a RuntimeError. what: as in
    Ranks.exchange.
    """
    if ranks.size == 1:
        yield
        return
    mine: BaseException | None = None
    try:
        yield
    except BaseException as error:  # noqa: BLE001 - it is raised below, once the others know
        mine = error
    with contextlib.suppress(Exception) if mine is not None else contextlib.nullcontext():
        told = ranks.exchange(what, None if mine is None else ToldError.of(mine))
    if mine is not None:
        raise mine
    for rank, theirs in enumerate(told):
        if theirs is not None:
            raise theirs.of_rank(rank)
