"""What is secret (keys, tokens, passwords) stays out of records, wherever a run may have printed it.

Known by its name in the environment, or by its form: what stands before the host of a URL, and the tokens of services that
give theirs a form of its own.
"""

from __future__ import annotations

import os
import re
import typing
from collections.abc import Mapping
from typing import Any, Literal, TypeVar

from pydantic import BaseModel

from systems.messages import one_line, printable

SECRET_NAME = re.compile(r"KEY|TOKEN|SECRET|PASSW|PASSPHRASE|CREDENTIAL|AUTH|COOKIE|(^|_)PAT(_|$)", re.IGNORECASE)
IN_A_URL = re.compile(r"(?<=://)[^\s/?#@]+(?=@)")  # user:password@, or a token alone
IN_A_QUERY = re.compile(r"(?<=[?&])((?:[\w-]*[_-])?(?:key|token|secret|password|signature|sig)=)[^\s&#]+", re.IGNORECASE)
TOKEN = re.compile(
    r"\b(?:hf_[A-Za-z0-9]{20,}|gh[oprsu]_[A-Za-z0-9]{20,}|github_pat_\w{20,}|glpat-[\w-]{20,}|sk-[\w-]{20,}|"
    r"wandb_v\d_\w{20,}|AKIA[A-Z0-9]{16}|xox[abprs]-[\w-]{10,})"
)
SHORTEST = 8  # characters: what is shorter is in many a word and number, and protects nothing
_M = TypeVar("_M", bound=BaseModel)


def secrets_of(environment: Mapping[str, str]) -> dict[str, str]:
    """What must not be written, to what stands in its place; longer ones first. A path that is there is no secret.

    Each line of one that has several, and each as `one_line` and `printable` would write it.
    """
    found: dict[str, str] = {}
    for name, value in environment.items():
        if not SECRET_NAME.search(name) or os.path.exists(value):
            continue
        for form in (value, *value.splitlines(), one_line(value), printable(value), printable(one_line(value))):
            if len(form.strip()) >= SHORTEST:
                found.setdefault(form.strip(), f"<{name}>")
    return dict(sorted(found.items(), key=lambda each: -len(each[0])))


def without_secrets(model: _M, environment: Mapping[str, str] | None = None) -> _M:
    """The same with every text in it freed of them. What is one of a few given words (a status) is no text."""
    return typing.cast(_M, _cleared(model, secrets_of(os.environ if environment is None else environment)))


def _without_forms(text: str) -> str:
    """Freed of what is secret wherever it stands."""
    text = IN_A_URL.sub("<secret>", text) if "://" in text else text
    text = IN_A_QUERY.sub(r"\1<secret>", text)
    return TOKEN.sub("<secret>", text)


def _cleared(value: Any, secrets: Mapping[str, str]) -> Any:
    if isinstance(value, str):
        for secret, name in secrets.items():
            value = value.replace(secret, name)
        return _without_forms(value)
    if isinstance(value, BaseModel):
        fields = type(value).model_fields
        texts = [name for name, field in fields.items() if not _is_a_choice(field.annotation)]
        return value.model_copy(update={name: _cleared(getattr(value, name), secrets) for name in texts})
    if isinstance(value, Mapping):
        return {_cleared(key, secrets): _cleared(item, secrets) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return type(value)(_cleared(item, secrets) for item in value)
    return value


def _is_a_choice(annotation: Any) -> bool:
    """Literal, or a union of Literals and None."""
    if typing.get_origin(annotation) is Literal or annotation is type(None):
        return True
    parts = typing.get_args(annotation)
    return bool(parts) and typing.get_origin(annotation) not in (list, tuple, dict) and all(map(_is_a_choice, parts))
