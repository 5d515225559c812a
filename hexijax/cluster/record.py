"""Reads and writes a table of a cluster document as one of our frozen records.

A record's fields and the keys of its table are matched by ``Key``s. A field without a
default is a key that must be there; defaults are not written into files.
"""

import dataclasses
from collections.abc import Mapping
from typing import Any, Generic, TypeVar

from hexijax.cluster.errors import ClusterError, Form, Place, shown
from hexijax.cluster.values import Value
from hexijax.errors import did_you_mean

R = TypeVar("R")


@dataclasses.dataclass(frozen=True, slots=True)
class Key:
    """A key of a table and the field it stands for."""

    name: str
    """Its name in files; data uses ``field``."""

    field: str
    """The record's field."""

    value: Value[Any]
    """How it is read and written."""

    def spelled(self, form: Form) -> str:
        """Its name in a form."""
        return self.name if form is Form.FILE else self.field


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Record(Generic[R]):
    """A table that makes one object."""

    make: type[R]
    """A frozen dataclass whose fields the keys name."""

    what: str
    """What it is called in messages, ``a link``."""

    keys: tuple[Key, ...]
    """All keys, in the order they are written."""

    def read(self, raw: object, place: Place) -> R:
        """The object a table describes; an object that is one already stays itself."""
        if place.form is Form.DATA and isinstance(raw, self.make):
            return raw
        return self.build(self.given(raw, place), place)

    def given(self, raw: object, place: Place) -> dict[str, Any]:
        """The fields that a table names, whether or not they make a whole object."""
        if not isinstance(raw, Mapping):
            place.fail(
                f"is {shown(raw)}; it must be a table that describes {self.what}."
            )
        by_name = {key.spelled(place.form): key for key in self.keys}
        check_keys(raw, tuple(by_name), place)
        return {
            by_name[name].field: by_name[name].value.read(value, place.at(name))
            for name, value in raw.items()
        }

    def build(self, fields: Mapping[str, Any], place: Place, hint: str = "") -> R:
        """The object with these fields; names the first that is missing, and hints."""
        required = {
            field.name
            for field in dataclasses.fields(self.make)  # pyrefly: ignore
            if field.default is dataclasses.MISSING and field.init
        }
        for key in self.keys:
            if key.field in required and key.field not in fields:
                name = key.spelled(place.form)
                place.at(name).fail(
                    f"is missing; {self.what} needs it. Add a line `{name} = ...`; "
                    f"docs/cluster.md shows every key.{hint}"
                )
        try:
            return self.make(**fields)
        except ClusterError as error:
            place.fail(f"is refused: {error}")

    def write(self, value: R, form: Form) -> dict[str, Any]:
        """The table: every field that is set; in files only what is no default."""
        defaults = {
            field.name: field.default
            for field in dataclasses.fields(value)  # pyrefly: ignore
            if form is Form.FILE
        }
        return {
            key.spelled(form): key.value.write(item, form)
            for key in self.keys
            if (item := getattr(value, key.field)) is not None
            and item != defaults.get(key.field, dataclasses.MISSING)
        }

    def settle(self, made: R) -> None:
        """Checks a new object's fields and puts them into canonical types.

        For ``__post_init__``: a record made in Python obeys the rules of a file.
        """
        place = Place(source=self.make.__name__, form=Form.DATA)
        for key in self.keys:
            raw = getattr(made, key.field)
            if raw is not None:
                settled = key.value.read(raw, place.at(key.field))
                object.__setattr__(made, key.field, settled)


def check_keys(raw: Mapping[Any, object], known: tuple[str, ...], place: Place) -> None:
    """Refuses a key that nobody would read."""
    for name in raw:
        if name not in known:
            place.at(str(name)[:60]).fail(
                f"is no key that is known here; known: {', '.join(known)}."
                f"{did_you_mean(str(name)[:60], known)}"
            )
