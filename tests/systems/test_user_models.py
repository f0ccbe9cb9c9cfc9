"""Plain PyTorch models with every feature in models_plain, against resident (invariants 1 to 3; cases C14, C15)."""

from __future__ import annotations

from functools import cache
from typing import Any, ClassVar

import pytest
import torch
import transformers
from torch import nn

import systems
from systems.errors import UnsupportedError
from systems.settings import AdamSettings
from systems.strategies.elixir.options import ElixirOptions
from tests.systems.every import MANAGED, STRATEGIES, SYSTEMS
from tests.systems.models_plain import CASES, DIM, build, squared_error
from tests.systems.models_small import tokens
from tests.systems.running import (
    RANDOM,
    RESIDENT,
    Run,
    assert_equal,
    elixir,
    evict_at_once,
    finished,
    h3t,
    one_step,
    settings,
    start,
    train,
)

STEPS = 3
# For H3T, whose search takes half a second.
OFTEN = {"stack", "shared-weight", "frozen-middle", "called-twice", "late-leaf", "adapters", "silent", "stateful", "attention"}


@cache
def reference(case: str, accumulate: int, dtype: str, clip: float = 1.0) -> Run:
    asked = settings(accumulate=accumulate, dtype=dtype, clip=clip)
    return train(start(RESIDENT, build(case), asked), tokens(STEPS, accumulate), CASES[case].loss)


@pytest.mark.parametrize(
    ("case", "accumulate", "dtype"),
    [
        pytest.param(case, *way, marks=pytest.mark.slow if (number + other) % 2 else ())
        for number, case in enumerate(CASES)
        for other, way in enumerate([(1, "bf16"), (2, "fp32")])
    ],
)
@pytest.mark.one_in(7)
def test_nothing_is_used_after_its_release(case: str, accumulate: int, dtype: str) -> None:
    engine = start(RANDOM, build(case), settings(accumulate=accumulate, dtype=dtype, clip=1.0))
    evict_at_once(engine)
    run = train(engine, tokens(STEPS, accumulate), CASES[case].loss)
    assert_equal(reference(case, accumulate, dtype), run)
    assert run.per_step[-1]["h2d_bytes"] > 0, "void: nothing moved"


@pytest.mark.parametrize("share", [0.45, pytest.param(1.1, marks=pytest.mark.slow), pytest.param(0.7, marks=pytest.mark.slow)])
@pytest.mark.parametrize("case", CASES)
@pytest.mark.one_in(4)
def test_elixir_equals_resident(case: str, share: float) -> None:
    check(elixir(), case, share)


