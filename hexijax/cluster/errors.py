"""The error of this room, and where in a document it happened."""

import dataclasses
import enum
from decimal import Decimal
from typing import NoReturn

from hexijax.errors import UserError


class ClusterError(UserError):
    """A cluster, kind or profile that cannot be."""


class Form(enum.Enum):
    """In which words and units a document speaks."""

    FILE = "file"
    """TOML, for people: GiB, GB/s, microseconds; the unit ends the key's name."""

    DATA = "data"
    """JSON and Python: our field names, in bytes, seconds and hertz."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """Where a value stands: what every message begins with."""

    source: str
    """The file, or the object being made."""

    form: Form
    """How the document speaks."""

    path: str = ""
    """Keys and indices down to the value, ``nodes[1].host_cores``."""

    def at(self, key: str) -> "Place":
        """The place of a key's value in the table that stands here."""
        path = f"{self.path}.{key}" if self.path else key
        return Place(source=self.source, form=self.form, path=path)

    def item(self, index: int) -> "Place":
        """The place of an item of the list that stands here."""
        path = f"{self.path}[{index}]"
        return Place(source=self.source, form=self.form, path=path)

    def fail(self, problem: str) -> NoReturn:
        """Raises what is wrong here; ``problem`` goes on after the path."""
        path = f"{self.path} " if self.path else ""
        raise ClusterError(f"{self.source}: {path}{problem}")


def as_decimal(raw: object) -> Decimal | None:
    """The exact value of a number as it was written; None for anything else."""
    if isinstance(raw, bool) or not isinstance(raw, int | float | Decimal):
        return None
    return Decimal(repr(raw)) if isinstance(raw, float) else Decimal(raw)


def shown(raw: object) -> str:
    """A value as a message shows it: short, and never a page of digits."""
    number = as_decimal(raw)
    if number is not None:
        short = not number.is_finite() or abs(number.adjusted()) < 15
        return f"{number.normalize():,f}" if short else f"{number:.3e}"
    if isinstance(raw, bool):
        return str(raw).lower()
    if isinstance(raw, str):
        return repr(raw if len(raw) <= 60 else raw[:57] + "...")
    if isinstance(raw, dict):
        return "a table"
    if isinstance(raw, (list, tuple)):
        return f"a list of {len(raw)}"
    return f"a {type(raw).__name__}"
