"""Chunks for a host that is short: what it lacks stays on the device by whole chunks, of a size that keeps little more."""

from __future__ import annotations

from dataclasses import replace
from functools import partial
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from systems.planning.layout import ModelIndex
from systems.planning.plan import UpdateRule
from systems.planning.policy.chunks import UNUSED_SHARE, for_short_host
from systems.planning.policy.homes import host_need, left_unused
from systems.strategies import elixir, patrickstar
from systems.strategies.elixir.chunks import ElixirChunker
from systems.strategies.elixir.options import ElixirOptions
from systems.strategies.patrickstar.chunks import PatrickStarChunker
from tests.planning.synthetic import PLENTY, context, model_of, models

RULE = UpdateRule.AFTER_NORM
EXPERTS = model_of([(None, [16_000]), *((number, [1024] * 4 + [57_344, 28_672]) for number in range(6)), (None, [16_000])])
"""A mixture with the experts of a layer in two tensors, which are nearly all of it."""
CHUNKERS = [(elixir.STRATEGY, ElixirChunker), (patrickstar.STRATEGY, PatrickStarChunker)]


def short_by(index: ModelIndex, share: float, *, device: int = PLENTY) -> Any:
    """A context whose host has all of the model but this share."""
    whole = context(device=device)
    layout = elixir.STRATEGY(ElixirOptions(), whole).layout(index)
    need = host_need(replace(layout, moments=whole.moments), whole)
    return replace(whole, host_budget=int((1 - share) * need))


@pytest.mark.parametrize(("strategy", "chunker"), CHUNKERS)
def test_a_mixture_keeps_little_more_than_the_host_lacks(strategy: Any, chunker: Any) -> None:
    given = short_by(EXPERTS, 0.07 if chunker is ElixirChunker else 0.03, device=3_000_000)
    options = strategy.Options()
    first, layout = chunker(EXPERTS, options, given), strategy(options, given).layout(EXPERTS)
    before, after = left_unused(first.layout, given, RULE), left_unused(layout, given, RULE)
    assert before is not None and after is not None
    assert before * UNUSED_SHARE > given.device_budget, "void: chunks that waste least leave little"
    others = [left_unused(chunker(EXPERTS, options, given, size).layout, given, RULE) for size in first.candidates()]
    assert after == min(left for left in others if left is not None)
    assert after < 0.6 * before


@pytest.mark.parametrize(("strategy", "chunker"), CHUNKERS)
def test_the_papers_search_is_left_as_it_is(strategy: Any, chunker: Any) -> None:
    given = short_by(EXPERTS, 0.07)
    options = strategy.Options(variant="paper")
    assert strategy(options, given).cut(EXPERTS) == chunker(EXPERTS, options, given).layout


@settings(max_examples=60, deadline=None)
@given(models(groups=True), st.floats(-0.1, 0.9), st.sampled_from([60_000, 400_000, PLENTY]), st.sampled_from(CHUNKERS))
def test_the_size_is_another_only_where_that_leaves_less_unused(
    index: ModelIndex, share: float, device: int, which: tuple[Any, Any]
) -> None:
    strategy, chunker = which
    short, options = short_by(index, share, device=PLENTY), strategy.Options()
    here = replace(short, device_budget=device)
    make = partial(chunker, index, options, here)
    first, found = make(None), for_short_host(make, here, RULE)
    left, now = left_unused(first.layout, here, RULE), left_unused(found.layout, here, RULE)
    fits = host_need(replace(first.layout, moments=here.moments), here) <= here.host_budget
    if fits or (left is not None and left * UNUSED_SHARE <= device):
        assert found.layout == first.layout
    elif left is not None:
        assert now is not None and now <= left
    assert sorted(p.parameter for s in found.layout.segments for p in s.placements) == [p.index for p in index.parameters]
