"""Arguments as a spec, whose fields are the flags. Whatever cannot be is one line that says what to change.

pydantic alone reads and judges values, so that complaints are of one kind; tyro writes the help.
"""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Sequence
from typing import Any, Literal, NoReturn, TypeVar

from pydantic import BaseModel, ValidationError, create_model

from harness.spec import BadInputError, flag
from systems.messages import invalid_value, unknown_name

_Spec = TypeVar("_Spec", bound=BaseModel)


def _takes_several(spec: type[BaseModel], field: str) -> bool:
    return typing.get_origin(spec.model_fields[field].annotation) is tuple


def _is_switch(spec: type[BaseModel], field: str) -> bool:
    """A flag that is there or not, without a value."""
    return spec.model_fields[field].annotation is bool


def metavar(annotation: Any) -> str:
    """STEPS-like placeholder of a type: {cuda,cpu} for choices, INT, FLOAT, TEXT."""
    if typing.get_origin(annotation) is Literal:
        return "{" + ",".join(typing.get_args(annotation)) + "}"
    if typing.get_origin(annotation) in (typing.Union, types.UnionType):
        known = [metavar(part) for part in typing.get_args(annotation) if part is not type(None)]
        return "|".join(dict.fromkeys(known))
    if typing.get_origin(annotation) is typing.Annotated:
        return metavar(typing.get_args(annotation)[0])
    return {int: "INT", float: "FLOAT", bool: "{true,false}"}.get(annotation, "TEXT")


def _without(spec: type[BaseModel], fields: frozenset[str], positional: str | None) -> type[BaseModel]:
    """The same for --help: but for flags that are refused, fields named as their flags, one of them without a flag."""
    import tyro

    kept: dict[str, Any] = {
        name.rstrip("_"): (field.annotation, field) for name, field in spec.model_fields.items() if name not in fields
    }
    if positional is not None:
        annotation, field = kept[positional]
        stands_alone: Any = tyro.conf.Positional
        kept[positional] = (stands_alone[annotation], field)
    return create_model(spec.__name__, __doc__=spec.__doc__, **kept)


def _collect(spec: type[BaseModel], arguments: Sequence[str], positional: str | None) -> dict[str, list[str]]:
    """Field to the texts that were given for it, in order. Raises BadInputError for what fits no field."""
    fields = {flag(field): field for field in spec.model_fields if field != positional}
    left_out: frozenset[str] = getattr(spec, "left_out", frozenset())
    given: dict[str, list[str]] = {}
    current = ""
    for token in arguments:
        name, equals, value = token.partition("=")
        if name.startswith("--"):
            if fields.get(name) in left_out:
                raise BadInputError(f"{name} is of a run and changes nothing here: leave it out")
            if name not in fields:
                if name in (of_others := getattr(spec, "of_others", {})):
                    raise BadInputError(f"{name} {of_others[name]}")
                raise BadInputError(unknown_name("flag", name, fields))
            if _is_switch(spec, fields[name]):
                if equals:
                    raise BadInputError(f"{name} takes no value: leave {equals}{value} out")
                given[name], current = [], ""
                continue
            current = name
            if not _takes_several(spec, fields[name]):
                given[name] = []
            given.setdefault(name, []).extend([value] if equals else [])
        elif current and (_takes_several(spec, fields[current]) or not given[current]):
            given[current].append(token)
        elif positional and positional not in given:
            given[positional] = [token]
        else:
            raise BadInputError(f"unexpected argument {token!r}" + (f" after {current}" if current else ""))
    for name, values in given.items():
        if not values and not _is_switch(spec, fields.get(name, name)):
            raise BadInputError(f"{name} needs a value")
    for field, described in spec.model_fields.items():
        name = field if field == positional else flag(field)
        instead = flag(getattr(spec, "stands_for", {}).get(field, field))
        if described.is_required() and name not in given and instead in given:
            given[name] = given[instead]
        if described.is_required() and name not in given:
            raise BadInputError(f"{name} is missing: {described.description}")
    return {fields.get(name, name): values for name, values in given.items()}


def parse(
    spec: type[_Spec], arguments: Sequence[str], *, prog: str, positional: str | None = None, help_too: Sequence[str] = ()
) -> _Spec:
    """Arguments as a spec. Raises BadInputError with one line; --help prints and exits.

    positional: the field that may be given without a flag. help_too: lines of the help beside the spec's own text.
    """
    if {"-h", "--help"} & set(arguments):
        _help(spec, prog, positional, help_too)
    given: dict[str, Any] = {}
    for field, texts in _collect(spec, arguments, positional).items():
        if _takes_several(spec, field):
            given[field] = tuple(texts)
        else:
            given[field] = True if _is_switch(spec, field) else texts[0]
    try:
        return spec.model_validate(given)
    except ValidationError as error:
        raise BadInputError(_complaint(error, positional)) from None


def _complaint(error: ValidationError, positional: str | None) -> str:
    def told(field: str, given: Any) -> str:
        value = " ".join(given) if isinstance(given, tuple) else given
        return f"{field if field == positional else flag(field)} {value}"

    return invalid_value(error, told)


def _help(spec: type[BaseModel], prog: str, positional: str | None, more: Sequence[str]) -> NoReturn:
    import tyro  # nobody else waits for it
    from tyro.constructors import ConstructorRegistry, PrimitiveConstructorSpec, PrimitiveTypeInfo

    shown = _without(spec, getattr(spec, "left_out", frozenset()), positional)
    rules = ConstructorRegistry()

    @rules.primitive_rule
    def rule(info: PrimitiveTypeInfo) -> PrimitiveConstructorSpec[Any] | None:
        if info.type is shown:
            return None
        several = typing.get_origin(info.type) is tuple and typing.get_args(info.type)[-1:] == (Ellipsis,)
        return PrimitiveConstructorSpec(
            nargs="*" if several else 1,
            metavar="TEXT" if several else metavar(info.type),
            instance_from_str=(lambda texts: tuple(texts)) if several else (lambda texts: texts[0]),
            is_instance=lambda value: True,
            str_from_instance=lambda value: [] if value is None or value == () else [str(value)],
        )

    said = "\n\n".join([inspect.cleandoc(spec.__doc__ or ""), *more])
    asked: Any = typing.Annotated[shown, tyro.conf.FlagCreatePairsOff]
    with rules:
        tyro.cli(asked, prog=prog, description=said, args=["--help"])
    raise SystemExit(0)
