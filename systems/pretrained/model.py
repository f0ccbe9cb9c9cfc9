"""A transformers model by the config.json of a folder, without memory and without code that is not transformers' own."""

from __future__ import annotations

import os
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import torch
from torch import nn

from systems.pretrained.files import folder_of, read_json, refused
from systems.pretrained.on_meta import parameters_on_meta

CONFIG, GENERATION = "config.json", "generation_config.json"
CONFIG_BYTES = 16 << 20


def model_of(folder: str | os.PathLike[str]) -> nn.Module:
    """See systems.model_of."""
    source = folder_of(folder)
    given = read_json(source / CONFIG, CONFIG_BYTES)
    if given.get("quantization_config"):
        raise refused(f"{source / CONFIG} is of a quantized model: train from the weights it was made of")
    with _told(source / CONFIG, "describes no model that can be built"):
        model = _built(_believed(given))
    if model.can_generate() and os.path.lexists(source / GENERATION):
        settings = read_json(source / GENERATION, CONFIG_BYTES)
        with _told(source / GENERATION, "is no generation config"):
            model.generation_config = type(model.generation_config).from_dict(_believed(settings))
    model.config.use_cache = False  # of keys and values, which training has no use for; generate() goes by its own config
    made: nn.Module = model.train()
    return made


@contextmanager
def _told(path: Path, what: str) -> Iterator[None]:
    try:
        yield
    except Exception as error:  # noqa: BLE001 - whatever transformers makes of what somebody else wrote
        raise refused(f"{path} {what}: {type(error).__name__}: {error}") from None


def _believed(given: Any) -> Any:
    """Without code of a folder's own, and without kernels that transformers would download by name."""
    if not isinstance(given, dict):
        return given
    kept = {name: value for name, value in given.items() if "implementation" not in name and name != "auto_map"}
    return {name: _believed(value) for name, value in kept.items()}


def _built(given: dict[str, Any]) -> Any:
    import transformers  # takes seconds: only who builds a model waits for it
    from transformers import AutoModelForCausalLM
    from transformers.models.auto.configuration_auto import CONFIG_MAPPING

    config = CONFIG_MAPPING[given["model_type"]].from_dict(given)
    names = given.get("architectures") or ()
    if names:
        kind: Any = getattr(transformers, str(names[0]), None)
        if not (isinstance(kind, type) and issubclass(kind, transformers.PreTrainedModel)):
            raise ValueError(f"transformers {transformers.__version__} has no {names[0]}")
    else:
        kind = AutoModelForCausalLM._model_mapping[type(config)]
    with parameters_on_meta():
        return kind._from_config(config, dtype=torch.float32)
