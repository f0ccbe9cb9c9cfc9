"""Weights that share memory under two names are refused by both, and what only looks like it is not."""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers
from torch import nn

from systems.errors import UnsupportedError
from systems.recipe.model.units import find_units
from tests.systems.models_small import build
from tests.systems.running import RESIDENT, settings, start
from tests.systems.setups import SYSTEMS

ALL = {"resident": (RESIDENT, RESIDENT.Options()), **SYSTEMS}


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.one, self.two, self.three = nn.Linear(8, 8), nn.Linear(8, 8, bias=False), nn.Linear(4, 8, bias=False)


def loaded_by_assignment(net: Any) -> None:
    net.two.weight = net.one.weight
    values = net.state_dict()
    net.two.weight = nn.Parameter(torch.zeros(8, 8))
    net.load_state_dict(values, assign=True)


def buffer(net: Any) -> None:
    net.register_buffer("copy", net.one.weight.detach().t())


def attribute(net: Any) -> None:
    net.two.seen = {"rows": [net.one.weight.data[2]]}


class Held:
    def __init__(self, rows: torch.Tensor) -> None:
        self.rows: list[Any] = [rows]

    def multiply(self, x: torch.Tensor) -> Any:
        return x @ self.rows[0]


def in_an_object(net: Any) -> None:
    net.held = Held(net.one.weight.data)


def of_a_method(net: Any) -> None:
    net.multiply = Held(net.one.weight.data).multiply


def in_a_partial(net: Any) -> None:
    net.multiply = functools.partial(nn.functional.linear, weight=net.one.weight.data)


def in_a_closure(net: Any) -> None:
    rows = net.one.weight.detach()[2:4]
    net.multiply = lambda x: x @ rows.t()


def in_a_hook(net: Any) -> None:
    rows = net.one.weight.detach()
    net.two.register_forward_hook(lambda module, args, output: output @ rows)


def frozen_view(net: Any) -> None:
    net.two.weight = nn.Parameter(net.one.weight.detach(), requires_grad=False)


def carried_view(net: Any) -> None:
    net.bits = nn.Parameter(net.one.weight.detach().view(torch.int32), requires_grad=False)


def interleaved(net: Any, *, shift: int) -> None:
    storage = torch.randn(8, 8)
    net.three.weight.data, net.four = storage[:, :4], nn.Parameter(storage[:, 4 - shift : 8 - shift])


def numpy_twice(net: Any) -> None:
    array = torch.randn(8, 8).numpy()
    net.one.weight.data, net.two.weight.data = torch.from_numpy(array), torch.from_numpy(array)


SHARED: dict[str, tuple[Callable[[Any], Any], str]] = {
    "two on one storage": (lambda n: setattr(n.two.weight, "data", n.one.weight.data), "one.weight.*two.weight"),
    "assigned": (loaded_by_assignment, "one.weight.*two.weight"),
    "slice": (lambda n: setattr(n.three.weight, "data", n.one.weight.data.view(-1)[20:52].view(8, 4)), "one.*three.weight"),
    "transposed": (lambda n: setattr(n.two.weight, "data", n.one.weight.data.t()), "one.weight.*two.weight"),
    "overlapping columns": (lambda n: interleaved(n, shift=1), "four.*three.weight|three.weight.*four"),
    "numpy": (numpy_twice, "one.weight.*two.weight"),
    "buffer": (buffer, "one.weight shares memory with buffer copy"),
    "attribute": (attribute, "one.weight shares memory with attribute two.seen"),
    "object": (in_an_object, "one.weight shares memory with attribute held"),
    "method": (of_a_method, "one.weight shares memory with attribute multiply"),
    "partial": (in_a_partial, "one.weight shares memory with attribute multiply"),
    "closure": (in_a_closure, "one.weight shares memory with attribute multiply"),
    "hook": (in_a_hook, "one.weight shares memory with a hook of two"),
    "frozen": (frozen_view, "one.weight shares memory with two.weight"),
    "integers": (carried_view, "one.weight shares memory with bits"),
    "expanded": (lambda n: setattr(n.two.weight, "data", torch.ones(8, 1).expand(8, 8)), "two.weight has elements that share"),
    "windows": (lambda n: setattr(n.two.weight, "data", torch.ones(99).as_strided((8, 8), (3, 1))), "two.weight has elements"),
}


