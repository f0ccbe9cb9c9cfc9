"""Updates of other optimizers than Adam, piece by piece: how a parameter is cut changes no bit; and what rules there are."""

from __future__ import annotations

from itertools import pairwise
from typing import Any, cast

import pytest
import torch
from hypothesis import given as drawn
from hypothesis import settings as draws
from hypothesis import strategies as st
from torch import nn

from systems.adam.cpu import cpu_kernel
from systems.optimizers import elementwise
from systems.optimizers.choice import rule_of, rules
from systems.optimizers.elementwise import ElementwiseRule
from tests.systems.test_optimizers import KEPT, OWN


@pytest.mark.parametrize("name", OWN)
@draws(max_examples=40, deadline=None)
@drawn(data=st.data())
def test_how_it_is_cut_changes_no_bit(name: str, data: st.DataObject) -> None:
    """Whole, in pieces of any size that begin anywhere, and into other memory: see Note [Bits that no cut changes]."""
    rule = next(each for each in rules().values() if each.hyperparameters is type(OWN[name]))
    assert isinstance(rule, ElementwiseRule)
    numel = data.draw(st.integers(1, 300))
    cuts = sorted({0, numel, *data.draw(st.lists(st.integers(0, numel), max_size=4))})
    dtype = data.draw(st.sampled_from([torch.float32, torch.bfloat16, torch.float16]))
    seed, factor = data.draw(st.integers(0, 99)), data.draw(st.sampled_from([1.0, 0.37]))
    luck = torch.Generator().manual_seed(seed)
    states = [torch.randn(numel, generator=luck) for _ in range(1 + KEPT[name] // 4)]
    gradient, kernel = torch.randn(numel, generator=luck).to(dtype), cast(Any, rule.kernel(cpu_kernel()))

    def after(pieces: list[tuple[int, int]], shift: int, *, aside: bool) -> list[torch.Tensor]:
        mine = [torch.cat([torch.zeros(shift), state])[shift:] for state in states]
        slot = torch.cat([torch.zeros(shift, dtype=dtype), gradient])[shift:]
        new = [torch.zeros(numel) for _ in mine] if aside else mine
        out = torch.zeros_like(slot) if aside else slot
        ranges = [rule.range(OWN[name], begin, end - begin, 2) for begin, end in pieces]
        kernel.update(*mine, gradient=slot, out=out, ranges=ranges, factor=factor, into=tuple(new) if aside else None)
        if aside:
            assert all(torch.equal(one, other) for one, other in zip(mine, states, strict=True)), "what is read stays"
            assert torch.equal(slot, gradient)
        return [*new, out]

    whole = after([(0, numel)], 0, aside=False)
    pieces = list(pairwise(cuts))
    with pytest.MonkeyPatch.context() as patch:
        for shift, piece in ((1, 1 << 18), (3, 7)):
            patch.setattr(elementwise, "PIECE", {"cpu": piece})
            for aside in (False, True):
                found = after(pieces, shift, aside=aside)
                assert all(torch.equal(one, other) for one, other in zip(whole, found, strict=True))
    assert torch.equal(whole[-1], whole[0].to(dtype)), "out is the new master, rounded"


def test_every_file_is_one_rule_and_is_found_by_its_class() -> None:
    assert list(rules()) == ["adamw", "lion", "sgd"]
    parameter = [nn.Parameter(torch.zeros(2))]
    for rule in rules().values():
        for kind in rule.taken:
            made: Any = kind(parameter, lr=0.1)  # type: ignore[call-arg]
            assert rule_of(made) is rule
            assert isinstance(rule.read(made, made.param_groups[0]), rule.hyperparameters)