@pytest.mark.parametrize("share", [0.45, pytest.param(1.1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    "case",
    [pytest.param(case, marks=() if case in OFTEN else pytest.mark.slow) for case in CASES if case != "in-place"],
)
@pytest.mark.one_in(3)
def test_h3t_equals_resident(case: str, share: float) -> None:
    check(h3t(), case, share)


OTHERS = [name for name in STRATEGIES if name not in ("elixir", "h3t")]


@pytest.mark.parametrize("share", [0.45, pytest.param(1.1, marks=pytest.mark.slow)])
@pytest.mark.parametrize(
    ("system", "case"),
    [
        pytest.param(system, case, marks=() if (place + number) % 3 == 0 else pytest.mark.slow)
        for place, system in enumerate(OTHERS)
        for number, case in enumerate(CASES)
    ],
)
@pytest.mark.one_in(4)
def test_every_other_strategy_equals_resident(system: str, case: str, share: float) -> None:
    check(STRATEGIES[system], case, share)


def check(system: Any, case: str, share: float) -> None:
    expected = reference(case, 1, "bf16")
    budget = int(share * (expected.memory.device_peak_bytes or 0))
    asked = settings(dtype="bf16", clip=1.0, device_memory=budget)
    run = train(start(system, build(case), asked), tokens(STEPS, 1), CASES[case].loss)
    assert_equal(expected, run)
    buffers = dict(expected.engine.module.named_buffers())
    assert all(torch.equal(buffer, buffers[name]) for name, buffer in run.engine.module.named_buffers())
    assert share > 1 or run.per_step[-1]["h2d_bytes"] > 0, "void: nothing moved"


def test_h3t_refuses_a_block_that_edits_its_input() -> None:
    """Its profiler recomputes every layer, and recomputation would start from what the layer made of its input."""
    engine = start(h3t(), build("in-place"), settings())
    with pytest.raises(RuntimeError, match="the input of unit 3 was edited in place"):
        one_step(engine, tokens(1, 1)[0], CASES["in-place"].loss)
    engine.close()


@cache
def under_autocast(system: str, around: str, budget: int) -> Run:
    engine = start(SYSTEMS[system], build("stack"), settings(device_memory=budget))
    losses = []
    with torch.autocast("cpu", torch.bfloat16, enabled=around == "all"):
        for batch in tokens(STEPS, 1):
            with torch.autocast("cpu", torch.bfloat16):
                losses.append(one_step(engine, batch, CASES["stack"].loss))
    return finished(engine, losses)


@pytest.mark.parametrize("system", MANAGED)
@pytest.mark.one_in(3)
def test_autocast_keeps_no_copy_of_a_weight(system: str) -> None:
    """Around each step or around all of them: torch would otherwise compute with weights of an earlier step."""

    expected = under_autocast("resident", "each", 1 << 30)
    assert_equal(expected, under_autocast("resident", "all", 1 << 30))
    for around in ("each", "all"):
        assert_equal(expected, under_autocast(system, around, 230_000))


@pytest.mark.parametrize("chunk", ["smallest", "whole model"])
@pytest.mark.parametrize("case", ["shared-weight", "root-owner", "frozen-middle", "rounds"])
@pytest.mark.one_in(2)
def test_chunks_of_any_size(case: str, chunk: str) -> None:
    """Field case C15: a tiny limit puts every parameter into a chunk of its own, tied ones included, once."""
    size = 256 if chunk == "smallest" else 1 << 20
    options = ElixirOptions(chunk_min=size, chunk_max=size, cache=None)
    expected = reference(case, 2, "fp32")
    budget = int(0.6 * (expected.memory.device_peak_bytes or 0))
    asked = settings(accumulate=2, clip=1.0, device_memory=budget if chunk == "smallest" else None, host_memory=1 << 30)
    run = train(start(elixir(), build(case), asked, options), tokens(STEPS, 2), CASES[case].loss)
    assert_equal(expected, run)
    layout = run.engine.layout  # type: ignore[attr-defined]
    placed = [p.parameter for s in layout.segments for p in s.placements]
    assert sorted(placed) == list(range(len(run.parameters))), "every parameter is stored once"
    sizes = [len(s.placements) for s in layout.segments]
    assert max(sizes) == 1 if chunk == "smallest" else len(sizes) <= 4


def kept_by_blocks(model: Any) -> dict[str, Any]:
    """All that the blocks of "stateful" keep: averages, counts, and how far their generators have come."""
    kept: dict[str, Any] = {name: buffer.clone() for name, buffer in model.named_buffers()}
    for number, block in enumerate(model.blocks):
        kept |= {f"{number}.calls": block.calls, f"{number}.own": block.own.get_state()}
    return kept


def assert_kept_alike(one: dict[str, Any], other: dict[str, Any]) -> None:
    """Bit for bit."""
    assert one.keys() == other.keys()
    different = [n for n, value in one.items() if not torch.equal(torch.as_tensor(value), torch.as_tensor(other[n]))]
    assert not different, f"differ: {different}"


@pytest.mark.parametrize("recompute", ["none", "full"])
@pytest.mark.parametrize("system", SYSTEMS.values(), ids=SYSTEMS)
@pytest.mark.one_in(2)
def test_recomputation_leaves_no_trace(system: Any, recompute: Any) -> None:
    """What a block counts, averages and draws is what it does without, however often it is run again."""
    model = build("stateful")
    train(start(system, model, settings(recompute=recompute)), tokens(STEPS, 1), squared_error)
    plain = reference("stateful", 1, "fp32", 0.0).engine.module
    assert_kept_alike(kept_by_blocks(plain), kept_by_blocks(model))


@pytest.mark.parametrize("recompute", ["none", "full"])
def test_what_blocks_keep_is_what_they_keep_in_plain_pytorch(recompute: Any) -> None:
    """The bound is zero: at a learning rate of 0 (p - 0 * update = p) both do the same operations on the same numbers."""
    expected = build("stateful")
    optimizer = torch.optim.AdamW(expected.parameters(), lr=0.0)
    for batch in tokens(STEPS, 1):
        squared_error(expected, batch[0], 30).backward()
        optimizer.step()
        optimizer.zero_grad()
    model = build("stateful")  # not before: it seeds the generators that blocks draw from
    train(start(RESIDENT, model, settings(recompute=recompute, adam=AdamSettings(lr=0.0))), tokens(STEPS, 1), squared_error)
    assert expected.blocks[0].calls == STEPS
    assert_kept_alike(kept_by_blocks(expected), kept_by_blocks(model))


class Graph(nn.Module):
    """Messages along the edges of a sparse matrix, kept in a buffer and given anew."""

    def __init__(self) -> None:
        super().__init__()
        self.layers = nn.ModuleList([nn.Linear(DIM, DIM) for _ in range(3)])
        self.register_buffer("edges", torch.eye(DIM).roll(1, 0).to_sparse())

    def forward(self, x: torch.Tensor, edges: torch.Tensor) -> torch.Tensor:
        for layer in self.layers:
            x = torch.relu(layer(torch.sparse.mm(edges, torch.sparse.mm(self.edges, x))))
        return x


@pytest.mark.filterwarnings("ignore:Sparse CSR")
@pytest.mark.parametrize("layout", [torch.sparse_coo, torch.sparse_csr])
def test_sparse_buffers_and_inputs(layout: torch.layout) -> None:
    edges = torch.eye(DIM).roll(2, 1).to_sparse(layout=layout)

    def run(system: Any, budget: int) -> Run:
        torch.manual_seed(0)
        engine = start(system, Graph(), settings(device_memory=budget))
        losses = [one_step(engine, batch, lambda e, ids, n: e(torch.eye(DIM), edges).sum()) for batch in tokens(3, 1)]
        return finished(engine, losses)

    expected = run(RESIDENT, 1 << 30)
    assert_equal(expected, run(elixir(), (expected.memory.device_peak_bytes or 0) * 2 // 3))


@cache
def losses_of_t5(system: str, recompute: Any) -> list[float]:
    torch.manual_seed(0)
    config = transformers.T5Config(
        vocab_size=64, d_model=16, d_kv=4, d_ff=32, num_layers=3, num_heads=2, dropout_rate=0.0, decoder_start_token_id=0
    )
    model, found = transformers.T5ForConditionalGeneration(config).train(), []
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2)
    options = dict(system=system, optimizer=optimizer, device="cpu", dtype="fp32", recompute=recompute)
    with systems.initialize(model, **options) as engine:
        for ids in tokens(4, 1)[:, 0]:
            output = engine(input_ids=ids % 64, labels=ids % 64)
            assert output.past_key_values.get_seq_length() == ids.shape[1]
            engine.backward(output.loss)
            engine.step()
            found.append(output.loss.item())
    return found


@pytest.mark.parametrize("system", ["resident", "elixir", "h3t"])
@pytest.mark.one_in(3)
def test_keys_and_values_that_are_kept_are_added_once(system: str) -> None:
    """T5's cross attention finds its keys in a cache when it is run again, if they are there; use_cache is the default."""
    assert losses_of_t5(system, "none" if system == "h3t" else "full") == losses_of_t5("resident", "none")


class MoodyBlock(nn.Linear):
    """Does something else once it was called a few times."""

    calls: ClassVar[list[int]] = []

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        self.calls.append(1)
        x = super().forward(x)
        return x.sin().cos() if len(self.calls) <= 2 else x


class Moody(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.blocks = nn.ModuleList([MoodyBlock(4, 4) for _ in range(2)])

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        for block in self.blocks:
            x = block(x)
        return x.sum()


@pytest.mark.parametrize("system", ["resident", "elixir"])
def test_a_block_that_does_not_repeat_itself_is_told_in_one_line(system: str) -> None:
    """The engine can take another step."""
    MoodyBlock.calls.clear()
    model = Moody()
    with systems.initialize(model, system=system, device="cpu", dtype="fp32", recompute="full") as engine:
        with pytest.raises(UnsupportedError, match="a recomputed block did not do again what it did in its forward") as caught:
            engine.backward(engine(torch.ones(2, 4)))
        assert "\n" not in str(caught.value)
        engine.backward(engine(torch.ones(2, 4)))
        engine.step()
