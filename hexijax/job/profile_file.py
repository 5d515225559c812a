"""A profile file while it is written: whole after each measurement, and read again.

    profile.toml -> ProfileFile.open(path, cards) -> rows, nodes, links -> profile.toml

The reader of its figures is ``hexijax.cluster.measured``. What was measured on another
card, driver or JAX does not hold here and is thrown away.
"""

from collections.abc import Callable, Mapping, Sequence
from decimal import Decimal
from pathlib import Path
from typing import Any

from hexijax.cluster import LinkProfile, toml
from hexijax.cluster.document import FORMAT_VERSION
from hexijax.cluster.errors import Form
from hexijax.cluster.link import LINK
from hexijax.report.folder import write_atomically

Row = Mapping[str, Any]
Facts = Mapping[str, str]
"""What a kind was measured on: card, driver, versions."""

DIGITS = 5
"""Of measured figures: more are noise."""


class ProfileFile:
    """The document behind a profile file."""

    def __init__(self, path: Path, document: dict[str, Any]):
        self.path, self._document = path, document

    @classmethod
    def open(
        cls,
        path: Path,
        on: Mapping[str, Facts],
        kinds_of: Mapping[str, Sequence[str]],
        tell: Callable[[str], None],
    ) -> "ProfileFile":
        """The file at ``path``, or an empty one.

        Args:
          path: where it is, or will be.
          on: by kind, what it is measured on now.
          kinds_of: by node, the kinds of its devices.
          tell: is told what does not hold here any more.

        Raises:
          ClusterError: it is no profile file.
        """
        if not path.is_file():
            return cls(path, {"format": FORMAT_VERSION})
        document, _, _ = toml.load(path, called="profile")
        found = cls(path, document)
        changed = set[str]()
        for kind, now in on.items():
            was = found.about(kind)
            unlike = [k for k in now if k in was and str(was[k]) != now[k]]
            if unlike:
                words = ", ".join(f"{k} {was[k]} is now {now[k]}" for k in unlike)
                tell(f"{kind} is measured anew: {words}.")
                changed.add(kind)
        found._forget(changed, kinds_of)
        return found

    def about(self, kind: str) -> dict[str, Any]:
        """What else is known of a kind's card; to be changed by ``note``."""
        return dict(self._document.get("measured", {}).get(kind, {}))

    def note(self, kind: str, **facts: Any) -> None:
        """Writes facts about a kind's card."""
        about = self._document.setdefault("measured", {}).setdefault(kind, {})
        about.update({key: _short(value) for key, value in facts.items()})
        self._write()

    def rows(self, kind: str) -> list[Row]:
        """A kind's ``layer_times``."""
        return list(self._kind(kind).get("layer_times", ()))

    def add_rows(self, kind: str, rows: Sequence[Row], source: str) -> None:
        """More of them; ``source`` says where the kind's figures come from."""
        table = self._document.setdefault("kinds", {}).setdefault(kind, {})
        made = [{k: _short(v) for k, v in row.items()} for row in rows]
        table["source"] = source
        table["layer_times"] = [*table.get("layer_times", ()), *made]
        self._write()

    def node(self, name: str) -> Mapping[str, Any]:
        """What was measured of a node."""
        nodes = self._document.get("nodes", ())
        return next((node for node in nodes if node["name"] == name), {})

    def set_node(self, name: str, **fields: Any) -> None:
        """Figures of a node, in the words of a cluster file."""
        made = {**(self.node(name) or {"name": name}), **fields}
        nodes = self._document.setdefault("nodes", [])
        nodes[:] = [node for node in nodes if node["name"] != name]
        nodes.append({k: _short(v) for k, v in made.items()})
        self._write()

    def has_link(self, level: str, ends: tuple[str, str]) -> bool:
        """Whether a pair has a link: ``device_pairs`` or ``node_pairs``."""
        pairs = self._document.get("links", {}).get(level, ())
        return any(set(pair["between"]) == set(ends) for pair in pairs)

    def add_links(
        self, level: str, pairs: Sequence[tuple[str, str]], link: LinkProfile
    ) -> None:
        """The link of some pairs."""
        found = self._document.setdefault("links", {}).setdefault(level, [])
        found += [{"between": list(ends), "link": link_table(link)} for ends in pairs]
        self._write()

    def _kind(self, kind: str) -> Mapping[str, Any]:
        return self._document.get("kinds", {}).get(kind, {})

    def _forget(self, kinds: set[str], kinds_of: Mapping[str, Sequence[str]]) -> None:
        """What belongs to kinds that changed, and to nodes that have them."""
        for table in (self._document.get(k, {}) for k in ("measured", "kinds")):
            for kind in kinds:
                table.pop(kind, None)
        gone = {node for node, its in kinds_of.items() if kinds.intersection(its)}
        nodes = self._document.get("nodes", [])
        nodes[:] = [node for node in nodes if node["name"] not in gone]
        for pairs in self._document.get("links", {}).values():
            pairs[:] = [
                pair
                for pair in pairs
                if gone.isdisjoint(
                    end.rpartition("/")[0] or end for end in pair["between"]
                )
            ]

    def _write(self) -> None:
        order = ("format", "measured", "nodes", "links", "kinds")
        document = {k: self._document[k] for k in order if self._document.get(k)}
        write_atomically(self.path, toml.dumps(document))


def link_table(link: LinkProfile) -> dict[str, Any]:
    """A link in a file's words."""
    return {key: _short(value) for key, value in LINK.write(link, Form.FILE).items()}


def _short(value: Any) -> Any:
    """Figures with as many digits as they are worth."""
    match value:
        case float() | Decimal():
            return float(f"{value:.{DIGITS}g}")
        case [*items]:
            return [_short(item) for item in items]
        case _:
            return value
