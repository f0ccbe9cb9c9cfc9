"""Tables of sizes, overrides, and the ways to name a model."""

from __future__ import annotations

import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from models import registry
from models.activated import count_parameters
from models.objective import OBJECTIVES
from models.shape import ModelShape
from systems.recipe.model.blocks import find_blocks

# As counted from the checkpoints their authors published, or by the closed form for sizes never published.
PUBLISHED = {
    "gpt2": 124_439_808,
    "gpt2-medium": 354_823_168,
    "gpt2-large": 774_030_080,
    "gpt2-xl": 1_557_611_200,
    "opt-125m": 125_239_296,
    "opt-350m": 331_196_416,
    "opt-1.3b": 1_315_758_080,
    "opt-2.7b": 2_651_596_800,
    "opt-6.7b": 6_658_473_984,
    "opt-13b": 12_853_473_280,
    "opt-30b": 29_974_540_288,
    "opt-66b": 65_719_701_504,
    "ps-10b": 10_279_239_680,
    "bert-base": 109_514_298,
    "bert-large": 335_174_458,
    "t5-small": 60_506_624,
    "t5-base": 222_903_552,
    "t5-large": 737_668_096,
    "t5-3b": 2_851_598_336,
    "t5-11b": 11_307_321_344,
    "albert-base": 11_221_680,
    "mixtral-8x7b": 46_702_792_704,
    "qwen3-30b-a3b": 30_532_122_624,
}
TINY = (
    *("opt-tiny", "gpt-tiny", "bert-tiny", "t5-tiny", "albert-tiny"),
    *("pr-moe-tiny", "t5-moe-tiny", "mixtral-tiny", "qwen3-moe-tiny"),
)


@pytest.mark.parametrize(("name", "parameters"), PUBLISHED.items())
@pytest.mark.one_in(3)
def test_parameter_counts_are_the_published_ones(name: str, parameters: int, on_meta: Callable[..., nn.Module]) -> None:
    assert sum(p.numel() for p in on_meta(name).parameters()) == parameters


def test_albert_by_closed_form() -> None:
    """One layer's weights whatever the depth: 4 h^2 + 4 h of attention, 2 h f + f + h of feed-forward, 4 h of norms."""
    for name in ("albert-base", "albert-large", "albert-xlarge", "albert-xxlarge"):
        s = registry.resolve(name)
        h, f, e, v = s.hidden_size, 4 * s.hidden_size, 128, 30000
        layer = 4 * h * h + 4 * h + 2 * h * f + f + h + 4 * h
        embedding = (v + 512 + 2) * e + 2 * e + e * h + h
        # the head's transform and bias
        assert registry.built_parameter_count(s) == layer + embedding + h * e + e + 2 * e + v


@pytest.mark.parametrize("name", ["opt-175b", "gpt3-175b", "gpt3-13b", "ps-4b", "gpt-20b"])
def test_parameter_count_by_closed_form(name: str) -> None:
    s = registry.resolve(name)
    assert s.max_positions is not None
    h, positions = s.hidden_size, s.max_positions + (2 if s.family == "opt" else 0)
    block = 12 * h * h + 13 * h  # 4 h^2 + 4 h of attention, 8 h^2 + 5 h of feed-forward, 4 h of norms
    assert registry.parameter_count(s) == s.num_layers * block + (s.vocab_size + positions) * h + 2 * h


_SOME = st.integers(1, 3)


