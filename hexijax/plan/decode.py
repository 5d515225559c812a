"""Reads our dataclasses from JSON, strictly: every value has the type its field says.

    json.loads(...) -> decode(Plan, data, "plan.json") -> Plan, or PlanError with a path

The types of the fields are the schema, so a new field needs no code here. Numbers are
never negative, and never NaN or infinite, in anything we store.
"""

import collections.abc
import dataclasses
import enum
import functools
import math
import types
import typing
from collections.abc import Mapping
from typing import Any, NewType, NoReturn, TypeVar, Union

from hexijax.errors import did_you_mean
from hexijax.plan.limits import MAX_INTEGER
from hexijax.plan.plan import PlanError

T = TypeVar("T")
Names = Mapping[type, Mapping[str, str]]
"""JSON keys by field, where they differ, for each class."""


def decode(cls: type[T], data: Any, where: str, names: Names | None = None) -> T:
    """An object of a frozen dataclass from the dict that holds its fields.

    Args:
      cls: the dataclass.
      data: what ``json.loads`` gave; its other keys are errors.
      where: what errors call this object.
      names: the keys of fields whose JSON key is not their name.

    Raises:
      PlanError: with the path to the value, what stands there and what is expected.
    """
    return _object(cls, data, where, names or {})


def fail(where: str, expected: str, found: Any) -> NoReturn:
    """Raises: a value that is not what its place expects."""
    shown = repr(found)
    shown = shown if len(shown) <= 60 else f"{shown[:57]}..."
    raise PlanError(f"{where}: expected {expected}, found {shown}.")


@functools.cache
def _schema(cls: type) -> dict[str, tuple[Any, bool]]:
    """Type of each field, and whether the data may leave it out."""
    hints = typing.get_type_hints(cls)
    return {
        field.name: (hints[field.name], field.default is not dataclasses.MISSING)
        for field in dataclasses.fields(cls)
    }


def _object(cls: type[T], data: Any, where: str, names: Names) -> T:
    if not isinstance(data, dict):
        fail(where, "an object {...}", data)
    keys = {name: names.get(cls, {}).get(name, name) for name in _schema(cls)}
    for key in data:
        if key not in keys.values():
            raise PlanError(
                f"{where} has an unknown key {key[:60]!r}."
                f"{did_you_mean(key[:60], keys.values())} "
                f"Known: {', '.join(keys.values())}."
            )
    values: dict[str, Any] = {}
    for name, (hint, optional) in _schema(cls).items():
        key = keys[name]
        if key in data:
            values[name] = _value(hint, data[key], f"{where}.{key}", names)
        elif not optional:
            raise PlanError(f"{where} has no {key!r}.")
    try:
        return cls(**values)
    except AssertionError as error:  # the class's own rules between its fields
        raise PlanError(
            f"{where} contradicts itself: {error or 'see its file'}."
        ) from None


def _value(hint: Any, data: Any, where: str, names: Names) -> Any:
    if isinstance(hint, NewType):
        hint = hint.__supertype__
    origin, args = typing.get_origin(hint), typing.get_args(hint)
    if origin in (Union, types.UnionType):  # only ever "X or None"
        return None if data is None else _value(args[0], data, where, names)
    if origin is tuple:
        return _tuple(args, data, where, names)
    if origin is collections.abc.Mapping:
        return _mapping(args, data, where, names)
    if dataclasses.is_dataclass(hint):
        return _object(typing.cast(type, hint), data, where, names)
    if issubclass(hint, enum.StrEnum):
        return _choice(hint, data, where)
    return _scalar(hint, data, where)


def _tuple(args: tuple[Any, ...], data: Any, where: str, names: Names) -> Any:
    if not isinstance(data, list):
        fail(where, "a list [...]", data)
    if args[-1] is Ellipsis:
        args = (args[0],) * len(data)
    elif len(data) != len(args):
        fail(where, f"{len(args)} values", data)
    return tuple(
        _value(hint, item, f"{where}[{i}]", names)
        for i, (hint, item) in enumerate(zip(args, data, strict=True))
    )


def _mapping(args: tuple[Any, ...], data: Any, where: str, names: Names) -> Any:
    if not isinstance(data, dict):
        fail(where, "an object {...}", data)
    key_hint, value_hint = args
    return {
        _value(key_hint, key, f"a key of {where}", names): _value(
            value_hint, value, f"{where}[{key[:60]!r}]", names
        )
        for key, value in data.items()
    }


def _choice(hint: type[enum.StrEnum], data: Any, where: str) -> enum.StrEnum:
    choices = [member.value for member in hint]
    if data not in choices:
        near = did_you_mean(data[:60], choices) if isinstance(data, str) else ""
        raise PlanError(
            f"{where}: expected one of {', '.join(choices)}, found {str(data)[:60]!r}."
            f"{near}"
        )
    return hint(data)


def _scalar(hint: type, data: Any, where: str) -> Any:
    if hint is str or hint is bool:
        if type(data) is not hint:
            fail(where, "text" if hint is str else "true or false", data)
        return data
    if type(data) not in ((int,) if hint is int else (int, float)):
        fail(where, "a whole number" if hint is int else "a number", data)
    if not math.isfinite(data) or not 0 <= data <= (
        MAX_INTEGER if hint is int else data
    ):
        fail(where, f"a finite number from 0 to {MAX_INTEGER}", data)
    return hint(data)
