"""The unit of saved, moved and recovered state: a box of one parameter, of one kind.

    parameter's global name, kind of state, box -> Slice

Names are the model's own and boxes count the whole parameter's rows, so a slice means
the same under every plan and on every machine.
"""

import math
from typing import NamedTuple

from hexijax.weights.source import Box, whole

MASTER = "master"
"""The kind that parameters are; any other is a path in the optimizer's state."""


class Key(NamedTuple):
    """Which array: a parameter's state of one kind."""

    name: str
    """The parameter's global name; empty: no one parameter's, such as a step count."""

    kind: str
    """``master``, the path of a moment (``0/mu``), or ``loss_scale``."""

    def __str__(self) -> str:
        return f"{self.name} {self.kind}".strip()


class Slice(NamedTuple):
    """A box of such an array."""

    name: str
    """See ``Key``."""

    kind: str
    """See ``Key``."""

    box: Box
    """Of the whole array."""

    @property
    def key(self) -> Key:
        """The array that it is a part of."""
        return Key(self.name, self.kind)

    @property
    def size(self) -> int:
        """Number of elements."""
        return math.prod(stop - start for start, stop in self.box)

    def __str__(self) -> str:
        rows = ",".join(f"{start}:{stop}" for start, stop in self.box)
        return f"{self.key} [{rows}]"


def whole_slice(key: Key, shape: tuple[int, ...]) -> Slice:
    """All of an array."""
    return Slice(*key, whole(shape))
