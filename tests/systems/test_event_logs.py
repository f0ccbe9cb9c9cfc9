"""What all lanes, compute too, are given in one steady step, with who waits for whom: golden logs of a few setups.

They hold still while the inside is rebuilt: what moves no bytes and orders nothing anew changes no line of them.

    python -m tests.systems.test_event_logs    writes them anew, to be read before they are committed
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest

from tests.systems.models_small import tokens
from tests.systems.running import one_step, settings, start
from tests.systems.setups import SYSTEMS, Setup, budget_of

GOLDEN = Path(__file__).parent / "golden"
LOGGED: dict[str, tuple[str, Setup, str, dict[str, Any]]] = {
    "angel-ptm": ("angel-ptm", Setup("opt"), "half", {"nonfinite": "stop"}),
    "angel-ptm-accumulate": ("angel-ptm", Setup("gpt2", "full", 2, clip=0.5), "tight", {}),
    "elixir": ("elixir", Setup("opt", "full", sharing="untied"), "half", {"nonfinite": "stop"}),
    "elixir-accumulate": ("elixir", Setup("gpt2", "full", 2, dtype="bf16"), "tight", {"activations": "host"}),
    "h3t": ("h3t", Setup("opt"), "half", {"solver": "on", "run_ahead": False, "variant": "global-offload"}),
    "h3t-accumulate": ("h3t", Setup("gpt2", "full", 2, "half-frozen"), "tight", {"solver": "on", "variant": "global-offload"}),
    "h3t-paper": ("h3t", Setup("opt"), "half", {"variant": "paper", "solver": "on", "run_ahead": False}),
    "patrickstar": ("patrickstar", Setup("gpt2"), "tight", {}),
    "patrickstar-accumulate": ("patrickstar", Setup("opt", "full", 2, dtype="bf16", clip=0.5), "half", {"activations": "host"}),
}


def log_of(name: str) -> str:
    """One line an operation: ticket, lane, what it is, and the tickets it waits for; those of earlier steps are negative."""
    system, setup, level, changed = LOGGED[name]
    chosen, options = SYSTEMS[system]
    given: dict[str, Any] = {"dtype": setup.dtype, "clip": setup.clip, "accumulate": setup.accumulate, "log_events": True}
    given |= {"recompute": setup.recompute, "device_memory": budget_of(setup, level)}
    engine: Any = start(chosen, setup.build(), settings(**given), options.model_copy(update=changed))
    begin = 0
    for batch in tokens(3, setup.accumulate):
        begin = len(engine.log.operations)
        one_step(engine, batch)
    engine.drain()
    assert engine.cursor.plan is not None, "void: no plan"
    operations = engine.log.operations[begin:]
    engine.close()
    zero = operations[0].ticket
    lines = (f"{o.ticket - zero} {o.lane} {o.label}{_waits([t - zero for t in o.waits])}" for o in operations)
    return "\n".join(lines) + "\n"


def _waits(tickets: list[int]) -> str:
    return "" if not tickets else " <- " + " ".join(map(str, sorted(tickets)))


@pytest.mark.parametrize("name", LOGGED)
@pytest.mark.one_in(4)
def test_a_steady_step_issues_what_it_did(name: str) -> None:
    assert log_of(name) == (GOLDEN / f"{name}.txt").read_text()


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for each in LOGGED:
        (GOLDEN / f"{each}.txt").write_text(log_of(each))
