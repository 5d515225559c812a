"""Real cards and their data-sheet figures: ``get("h100-80g-sxm")``.

The figures lie in ``cards/*.toml``, in the words of a cluster file's ``[kinds]``, plus
``also_called``: the names people and drivers give the card.
"""

import functools
import re
import tomllib
from collections.abc import Mapping
from decimal import Decimal
from importlib import resources
from types import MappingProxyType

from hexijax.cluster.errors import ClusterError, Form, Place
from hexijax.cluster.kinds import read_kinds
from hexijax.cluster.profile import DeviceProfile
from hexijax.errors import did_you_mean


def profiles() -> Mapping[str, DeviceProfile]:
    """Every card by its kind, by vendor and age."""
    return _cards()[0]


def kinds() -> tuple[str, ...]:
    """The names of all kinds."""
    return tuple(profiles())


def get(kind: str) -> DeviceProfile:
    """A card by its kind, or by a name it is also called."""
    canonical = match_device_kind(kind)
    if canonical is None:
        raise ClusterError(unknown_kind(kind))
    return profiles()[canonical]


def match_device_kind(name: str) -> str | None:
    """The kind of a card that is called ``name``, as by ``jax.Device.device_kind``.

    Exact but for case, punctuation and the maker's name; None if no card is called so.
    """
    return _cards()[1].get(_folded(name))


def unknown_kind(kind: str, also: tuple[str, ...] = ()) -> str:
    """What to say of a kind that nobody knows; ``also`` names kinds that are known."""
    guess = did_you_mean(kind, (*also, *kinds()))
    return (
        f"kind {kind[:60]!r} is neither in the catalog of {len(kinds())} cards nor "
        f"declared.{guess} `hexijax catalog` lists the cards; a table [kinds.NAME] "
        "declares one."
    )


@functools.cache
def _cards() -> tuple[Mapping[str, DeviceProfile], Mapping[str, str]]:
    """All cards, and the kind that each folded name means."""
    found: dict[str, DeviceProfile] = {}
    by_name: dict[str, str] = {}
    folder = resources.files("hexijax.cluster").joinpath("cards")
    for file in ("nvidia.toml", "amd.toml", "google.toml", "huawei.toml"):
        text = folder.joinpath(file).read_text(encoding="utf-8")
        tables = tomllib.loads(text, parse_float=Decimal)["kinds"]
        for kind, table in tables.items():
            for name in (kind, *table.pop("also_called")):
                meant = by_name.setdefault(_folded(name), kind)
                assert meant == kind, f"{meant} and {kind} are both called {name}"
        found |= read_kinds(tables, Place(source=file, form=Form.FILE), found)
    return MappingProxyType(found), MappingProxyType(by_name)


def _folded(name: str) -> str:
    """A name less what drivers and people vary."""
    words = re.findall(r"[a-z0-9.]+", name.casefold())
    makers = {"nvidia", "tesla", "geforce", "amd", "instinct", "radeon", "graphics"}
    return "".join(word for word in words if word not in makers)
