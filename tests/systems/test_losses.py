"""The chunked causal loss: transformers' value and gradients, resident's bits under every plan, and never all logits."""

from __future__ import annotations

import os
import re
import subprocess
import sys
from functools import cache, partial
from itertools import product
from pathlib import Path
from typing import Any

import hypothesis
import pytest
import torch
import torch.nn.functional as F
import transformers
from hypothesis import example, given
from hypothesis import strategies as st
from torch import nn
from transformers.loss.loss_utils import ForCausalLMLoss

import systems
from systems import registry
from systems.errors import OutOfMemoryError
from systems.losses import IGNORED, chunked_causal_loss
from systems.planning import hardware
from systems.planning.allowance import CUDA
from systems.prediction.forecast import Observations, Question, fits, forecast
from systems.prediction.meta_step import Unfilled
from systems.ranks.loopback import as_threads
from systems.ranks.ranks import Ranks
from tests.systems.every import STRATEGIES
from tests.systems.models_small import build, tokens
from tests.systems.running import RESIDENT, Run, assert_equal, finished, settings, start, train
from tests.systems.setups import SYSTEMS, in_turn

STEPS, CHUNK = 3, 7  # which divides no batch's tokens
CLOSE = 1e-6
MIB, GIB = 1 << 20, 1 << 30
ROOT = Path(__file__).resolve().parents[2]
DOCUMENT = ROOT / "docs/losses.md"


# ---- its value and its gradients


def sizes() -> st.SearchStrategy[tuple[int, int, int, int]]:
    """Sequences, tokens of each, vocabulary, and tokens of a chunk: of one, in part, of all and of more."""
    return st.tuples(st.integers(1, 3), st.integers(1, 17), st.integers(2, 40), st.integers(1, 60))


@hypothesis.settings(deadline=None)
@given(sizes=sizes(), ignored=st.floats(0, 1), count=st.sampled_from([None, "int", "tensor"]), seed=st.integers(0, 99))
@example(sizes=(2, 1, 5, 3), ignored=0.0, count="int", seed=0)  # no token has a next one
@example(sizes=(2, 9, 5, 3), ignored=1.0, count="int", seed=0)
def test_value_and_gradients_are_transformers_own(sizes: tuple[int, ...], ignored: float, count: str | None, seed: int) -> None:
    batch, length, vocabulary, chunk = sizes
    luck = torch.Generator().manual_seed(seed)
    labels = torch.randint(vocabulary, (batch, length), generator=luck)
    labels[torch.rand(batch, length, generator=luck) < ignored] = IGNORED
    total = {None: None, "int": 2 * batch * length, "tensor": torch.tensor(2 * batch * length)}[count]
    found = []
    for own in (True, False):
        luck.manual_seed(seed)
        hidden = torch.randn(batch, length, 8, generator=luck, requires_grad=True)
        weight = torch.randn(vocabulary, 8, generator=luck, requires_grad=True)
        if own:
            loss = ForCausalLMLoss(F.linear(hidden, weight), labels, vocabulary, num_items_in_batch=total)
        else:
            loss = chunked_causal_loss(partial(F.linear, weight=weight), hidden, labels, total, chunk=chunk)
        loss.backward()
        found.append((loss.detach(), hidden.grad, weight.grad))
    (expected, *_), (got, *_) = found
    assert got.dtype == torch.float32 and got.shape == ()
    nothing = bool((labels[:, 1:] == IGNORED).all())
    assert bool(got.isnan()) is bool(expected.isnan()) is (nothing and total is None)
    for theirs, ours in zip(*found, strict=True):
        torch.testing.assert_close(ours, theirs, equal_nan=True, rtol=CLOSE, atol=CLOSE)


def test_logits_of_16_bits_are_worked_on_in_fp32() -> None:
    luck = torch.Generator().manual_seed(0)
    hidden, weight = (torch.randn(*shape, generator=luck).bfloat16() for shape in ((2, 9, 8), (300, 8)))
    labels = torch.randint(300, (2, 9), generator=luck)
    expected = ForCausalLMLoss(F.linear(hidden, weight), labels, 300)
    got = chunked_causal_loss(partial(F.linear, weight=weight), hidden, labels, chunk=5)
    torch.testing.assert_close(got, expected, rtol=CLOSE, atol=CLOSE)


def test_what_does_not_fit_is_refused_in_words() -> None:
    head, hidden = nn.Linear(4, 9), torch.zeros(2, 5, 4)
    with pytest.raises(ValueError, match=r"labels are \(2, 4\) and hidden is \(2, 5, 4\): give .* neither of them shifted"):
        chunked_causal_loss(head, hidden, torch.zeros(2, 4, dtype=torch.int64))
    with pytest.raises(ValueError, match=r"labels are \(\) and hidden is \(4,\)"):
        chunked_causal_loss(head, hidden[0, 0], torch.tensor(1))
    with pytest.raises(ValueError, match=r"chunk is 0: give the number of tokens"):
        chunked_causal_loss(head, hidden, torch.zeros(2, 5, dtype=torch.int64), chunk=0)


