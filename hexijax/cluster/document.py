"""Between a cluster document (a TOML file or JSON) and the parts of a Cluster.

    {format, name, profile, kinds, nodes, links} <-> name, nodes, links, profiles

Figures overrule each other in this order: the catalog, the file's [kinds], its profile.
"""

from collections.abc import Mapping
from pathlib import Path
from typing import Any

from hexijax.cluster import catalog, toml
from hexijax.cluster.errors import Form, Place, shown
from hexijax.cluster.kinds import read_kinds, write_kinds
from hexijax.cluster.links import LINKS, Links
from hexijax.cluster.measured import KEYS, Measured, read_measured
from hexijax.cluster.node import NODE, Node
from hexijax.cluster.profile import DeviceProfile
from hexijax.cluster.record import check_keys
from hexijax.cluster.values import NAME, ListOf, Text

FORMAT_VERSION = 1
NODES = ListOf(item=NODE, least=1, most=20_000)


def read_parts(raw: object, place: Place, folder: Path) -> dict[str, Any]:
    """The fields of the Cluster that a document describes.

    ``folder`` is where a relative ``profile`` path starts.
    """
    known = ("format", "name", "profile", "kinds", "nodes", "links")
    table = _versioned(raw, known, place)
    for key in ("name", "nodes"):
        if key not in table:
            place.at(key).fail(
                f"is missing; a cluster has a name and nodes. Add `{key}`; "
                "docs/cluster.md has an example to start from."
            )
    found = read_kinds(table.get("kinds", {}), place.at("kinds"), catalog.profiles())
    parts = {
        "name": NAME.read(table["name"], place.at("name")),
        "nodes": NODES.read(table["nodes"], place.at("nodes")),
        "links": LINKS.read(table.get("links", {}), place.at("links")),
    }
    if "profile" in table:
        profile = Text().read(table["profile"], place.at("profile"))
        known = {**catalog.profiles(), **found}
        measured = load_measured(folder / profile, known)
        parts |= measured.over(parts["nodes"], parts["links"])
        found |= measured.kinds
    return parts | {"profiles": tuple(found.values())}


def write_parts(
    *,
    name: str,
    nodes: tuple[Node, ...],
    links: Links,
    profiles: tuple[DeviceProfile, ...],
    form: Form,
) -> dict[str, Any]:
    """The document that describes a Cluster; as data it needs no catalog."""
    tables = {
        "kinds": write_kinds(profiles, form, catalog.profiles()),
        "nodes": NODES.write(nodes, form),
        "links": LINKS.write(links, form),
    }
    head = {"format": FORMAT_VERSION, "name": name}
    return head | {key: table for key, table in tables.items() if table}


def load_measured(source: toml.Source, known: Mapping[str, DeviceProfile]) -> Measured:
    """A profile file's figures, over the kinds already known."""
    raw, name, _ = toml.load(source, called="profile")
    place = Place(source=name, form=Form.FILE)
    return read_measured(_versioned(raw, KEYS, place), place, known)


def _versioned(
    raw: object, known: tuple[str, ...], place: Place
) -> Mapping[str, object]:
    """The document's top table, if it is one of our version."""
    if not isinstance(raw, Mapping):
        place.fail(f"is {shown(raw)}; a document is a table.")
    check_keys(raw, known, place)
    version = raw.get("format")
    if isinstance(version, bool) or version != FORMAT_VERSION:
        said = "is missing" if version is None else f"is {shown(version)}"
        place.at("format").fail(
            f"{said}; this hexijax reads format {FORMAT_VERSION}. Write `format = "
            f"{FORMAT_VERSION}` at the top, or use the hexijax that wrote the file."
        )
    return raw
