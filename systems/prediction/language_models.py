"""Which of transformers' classes a config is of: language models alone, token ids in and logits out.

Note that a type may have several forms (BERT is trained on masked tokens, and has a causal form): `objective_of` says which.
"""

from __future__ import annotations

import copy
from collections.abc import Mapping
from typing import Any, Literal

import torch
from torch import nn

from systems.messages import one_line

Objective = Literal["causal", "masked", "seq2seq"]
"""The next token, masked tokens, or one text from another."""


def model_classes(objective: Objective) -> Mapping[str, str]:
    """transformers' language models for an objective: config.model_type to class name."""
    from transformers.models.auto import modeling_auto as auto

    return {
        "causal": auto.MODEL_FOR_CAUSAL_LM_MAPPING_NAMES,
        "masked": auto.MODEL_FOR_MASKED_LM_MAPPING_NAMES,
        "seq2seq": auto.MODEL_FOR_SEQ_TO_SEQ_CAUSAL_LM_MAPPING_NAMES,
    }[objective]


def objective_of(config: Any) -> Objective:
    """Types with both a masked and a causal form (BERT) are masked unless the config was saved from the causal one."""
    if getattr(config, "is_encoder_decoder", False):
        return "seq2seq"
    if config.model_type not in model_classes("masked"):
        return "causal"
    causal_form = model_classes("causal").get(config.model_type)
    return "causal" if causal_form in (config.architectures or ()) else "masked"


def without_weights(config: Any) -> nn.Module:
    """The model of a transformers config on the meta device, in training mode; keys and values of a step are not cached.

    The config is left as it is. ValueError for one that is no language model's, or of which none can be built.
    """
    import transformers

    objective = objective_of(config)
    name = model_classes(objective).get(config.model_type)
    if name is None:
        raise ValueError(
            f"transformers has no {objective} language model of type {config.model_type!r}: build the model, with "
            "torch.device('meta') around it, and give that"
        )
    config = copy.deepcopy(config)
    config.use_cache = False
    try:
        with torch.device("meta"):
            model = getattr(transformers, name)._from_config(config, dtype=torch.float32)
    except Exception as error:  # whatever transformers makes of odd sizes and names
        why = one_line(f"{type(error).__name__}: {error}")
        raise ValueError(f"transformers cannot build {name} of this config: {why}") from error
    assert isinstance(model, nn.Module)
    return model.train()