# ---- under every plan


class Chunked(transformers.OPTForCausalLM):
    """Its forward ends in the loss, by the module of the head."""

    def forward(self, input_ids: torch.Tensor, count: int) -> torch.Tensor:
        return chunked_causal_loss(self.head, self.model(input_ids=input_ids)[0], input_ids, count, chunk=CHUNK)

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return self.lm_head(hidden)


class ByHand(Chunked):
    """The head is a function of the embedding's weight."""

    def head(self, hidden: torch.Tensor) -> torch.Tensor:
        return F.linear(hidden, self.model.decoder.embed_tokens.weight)


HEADS = ("tied", "untied", "by hand", "by hand and said")


def made(head: str) -> nn.Module:
    """As models_small's OPT."""
    model = build("opt", tied=head != "untied")
    model.__class__ = Chunked if head in ("tied", "untied") else ByHand
    if head == "by hand and said":
        systems.uses(model, model.model.decoder.embed_tokens.weight)
    return model


def loss_of(model: Any, ids: torch.Tensor, count: int) -> torch.Tensor:
    found: torch.Tensor = model(input_ids=ids, count=count)
    return found


@cache
def reference(head: str, recompute: str, accumulate: int, dtype: str = "fp32") -> Run:
    asked = settings(accumulate=accumulate, recompute=recompute, dtype=dtype, clip=0.5)
    return train(start(RESIDENT, made(head), asked), tokens(STEPS, accumulate), loss_of)


WORK = list(product(HEADS, ["none", "full"], [1, 2], ["fp32", "bf16"]))


@pytest.mark.parametrize(("system", "head", "recompute", "accumulate", "dtype"), in_turn(SYSTEMS, WORK, each=3))
@pytest.mark.one_in(19)
def test_every_strategy_has_resident_s_bits(system: str, head: str, recompute: str, accumulate: int, dtype: str) -> None:
    expected = reference(head, recompute, accumulate, dtype)
    chosen, options = SYSTEMS[system]
    budget = int(0.75 * (expected.memory.device_peak_bytes or 0))
    asked = settings(accumulate=accumulate, recompute=recompute, dtype=dtype, clip=0.5, device_memory=budget)
    run = train(start(chosen, made(head), asked, options), tokens(STEPS, accumulate), loss_of)
    assert_equal(expected, run)
    assert 0 < (run.memory.device_peak_bytes or 0) <= budget and run.per_step[-1]["h2d_bytes"] > 0


@pytest.mark.parametrize("system", ["resident", *SYSTEMS])
def test_an_evaluation_has_the_value_that_the_model_has_itself(system: str) -> None:
    chosen, options = SYSTEMS.get(system, (RESIDENT, None))
    micro = tokens(1, 1)[0, 0]
    with torch.no_grad():
        expected = loss_of(made("tied"), micro, 30)
        with start(chosen, made("tied"), settings(), options) as engine:
            assert loss_of(engine, micro, 30) == expected == loss_of(engine.module, micro, 30)


@pytest.mark.parametrize("system", ["resident", *SYSTEMS])
@pytest.mark.one_in(4)
def test_a_micro_batch_without_a_label_leaves_its_step_as_it_was(system: str) -> None:
    """transformers' own loss is a mean over none there and no number; its gradient is 0, so that the step is not skipped."""
    chosen, options = SYSTEMS.get(system, (RESIDENT, None))
    found = []
    for without in (True, False):
        with start(chosen, build("opt"), settings(accumulate=2), options) as engine:
            for ids in tokens(STEPS, 1)[:, 0]:
                engine.backward(engine(input_ids=ids, labels=ids).loss)
                if without:
                    loss = engine(input_ids=ids, labels=torch.full_like(ids, IGNORED)).loss
                    assert loss.isnan()
                    engine.backward(loss)
                engine.step()
            found.append((engine.state_dict(), engine.outcomes))
    (weights, outcomes), (expected, alone) = found
    assert outcomes == alone and not any(outcome.skipped for outcome in outcomes)
    assert all(torch.equal(weights[name], expected[name]) for name in expected)


@pytest.mark.parametrize(("strategy", "head", "recompute"), in_turn(STRATEGIES, list(product(HEADS, ["none", "full"])), each=2))
@pytest.mark.one_in(8)
def test_two_ranks_have_the_bits_of_one_that_accumulates(strategy: str, head: str, recompute: str) -> None:
    expected, models, batches = reference(head, recompute, 2), [made(head), made(head)], tokens(STEPS, 2)
    asked = settings(ranks=2, recompute=recompute, clip=0.5)

    def work(ranks: Ranks) -> Run:
        torch.set_num_threads(1)
        engine = STRATEGIES[strategy].initialize(models[ranks.rank], asked, STRATEGIES[strategy].Options(), ranks=ranks)
        for batch in batches:
            engine.backward(loss_of(engine, batch[ranks.rank], batch[:, :, 1:].numel()))
            engine.step()
        return finished(engine, expected.losses)

    for run in as_threads(2, work):
        assert_equal(expected, run)
        assert not run.counters.get("fallbacks")


