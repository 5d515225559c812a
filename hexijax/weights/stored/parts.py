"""One writer's slices of a step at one place, and which parts are a whole step.

    Files -> parts_in -> Parts -> whole_steps -> step: parts that tile the state

A part is a ``Source`` of ``checkpoint.sources``: any box of its slices can be read.
"""

import dataclasses
import functools
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import numpy as np

from hexijax.weights.errors import WeightsError
from hexijax.weights.slices import Key, Slice
from hexijax.weights.source import Box, Tensor, inside, overlap, whole
from hexijax.weights.stored import arrays, manifest
from hexijax.weights.stored.arrays import StoredArray
from hexijax.weights.stored.files import Files, Rate
from hexijax.weights.stored.manifest import Manifest

SESSION = "session"
"""The fact that says which processes wrote a step together; of one process none."""


@dataclasses.dataclass(frozen=True, kw_only=True)
class Part:
    """What a manifest commits, to be read."""

    files: Files
    """Where."""

    prefix: str
    """Of its keys there: ``step/writer/``."""

    manifest: Manifest
    """What it is."""

    label: str
    """Sort of place; see ``checkpoint.sources``."""

    node: str
    """The node that the place is in; empty: none."""

    rate: Rate = dataclasses.field(default_factory=lambda: Rate(math.inf))
    """Holds reads back."""

    @property
    def step(self) -> int:
        """Optimizer steps done."""
        return self.manifest.stand.step

    @property
    def rate_bytes_per_s(self) -> float:
        """At which it can be read, at most."""
        return self.rate.bytes_per_s

    @functools.cached_property
    def holds(self) -> Mapping[Key, Sequence[Box]]:
        """Boxes by array."""
        found: dict[Key, list[Box]] = {}
        for each in self.manifest.arrays:
            found.setdefault(each.key, []).append(each.box)
        return found

    def read(self, name: str, kind: str, box: Box) -> np.ndarray:
        """A box within one of ``holds``, checked.

        Raises:
          Damaged: it is not what was written.
        """
        held = next(
            held for held in self.holds[Key(name, kind)] if overlap(held, box) == box
        )
        stored = self.at(self.manifest.arrays[Slice(name, kind, held)])
        return arrays.read(self.files, stored, inside(box, held), self.rate)

    def at(self, stored: StoredArray) -> StoredArray:
        """One of the manifest's, its key counted from the place."""
        return dataclasses.replace(stored, key=self.prefix + stored.key)


def parts_in(
    files: Files,
    label: str,
    node: str | None = None,
    rate: Rate | None = None,
    tell: Callable[[str], None] = lambda text: None,
) -> list[Part]:
    """All parts that are committed at a place, oldest first.

    Args:
      files: the place.
      label: its sort.
      node: that it is in; None: each part's writer's own.
      rate: of its reads.
      tell: is told of manifests that cannot be read.

    Raises:
      OSError: the place cannot be listed.
    """
    found = []
    for key in files.find(manifest.NAME):
        if not re.fullmatch(r"[0-9]+/[^/]+/[^/]+", key):
            continue
        try:
            known = manifest.parse(files.get(key), f"{files.where}/{key}")
        except FileNotFoundError:
            continue  # it was the oldest, and has just been removed
        except (WeightsError, OSError) as error:
            tell(str(error))
            continue
        part = Part(
            files=files,
            prefix=key.removesuffix(manifest.NAME),
            manifest=known,
            label=label,
            node=known.writer if node is None else node,
            rate=rate or Rate(math.inf),
        )
        found.append(part)
    return sorted(found, key=lambda part: (part.step, part.prefix))


def of_one_mind(parts: Iterable[Part]) -> list[Part]:
    """Of each step the parts of one session: whoever was cut off from the others and
    wakes writes as if nothing had been, and they have done that step anew."""
    by_step: dict[int, dict[Any, list[Part]]] = {}
    for part in parts:
        session = part.manifest.stand.facts.get(SESSION)
        by_step.setdefault(part.step, {}).setdefault(session, []).append(part)
    found: list[Part] = []
    for sessions in by_step.values():
        each = list(sessions.values())
        found += next(filter(_whole, each), each[0])
    return found


def whole_steps(parts: Iterable[Part]) -> dict[int, list[Part]]:
    """The steps whose parts tile the state, newest first."""
    by_step: dict[int, list[Part]] = {}
    for part in of_one_mind(parts):
        by_step.setdefault(part.step, []).append(part)
    return {
        step: found
        for step, found in sorted(by_step.items(), reverse=True)
        if _whole(found)
    }


def _whole(parts: Sequence[Part]) -> bool:
    tensors = parts[0].manifest.tensors
    return first_gap(tensors, [part.holds for part in parts]) is None


def first_gap(
    tensors: Mapping[Key, Tensor], holders: Sequence[Mapping[Key, Sequence[Box]]]
) -> Slice | None:
    """The first box of some arrays that nobody holds; None: all is held."""
    for key, tensor in tensors.items():
        left = [whole(tensor.shape)] if tensor.num_bytes else []
        for holds in holders:
            for held in holds.get(key, ()):
                left = [rest for box in left for rest in _minus(box, held)]
            if not left:
                break
        if left:
            return Slice(*key, left[0])
    return None


def _minus(box: Box, hole: Box) -> list[Box]:
    both = overlap(box, hole)
    return [box] if both is None else without(box, both)


def without(box: Box, hole: Box) -> list[Box]:
    """Boxes that tile what is left of a box without one inside it."""
    rest: list[Box] = []
    for dim, ((start, stop), (first, last)) in enumerate(zip(box, hole, strict=True)):
        for rows in ((start, first), (last, stop)):
            if rows[0] < rows[1]:
                rest.append((*hole[:dim], rows, *box[dim + 1 :]))
    return rest