@settings(max_examples=40, deadline=None)
@given(name=st.sampled_from(TINY), draw=st.data())
def test_a_familys_formula_counts_what_it_builds(name: str, draw: st.DataObject) -> None:
    """Whatever is set: every field that changes the number, at sizes that are quick to build."""
    tiny = registry.resolve(name)
    heads = draw.draw(_SOME)
    changes: dict[str, object] = {
        "num_layers": draw.draw(st.integers(0, 3)),
        "num_heads": heads,
        "hidden_size": heads * 2 * draw.draw(_SOME),
        "ffn_size": draw.draw(st.integers(1, 9)),
        "vocab_size": draw.draw(st.integers(5, 40)),
        "tied": draw.draw(st.booleans()),
    }
    if tiny.max_positions is not None:
        changes["max_positions"] = draw.draw(st.integers(3, 12))
    own: dict[str, dict[str, st.SearchStrategy[object]]] = {
        "opt": {"embedding_size": st.integers(1, 9), "norm_first": st.booleans()},
        "bert": {"token_types": _SOME},
        "albert": {"embedding_size": st.integers(1, 9), "token_types": _SOME, "layers_per_group": _SOME, "num_groups": _SOME},
        "t5": {"decoder_layers": _SOME, "head_size": _SOME, "gated": st.booleans(), "relative_buckets": st.integers(4, 9)},
        "pr-moe": {"experts": _SOME},
        "mixtral": {"experts": st.integers(2, 4)},
        "qwen3-moe": {"experts": st.integers(2, 4), "head_size": _SOME.map(lambda half: 2 * half)},
    }
    own["t5-moe"] = own["t5"] | own["pr-moe"]
    for field, values in own.get(tiny.family, {}).items():
        if draw.draw(st.booleans()):
            changes[field] = draw.draw(values)
    if tiny.family in ("mixtral", "qwen3-moe"):
        changes["key_value_heads"] = 1
    if tiny.family == "albert":
        changes["num_layers"] = 3
    shape = tiny.with_overrides(changes)
    assert registry.families()[shape.family].parameters is not None
    assert registry.parameter_count(shape) == registry.built_parameter_count(shape)


@pytest.mark.slow
def test_named_sizes_have_as_many_parameters_as_their_formula_says() -> None:
    for name in registry.names():
        shape = registry.resolve(name)
        assert registry.parameter_count(shape) == count_parameters(registry.build(shape)).total, name


def test_every_family_has_a_formula() -> None:
    assert [family.name for family in registry.families().values() if family.parameters is None] == []


SOME_LAYERS = 4


@pytest.mark.parametrize(
    ("name", "layers"),
    [
        *((name, None) for name in PUBLISHED),
        *((name, SOME_LAYERS) for name in registry.names() if name not in PUBLISHED),
        *(pytest.param(name, None, marks=pytest.mark.slow) for name in registry.names() if name not in PUBLISHED),
    ],
)
@pytest.mark.one_in(2)
def test_every_size_builds_without_memory(name: str, layers: int | None, on_meta: Callable[..., nn.Module]) -> None:
    given = {} if layers is None else {"num_layers": min(layers, registry.resolve(name).num_layers)}
    shape, module = registry.resolve(name, given), on_meta(name, **given)
    assert all(p.is_meta and p.dtype == torch.float32 for p in module.parameters())
    assert not any(b.is_meta for b in module.buffers())
    assert module.training and shape.dropout == 0.0
    of_family = {"t5": 2 * shape.num_layers, "t5-moe": 2 * shape.num_layers, "albert": getattr(shape, "num_groups", None)}
    assert len(find_blocks(module)) == of_family.get(shape.family, shape.num_layers)
    assert (module.get_output_embeddings().weight is module.get_input_embeddings().weight) == shape.tied  # type: ignore[operator]
    assert not any(m.p for m in module.modules() if isinstance(m, nn.Dropout))
    assert not getattr(module.config, "use_cache", False)
    assert module.config._attn_implementation == "sdpa"  # type: ignore[union-attr]


def test_opt_350m_is_the_odd_one_out() -> None:
    module = registry.build(registry.resolve("opt-350m"))
    names = dict(module.named_parameters())
    assert names["model.decoder.embed_tokens.weight"].shape == (50272, 512)
    assert names["model.decoder.project_in.weight"].shape == (1024, 512)
    assert "model.decoder.final_layer_norm.weight" not in names


@pytest.mark.parametrize("name", TINY)
def test_tiny_sizes(name: str) -> None:
    shape = registry.resolve(name)
    assert shape.num_layers * (2 if name.startswith("t5") else 1) >= 6 and shape.hidden_size == 128
    assert (shape.batch_size, shape.seq_len) == (2, 16)
    odd = [n for n, p in registry.build(shape).named_parameters() if p.numel() % 128]
    assert all(name.endswith("coefficient.bias") for name in odd), "of two elements, beside a mixture"


