"""Models from outside the tables: a user's own `module:function`, and a folder in transformers' format.

A function brings its module as it is: weights it holds are kept, parameters it left on the meta device start by a
general law. A folder's config.json is built without memory; its weights, where there are any, are read tensor by tensor when
asked for (folder_weights.py), and otherwise the general law holds. Only language models: token ids in, logits out.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Mapping
from dataclasses import dataclass
from pathlib import Path
from typing import Any, ClassVar

from torch import nn

from models import find_namesakes
from models.family import Family, FillWeights, from_config
from models.folder_weights import fill_buffers, stored_tensors
from models.shape import ModelShape, ObjectiveName
from models.weights import InitialWeights, law_of
from systems.messages import one_line
from systems.prediction.language_models import model_classes, objective_of
from systems.pretrained import FolderWeights, parameters_on_meta
from systems.recipe.model.blocks import find_blocks
from systems.state_dicts import buffers_by_every_name

# Our names for what transformers' configs call by several.
_CONFIG_NAMES: Mapping[str, tuple[str, ...]] = {
    "num_layers": ("num_hidden_layers",),
    "hidden_size": ("hidden_size",),
    "num_heads": ("num_attention_heads",),
    "ffn_size": ("intermediate_size", "ffn_dim", "n_inner", "d_ff"),
    "vocab_size": ("vocab_size",),
    "max_positions": ("max_position_embeddings",),
    "tied": ("tie_word_embeddings",),
}
_DECODER_LAYERS = ("num_decoder_layers", "decoder_layers")
_OF_THE_RUN = frozenset({"objective", "batch_size", "seq_len", "vocab_size", "max_positions", "label", "notes"})


@dataclass(frozen=True, kw_only=True)
class ExternalShape(ModelShape):
    """name is the text given to --model. num_layers counts a module's blocks; 0 where there are none.

    objective: what the module or folder shows it is made for; a module that shows nothing is causal unless set.
    """

    heads_divide_width: ClassVar[bool] = False  # newer architectures choose the width of a head freely
    fixed: ClassVar[frozenset[str]] = frozenset({"name", "family"})
    batch_size: int = 1


def resolve_external(name: str, overrides: Mapping[str, object]) -> ExternalShape:
    """The shape of `module:function` or of a folder. A function is called once for it, and again by each build."""
    if os.path.isdir(name):
        if "objective" in overrides:
            raise ValueError(f"{name} says in its config.json what it is: --set objective has no effect there")
        shape = _folder_shape(name)
        changed = shape.with_overrides(overrides)
        if shape.objective == "seq2seq" and changed.tied != shape.tied:
            raise ValueError(f"{name}: encoder, decoder and head of such a model share one embedding: leave tied as it is")
        return changed
    fixed = sorted(set(overrides) - _OF_THE_RUN)
    if fixed:
        raise ValueError(f"{name} builds its own shape: --set {fixed[0]} has no effect there, change the function")
    return _module_shape(name).with_overrides(overrides)


def _module_shape(name: str) -> ExternalShape:
    module = _call(name)
    config = getattr(module, "config", None)
    embedding = next((m for m in module.modules() if isinstance(m, nn.Embedding)), None)
    if embedding is None:
        raise ValueError(f"{name} has no nn.Embedding: a model that takes token ids is needed")
    max_positions = _from(config, "max_positions")
    return ExternalShape(
        name=name,
        family="module",
        objective=_module_objective(module),
        num_layers=len(find_blocks(module)),
        hidden_size=_from(config, "hidden_size") or embedding.embedding_dim,
        num_heads=_from(config, "num_heads"),
        ffn_size=_from(config, "ffn_size"),
        vocab_size=_from(config, "vocab_size") or embedding.num_embeddings,
        max_positions=max_positions,
        seq_len=min(1024, max_positions or 1024),
        tied=bool(_from(config, "tied")),
    )


def _module_objective(module: nn.Module) -> ObjectiveName:
    if getattr(getattr(module, "config", None), "is_encoder_decoder", False):
        return "seq2seq"
    return "masked" if type(module).__name__.endswith("ForMaskedLM") else "causal"


def _call(name: str) -> nn.Module:
    """What `module:function` returns; the current folder is importable. Any failure is a one-line ValueError."""
    module_name, _, function_name = name.partition(":")
    here = os.getcwd()
    sys.path.insert(0, here)
    find_namesakes()
    try:
        function = getattr(importlib.import_module(module_name), function_name)
        made = function()
    except Exception as error:
        reason = str(error).partition("\n")[0]
        raise ValueError(f"--model {name} cannot be built: {type(error).__name__}: {reason}") from error
    finally:
        sys.path.remove(here)
    if not isinstance(made, nn.Module):
        raise ValueError(f"--model {name} returned {type(made).__name__}: it must return an nn.Module")
    return made


def _module_weights(shape: ExternalShape, seed: int) -> FillWeights | None:
    module = _call(shape.name)
    on_meta = {p.is_meta for p in module.parameters()}
    if on_meta == {True, False}:
        raise ValueError(f"{shape.name} has some parameters on the meta device and some not: put all or none there")
    return InitialWeights(law_of(module), seed) if True in on_meta else None


def _config(folder: str) -> Any:
    from transformers import AutoConfig

    try:
        return AutoConfig.from_pretrained(folder, local_files_only=True, trust_remote_code=False)
    except Exception as error:  # what transformers makes of values that are no shape's
        raise ValueError(f"--model {folder} is no model folder: {one_line(str(error))}") from error


def _folder_shape(folder: str) -> ExternalShape:
    config = _config(folder)
    if _from(config, "hidden_size") is None or _from(config, "vocab_size") is None:
        raise ValueError(f"--model {folder}: {config.model_type} is not a language model by itself, it has no vocabulary")
    max_positions = _from(config, "max_positions")
    return ExternalShape(
        name=folder,
        family="folder",
        objective=objective_of(config),
        num_layers=_from(config, "num_layers") or 0,
        hidden_size=_from(config, "hidden_size"),
        num_heads=_from(config, "num_heads"),
        ffn_size=_from(config, "ffn_size"),
        vocab_size=_from(config, "vocab_size"),
        max_positions=max_positions,
        seq_len=min(1024, max_positions or 1024),
        tied=bool(_from(config, "tied")),
        notes="" if stored_tensors(Path(folder)) is not None else f"{folder} holds no weights: they start from random ones",
    )


def _build_folder(shape: ExternalShape) -> nn.Module:
    config = _config(shape.name)
    for name in _DECODER_LAYERS:  # a decoder as deep as its encoder stays so
        if getattr(config, name, None) == _from(config, "num_layers"):
            setattr(config, name, shape.num_layers)
    for field in _CONFIG_NAMES:
        if getattr(shape, field) != _from(config, field):
            setattr(config, _config_name(config, field), getattr(shape, field))
    for key in config.to_dict():
        if "dropout" in key or key.endswith("pdrop") or key == "layerdrop":
            setattr(config, key, shape.dropout)
    model_class = model_classes(shape.objective).get(config.model_type)
    if model_class is None:
        raise ValueError(
            f"--model {shape.name}: transformers has no {shape.objective} language model of type {config.model_type}"
        )
    try:
        model = from_config(model_class, config)
    except Exception as error:
        why = one_line(f"{type(error).__name__}: {error}")
        raise ValueError(f"--model {shape.name}: its config.json describes no model that can be built: {why}") from error
    if any(True for _ in buffers_by_every_name(model)):
        fill_buffers(model, stored_tensors(Path(shape.name)) or {})
    return model


def _folder_weights(shape: ExternalShape, seed: int) -> FillWeights:
    with parameters_on_meta():
        model = _build_folder(shape)
    stored = stored_tensors(Path(shape.name))
    if stored is not None:
        return FolderWeights(Path(shape.name), model, stored)
    std = next((getattr(model.config, n) for n in ("initializer_range", "init_std") if hasattr(model.config, n)), 0.02)
    return InitialWeights(law_of(model, std=std), seed)


def _config_name(config: Any, field: str) -> str:
    names = _CONFIG_NAMES[field]
    return next((n for n in names if hasattr(config, n)), names[0])


def _from(config: Any, field: str) -> Any:
    return getattr(config, _config_name(config, field), None)


FAMILIES = (
    Family(
        name="module",
        summary="a user's own function, given as module:function",
        sizes=(),
        build=lambda shape: _call(shape.name),
        weights=_module_weights,
    ),
    Family(
        name="folder",
        summary="a folder in transformers' format",
        sizes=(),
        build=_build_folder,
        weights=_folder_weights,
    ),
)