@pytest.mark.parametrize("how", SHARED)
def test_shared_memory_is_refused_by_both_names(how: str) -> None:
    net = Net()
    change, says = SHARED[how]
    change(net)
    with pytest.raises(UnsupportedError, match=says) as caught:
        find_units(net)
    assert "\n" not in str(caught.value)


@pytest.mark.parametrize("system", ALL)
def test_every_system_asks(system: str) -> None:
    chosen, options = ALL[system]
    net = nn.Sequential(nn.Linear(8, 8), nn.Linear(8, 8))
    net[0].weight.data = net[1].weight.data
    with pytest.raises(UnsupportedError, match=r"parameter 0\.weight shares memory with 1\.weight"):
        start(chosen, net, settings(), options)


def flat(net: Any) -> None:
    """As cuDNN lays out a recurrent network, and FSDP a module."""
    values, start_at = torch.randn(sum(p.numel() for p in net.parameters())), 0
    for parameter in net.parameters():
        parameter.data = values[start_at : start_at + parameter.numel()].view(parameter.shape)
        start_at += parameter.numel()


def all_frozen_views(net: Any) -> None:
    net.two.weight = nn.Parameter(net.one.weight.detach(), requires_grad=False)
    net.one.weight.requires_grad_(False)
    net.seen = net.one.weight.detach()


def recurrent(net: Any) -> None:
    net.memory = nn.LSTM(8, 8)  # keeps its own parameters in a list


def kept_elsewhere(net: Any) -> None:
    """The Parameter itself, other memory, other modules, and what goes round in circles."""
    held = Held(net.one.weight)
    held.rows += [torch.ones(8, 8), net.two, held]
    net.held, net.forward_again = held, functools.partial(type(net).forward, net)
    net.two.register_forward_hook(lambda module, args, output: output + held.rows[1][0])


ALLOWED: dict[str, Callable[[Any], Any]] = {
    "tied": lambda n: setattr(n.two, "weight", n.one.weight),
    "kept in a list": lambda n: setattr(n, "mine", [n.one.weight]),
    "flat": flat,
    "columns": lambda n: interleaved(n, shift=0),
    "kept elsewhere": kept_elsewhere,
    "all frozen": all_frozen_views,
    "recurrent": recurrent,
    "spectral norm": lambda n: nn.utils.spectral_norm(n.one),
    "weight norm": lambda n: nn.utils.weight_norm(n.one),
    "parametrized": lambda n: nn.utils.parametrizations.spectral_norm(n.one),
}


@pytest.mark.filterwarnings("ignore:.*weight_norm:FutureWarning")
@pytest.mark.parametrize("how", ALLOWED)
def test_what_is_trained_as_one_or_apart_is_not_refused(how: str) -> None:
    net = Net()
    ALLOWED[how](net)
    assert find_units(net).index.parameters
    assert find_units(copy.deepcopy(net.to("meta") if how == "flat" else Net())).index.parameters


@pytest.mark.parametrize("tied", [True, False])
@pytest.mark.parametrize("kind", ["gpt2", "bert", "t5"])
def test_a_model_that_a_library_has_loaded_is_not_refused(kind: str, tied: bool, tmp_path: Path) -> None:
    """Its tensors may be places in one mapped file."""
    model = library_model(kind, tied)
    model.save_pretrained(tmp_path)
    loaded = type(model).from_pretrained(tmp_path)
    assert len(find_units(loaded).index.parameters) == len(list(model.parameters()))


def library_model(kind: str, tied: bool) -> Any:
    if kind == "gpt2":
        return build("gpt2", tied=tied)
    small = {"vocab_size": 31, "tie_word_embeddings": tied}
    if kind == "bert":
        sizes = {"hidden_size": 8, "num_hidden_layers": 2, "num_attention_heads": 2, "intermediate_size": 8}
        return transformers.BertForMaskedLM(transformers.BertConfig(**small, **sizes))
    sizes = {"d_model": 8, "d_kv": 4, "d_ff": 8, "num_layers": 2, "num_heads": 2}
    return transformers.T5ForConditionalGeneration(transformers.T5Config(**small, **sizes))
