"""Schedules as text. The golden ones, a small model under every strategy, show what a change of any rule moves.

python -m tests.planning.test_schedule_text    writes them anew, to be read before they are committed
"""

from __future__ import annotations

from pathlib import Path

import pytest

from systems import registry
from systems.planning.step.schedule import expand
from systems.prediction.policies import policy_of
from tests.planning.schedule_text import text_of
from tests.planning.synthetic import context, trace_of, transformer
from tests.systems import every

GOLDEN = Path(__file__).parent / "golden"
STRATEGIES = list(every.STRATEGIES)
ACTIVATION = 1 << 16


def schedule_of(system: str, accumulate: int) -> str:
    """Two blocks, a tied embedding; a budget in which most states are on the host and parameters come and go."""
    index, chosen = transformer(2, 32), policy_of(registry.get(system))
    sizes = [p.numel * 2 for p in index.parameters]
    budget = int(1.5 * sum(sizes)) + 6 * ACTIVATION
    asked = registry.get(system).Options()
    strategy = chosen(asked, context(device=budget, accumulate=accumulate))
    layout = strategy.layout(index).named(index)
    trace = trace_of(layout, accumulate=accumulate, activation=ACTIVATION)
    plan = strategy.plan(layout, trace)
    return text_of(expand(layout, trace, plan, context(device=budget, accumulate=accumulate)), trace)


@pytest.mark.parametrize("accumulate", [1, 2])
@pytest.mark.parametrize("system", STRATEGIES)
def test_the_schedule_of_a_small_model(system: str, accumulate: int) -> None:
    golden = GOLDEN / f"{system}-{accumulate}.txt"
    if not golden.exists():
        pytest.skip("a strategy that has no golden schedule (yet)")
    assert schedule_of(system, accumulate) == golden.read_text()


def test_every_strategy_of_ours_has_a_golden_schedule_in_which_parameters_move() -> None:
    found = {path.stem: path.read_text() for path in GOLDEN.glob("*.txt")}
    assert {name.rpartition("-")[0] for name in found} == {"angel-ptm", "elixir", "h3t", "patrickstar"}
    for text in found.values():
        assert "h2d" in text and "update bundle" in text and "norm" in text


if __name__ == "__main__":
    GOLDEN.mkdir(exist_ok=True)
    for each in STRATEGIES:
        for number in (1, 2):
            (GOLDEN / f"{each}-{number}.txt").write_text(schedule_of(each, number))