@pytest.mark.parametrize("name", TINY)
@pytest.mark.parametrize(("dtype", "state_bytes"), [(torch.float32, 20), (torch.bfloat16, 16)])
def test_model_states_dominate_in_tiny_sizes(
    name: str, dtype: torch.dtype, state_bytes: int, in_memory: Callable[[nn.Module], nn.Module]
) -> None:
    """Otherwise half of the device's memory could not hold the activations, and nothing could be shown on it."""
    shape = registry.resolve(name)
    module = in_memory(registry.build(shape)).to(dtype)
    parameters = {p.untyped_storage().data_ptr() for p in module.parameters()}
    saved: dict[int, int] = {}

    def note(tensor: torch.Tensor) -> torch.Tensor:
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in parameters:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    for p in module.parameters():
        p.data.zero_()
    ids = torch.zeros(shape.batch_size, shape.seq_len, dtype=torch.int64)
    with torch.autograd.graph.saved_tensors_hooks(note, lambda t: t):
        output = module(**OBJECTIVES[shape.objective].inputs({"input_ids": ids, "labels": ids}))
    states = registry.parameter_count(shape) * state_bytes
    assert output.logits.shape == (shape.batch_size, shape.seq_len, shape.vocab_size)
    assert states / (states + sum(saved.values())) >= 0.8


def test_overrides_take_values_and_text() -> None:
    shape = registry.resolve("opt-125m", {"num_layers": "3", "tied": "false", "dropout": 0.1, "max_positions": 64})
    assert (shape.num_layers, shape.tied, shape.dropout, shape.max_positions) == (3, False, 0.1, 64)
    module = registry.build(shape)
    assert len(find_blocks(module)) == 3
    assert module.lm_head.weight is not module.get_input_embeddings().weight  # type: ignore[operator, union-attr]
    assert registry.parameter_count(shape) == 12 * 3 * 768**2 + 13 * 3 * 768 + (2 * 50272 + 66 + 2) * 768


@pytest.mark.parametrize(
    ("overrides", "said"),
    [
        ({"num_layer": 3}, "did you mean num_layers"),
        ({"num_layers": "three"}, "a whole number, not 'three'"),
        ({"num_layers": 2.5}, "a whole number"),
        ({"num_layers": True}, "a whole number"),
        ({"num_layers": -1}, "at least 0, not -1"),
        ({"vocab_size": 0}, "at least 1"),
        ({"tied": "perhaps"}, "true or false"),
        ({"dropout": "1.5"}, r"\[0, 1\)"),
        ({"num_heads": 7}, "does not divide by num_heads 7: the nearest width that does is 770"),
        ({"max_positions": None}, "a whole number"),
        ({"family": "gpt"}, "no field 'family'"),
        ({"num_layers": "100000000000"}, "num_layers must be at most 65536"),
        ({"hidden_size": "12800000000000000000000"}, "hidden_size must be at most"),
    ],
)
def test_bad_overrides_are_one_line(overrides: dict[str, object], said: str) -> None:
    with pytest.raises(ValueError, match=said) as error:
        registry.resolve("opt-125m", overrides)
    assert "\n" not in str(error.value)


def test_unknown_model_names_near_ones() -> None:
    with pytest.raises(ValueError, match="unknown model 'opt-1.3': did you mean opt-1.3b"):
        registry.resolve("opt-1.3")


def test_runs_that_cannot_be() -> None:
    shape = registry.resolve("opt-tiny")
    shape.check_run(batch_size=1, seq_len=128)
    with pytest.raises(ValueError, match="positions for 128 tokens, the sequence length is 129"):
        shape.check_run(batch_size=1, seq_len=129)
    with pytest.raises(ValueError, match="batch size"):
        shape.check_run(batch_size=0, seq_len=16)
    with pytest.raises(ValueError, match="at least 2 tokens"):
        shape.check_run(batch_size=1, seq_len=1)


USER_MODULE = """
import torch
from torch import nn

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed = nn.Embedding(300, 8)
        self.blocks = nn.ModuleList(nn.Linear(8, 8) for _ in range(3))
        self.norm = nn.LayerNorm(8)
        self.head = nn.Linear(8, 300)

    def forward(self, input_ids):
        x = self.embed(input_ids)
        for block in self.blocks:
            x = x + block(x)
        return self.head(self.norm(x))

def make():
    return Net()

def make_meta():
    with torch.device("meta"):
        return Net()

def broken():
    raise RuntimeError("no such\\nthing")
"""


