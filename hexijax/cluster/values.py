"""The kinds of values a cluster document holds: how each is read, checked and written.

    raw value + Place -> Value.read -> value in our types and SI units
    our value + Form  -> Value.write -> raw value

Numbers with units are in units.py.
"""

import dataclasses
import re
from collections.abc import Mapping
from typing import Generic, Protocol, TypeVar, runtime_checkable

from hexijax.cluster.errors import Form, Place, as_decimal, shown
from hexijax.errors import did_you_mean

T = TypeVar("T")
Scalar = str | bool | int | float
LARGE = 2**63


@runtime_checkable
class Value(Protocol[T]):
    """One kind of value."""

    def read(self, raw: object, place: Place) -> T:
        """The value in our types; raises ``ClusterError`` at ``place``."""
        ...

    def write(self, value: T, form: Form) -> object:
        """What ``read`` turns into ``value`` again."""
        ...


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Text:
    """One printable line."""

    pattern: str = r".*"
    """What all of it must match."""

    rule: str = "one line of printable text"
    """The pattern in words."""

    def read(self, raw: object, place: Place) -> str:
        """The text itself."""
        if not isinstance(raw, str) or not raw.isprintable():
            place.fail(f"is {shown(raw)}; it must be {self.rule}.")
        if not re.fullmatch(self.pattern, raw):
            place.fail(f"is {shown(raw)}; it must be {self.rule}.")
        return raw

    def write(self, value: str, form: Form) -> object:
        """The text itself."""
        return value


NAME = Text(
    pattern=r"[A-Za-z0-9][A-Za-z0-9._-]{0,99}",
    rule="a name of letters, digits, '-', '_' and '.', at most 100 of them",
)


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Choice:
    """One of a few words."""

    options: tuple[str, ...]
    """The words."""

    def read(self, raw: object, place: Place) -> str:
        """The word."""
        if not isinstance(raw, str) or raw not in self.options:
            guess = did_you_mean(raw, self.options) if isinstance(raw, str) else ""
            place.fail(
                f"is {shown(raw)}; it must be one of {', '.join(self.options)}.{guess}"
            )
        return raw

    def write(self, value: str, form: Form) -> object:
        """The word."""
        return value


@dataclasses.dataclass(frozen=True, slots=True)
class Flag:
    """True or false."""

    def read(self, raw: object, place: Place) -> bool:
        """The flag itself."""
        if not isinstance(raw, bool):
            place.fail(f"is {shown(raw)}; it must be true or false.")
        return raw

    def write(self, value: bool, form: Form) -> object:
        """The flag itself."""
        return value


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ListOf(Generic[T]):
    """A list of values of one kind."""

    item: Value[T]
    """What it holds."""

    least: int = 0
    """Fewest items."""

    most: int = 100_000
    """Most items."""

    def read(self, raw: object, place: Place) -> tuple[T, ...]:
        """The items, frozen."""
        if not isinstance(raw, (list, tuple)):
            place.fail(f"is {shown(raw)}; it must be a list: [...].")
        if not self.least <= len(raw) <= self.most:
            place.fail(
                f"has {len(raw):,} items; it must have from {self.least} to "
                f"{self.most:,}."
            )
        return tuple(self.item.read(x, place.item(i)) for i, x in enumerate(raw))

    def write(self, value: tuple[T, ...], form: Form) -> object:
        """The items as a list."""
        return [self.item.write(x, form) for x in value]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class MapOf(Generic[T]):
    """A table from words of a fixed list to values of one kind; never empty."""

    keys: tuple[str, ...]
    """The words it may name, and the order in which it keeps them."""

    item: Value[T]
    """What each names."""

    def read(self, raw: object, place: Place) -> dict[str, T]:
        """The table in the order of ``keys``."""
        if not isinstance(raw, Mapping) or not raw:
            place.fail(f"is {shown(raw)}; it must name at least one of {self._all()}.")
        for key in raw:
            if key not in self.keys:
                guess = did_you_mean(str(key), self.keys)
                place.fail(f"has the key {shown(key)}; it knows {self._all()}.{guess}")
        return {k: self.item.read(raw[k], place.at(k)) for k in self.keys if k in raw}

    def write(self, value: Mapping[str, T], form: Form) -> object:
        """The table."""
        return {key: self.item.write(item, form) for key, item in value.items()}

    def _all(self) -> str:
        """The words, for messages."""
        return ", ".join(self.keys)


@dataclasses.dataclass(frozen=True, slots=True)
class Row:
    """A flat table of anything: one line of measurements we carry and do not judge."""

    def read(self, raw: object, place: Place) -> dict[str, Scalar]:
        """The row, its numbers as int or float."""
        if not isinstance(raw, Mapping):
            place.fail(f"is {shown(raw)}; it must be a table of plain values.")
        return {
            Text().read(key, place): self._cell(cell, place.at(str(key)))
            for key, cell in raw.items()
        }

    def write(self, value: Mapping[str, Scalar], form: Form) -> object:
        """The row."""
        return dict(value)

    def _cell(self, raw: object, place: Place) -> Scalar:
        """One cell, if it is a plain value."""
        if isinstance(raw, bool):
            return raw
        if isinstance(raw, str):
            return Text().read(raw, place)
        number = as_decimal(raw)
        if number is None or not (number.is_finite() and -LARGE < number < LARGE):
            place.fail(f"is {shown(raw)}; it must be text, a number or true or false.")
        return raw if isinstance(raw, int) else float(number)