# ---- its memory


class Llama(transformers.LlamaForCausalLM):
    """chunk: 0 for transformers' own loss."""

    chunk = 0

    def forward(self, input_ids: torch.Tensor, labels: torch.Tensor) -> torch.Tensor:
        if not self.chunk:
            return super().forward(input_ids=input_ids, labels=labels).loss
        return chunked_causal_loss(self.lm_head, self.model(input_ids)[0], labels, chunk=self.chunk)


def llama(chunk: int, **shape: int) -> Llama:
    model = Llama(transformers.LlamaConfig(**shape, tie_word_embeddings=True, use_cache=False, attn_implementation="sdpa"))
    model.chunk = chunk
    return model.train()


LLAMA_3B = dict(  # Llama 3.2 3B
    hidden_size=3072,
    intermediate_size=8192,
    num_hidden_layers=28,
    num_attention_heads=24,
    num_key_value_heads=8,
    vocab_size=128_256,
    max_position_embeddings=8192,
)


@cache
def observed(chunk: int, *, kept: bool = False) -> Observations:
    """kept: the loop has the model's output, logits too, until its backward is over, as `output = engine(...)` does."""

    def loss(call: Any, batch: Any, count: int) -> torch.Tensor:
        if not kept:
            return call(**batch)
        output = transformers.LlamaForCausalLM.forward(call, **batch)
        output.loss.output = output
        return output.loss

    with Unfilled(), torch.device("meta"):
        model = llama(chunk, **LLAMA_3B)
    return Observations(model, loss)


def asked(gib: int) -> Question:
    profile = hardware.load("h100-80g-x1")
    return Question(
        profile=profile,
        device_memory=gib * GIB,
        host_memory=profile.host_memory_bytes.value,
        ranks=1,
        batch_size=1,
        seq_len=8192,
        recompute="full",
        allowance=CUDA,
    )


@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.one_in(4)
def test_llama_3b_trains_with_8k_tokens_where_its_own_loss_has_no_room(strategy: str) -> None:
    """Its logits are 2 GB in bf16 and 4 in fp32, of which transformers' loss and its gradient have three."""
    system = registry.get(strategy)
    assert not fits(system, system.Options(), asked(12), observed(0))
    assert fits(system, system.Options(), asked(6), observed(1024))


def test_the_document_has_the_forecasts_and_16_gib_are_too_small_where_the_loop_keeps_the_logits() -> None:
    elixir = registry.get("elixir")
    kept, own, chunked = (
        forecast(elixir, elixir.Options(), asked(16), each) for each in (observed(0, kept=True), observed(0), observed(1024))
    )
    assert not kept.fits and chunked.fits
    told = re.findall(r"\| (\d+\.\d) GiB \|$", DOCUMENT.read_text(), flags=re.MULTILINE)
    assert told == [f"{each.least_device_bytes / GIB:.1f}" for each in (kept, own, chunked)]


@pytest.mark.long
def test_the_document_s_examples_run_as_shown(tmp_path: Path) -> None:
    blocks = re.findall(r"```python\n(.*?)```", DOCUMENT.read_text(), flags=re.DOTALL)
    assert len(blocks) == 2
    script = tmp_path / "losses.py"
    script.write_text("".join(blocks))
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"}
    done = subprocess.run(
        [sys.executable, str(script)], cwd=tmp_path, env=environment, capture_output=True, text=True, timeout=250, check=False
    )
    assert done.returncode == 0, done.stderr[-2000:]
    assert 0 < int(done.stdout) <= 16 * MIB


SMALL = dict(
    hidden_size=64,
    intermediate_size=128,
    num_hidden_layers=2,
    num_attention_heads=4,
    vocab_size=8192,
    max_position_embeddings=512,
)


def small(chunk: int, system: Any, options: Any, budget: int) -> Run:
    torch.manual_seed(0)
    engine = start(system, llama(chunk, **SMALL), settings(device_memory=budget, recompute="full"), options)
    ids = torch.randint(8192, (STEPS, 1, 1, 512), generator=torch.Generator().manual_seed(3))
    return train(engine, ids, lambda call, micro, count: call(input_ids=micro, labels=micro))


@pytest.mark.parametrize("system", SYSTEMS)
@pytest.mark.one_in(7)
def test_a_budget_that_all_logits_exceed_is_enough(system: str) -> None:
    """16 MiB of logits, and as much again for each that the loss makes of them; 2 MiB of embeddings."""
    chosen, options = SYSTEMS[system]
    with pytest.raises(OutOfMemoryError, match="device"):
        small(0, chosen, options, 28 * MIB)
    run = small(64, chosen, options, 28 * MIB)
    assert_equal(small_resident(), run)
    assert (run.memory.device_peak_bytes or 0) <= 28 * MIB < 3 * 16 * MIB


@cache
def small_resident() -> Run:
    return small(64, RESIDENT, None, GIB)