@pytest.fixture
def user_module(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> str:
    (tmp_path / "user_net.py").write_text(USER_MODULE)
    monkeypatch.chdir(tmp_path)
    monkeypatch.delitem(sys.modules, "user_net", raising=False)
    return "user_net"


def test_module_function_keeps_its_own_weights(user_module: str) -> None:
    shape = registry.resolve(f"{user_module}:make", {"seq_len": 12})
    assert (shape.num_layers, shape.hidden_size, shape.vocab_size, shape.max_positions) == (3, 8, 300, None)
    assert (shape.num_heads, shape.seq_len) == (None, 12)
    module = registry.build(shape)
    assert not any(p.is_meta for p in module.parameters())
    assert registry.initial_weights(shape, 0) is None


def test_module_function_on_meta_starts_by_the_general_law(user_module: str) -> None:
    shape = registry.resolve(f"{user_module}:make_meta")
    fill = registry.initial_weights(shape, 0)
    assert fill is not None
    filled = {n: torch.empty(p.shape) for n, p in registry.build(shape).named_parameters()}
    for name, tensor in filled.items():
        fill(name, tensor)
    assert torch.equal(filled["norm.weight"], torch.ones(8)) and not filled["head.bias"].any()
    assert 0.01 < filled["head.weight"].std().item() < 0.03


def test_module_function_failures_are_one_line(user_module: str) -> None:
    for name, said in {
        "nowhere_to_be_found:make": "No module named",
        f"{user_module}:absent": "has no attribute 'absent'",
        f"{user_module}:broken": "RuntimeError: no such",
        "builtins:dict": "returned dict",
    }.items():
        with pytest.raises(ValueError, match=said) as error:
            registry.resolve(name)
        assert "\n" not in str(error.value)
    with pytest.raises(ValueError, match="builds its own shape"):
        registry.resolve(f"{user_module}:make", {"num_layers": 2})


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, dict[str, Any]]:
    from transformers import LlamaConfig, LlamaForCausalLM

    torch.manual_seed(1)
    config = LlamaConfig(
        vocab_size=300, hidden_size=32, intermediate_size=48, num_hidden_layers=2, num_attention_heads=4,
        num_key_value_heads=2, max_position_embeddings=64, attention_dropout=0.1,
    )  # fmt: skip
    path = tmp_path_factory.mktemp("llama")
    model = LlamaForCausalLM(config)
    model.save_pretrained(path)
    return path, dict(model.state_dict())


def test_folder_is_built_on_meta_and_filled_from_its_files(folder: tuple[Path, dict[str, Any]]) -> None:
    path, saved = folder
    shape = registry.resolve(str(path))
    assert (shape.num_layers, shape.num_heads, shape.ffn_size, shape.max_positions) == (2, 4, 48, 64)
    module = registry.build(shape)
    assert module.config.attention_dropout == 0.0  # type: ignore[union-attr]
    assert not any(b.is_meta for b in module.buffers()), "a rotary table on meta could not be had back"
    fill = registry.initial_weights(shape, 0)
    assert fill is not None
    for name, parameter in module.named_parameters():
        assert parameter.is_meta
        tensor = torch.empty(parameter.shape)
        fill(name, tensor)
        assert torch.equal(tensor, saved[name])
    with pytest.raises(ValueError, match="holds no weights for nothing"):
        fill("nothing", torch.empty(1))


def test_folder_without_weights_takes_the_law_and_overrides(folder: tuple[Path, dict[str, Any]], tmp_path: Path) -> None:
    (tmp_path / "config.json").write_text((folder[0] / "config.json").read_text())
    shape = registry.resolve(str(tmp_path), {"num_layers": 3, "ffn_size": 64})
    module = registry.build(shape)
    assert len(find_blocks(module)) == 3
    fill = registry.initial_weights(shape, 0)
    assert fill is not None
    norm = torch.empty(32)
    fill("model.norm.weight", norm)
    assert torch.equal(norm, torch.ones(32))


def test_folder_that_is_none(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="is no model folder"):
        registry.resolve(str(tmp_path))


def test_shapes_are_checked_when_made() -> None:
    with pytest.raises(ValueError, match="does not divide"):
        ModelShape(
            name="x", family="gpt", num_layers=1, hidden_size=5140, num_heads=40, ffn_size=1, vocab_size=1,
            max_positions=1,
        )  # fmt: skip
