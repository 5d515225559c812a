"""The numbers that microbatches leave behind, for everyone to read.

In one process they stay where they were computed until someone looks. Islands all look:
what each stage found is packed into one array and sent to all of them.
"""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from hexijax.plan.plan import Place
from hexijax.runtime.layout import Layout
from hexijax.runtime.memo import memo
from hexijax.runtime.programs import Programs, struct

Scalars = Mapping[str, Any]
"""Of one microbatch: by name, one a lane."""


@dataclasses.dataclass(frozen=True, slots=True)
class Told:
    """What all microbatches of a step have found."""

    packs: Mapping[Place, Any]
    """Of each place one array: microbatch, name, lane."""
    order: tuple[Place, ...]
    """Whose turn it is, microbatch by microbatch."""
    names: tuple[str, ...]

    def block_until_ready(self) -> "Told":
        """As an array's: ``jax.block_until_ready`` calls it."""
        jax.block_until_ready(list(self.packs.values()))
        return self


class Losses:
    """Of one engine.

    Args:
      layout: where places are.
      programs: compiled ones.
      names: of a microbatch's scalars, at every last stage.
    """

    def __init__(self, layout: Layout, programs: Programs, names: Sequence[str]):
        self._layout, self._programs = layout, programs
        self._names = tuple(sorted(names))

    def collect(self, values: Sequence[Any], sources: Sequence[Place]) -> Any:
        """What the microbatches at ``sources`` left, in that order."""
        if not self._layout.readers:
            return list(values)
        found: dict[Place, list[Any]] = {}
        for place, value in zip(sources, values, strict=True):
            found.setdefault(place, []).append(value)
        packs = [self._packer(place, len(x))(x) for place, x in found.items()]
        mine = self._layout.tell(packs)
        return Told(dict(zip(found, mine, strict=True)), tuple(sources), self._names)

    def read(self, collected: Any) -> list[dict[str, np.ndarray]]:
        """The same on the host; waits for it."""
        if not isinstance(collected, Told):
            return jax.device_get(collected)
        settle = self._layout.carrier.settle
        turns = {
            place: iter(np.asarray(settle(pack)))
            for place, pack in collected.packs.items()
        }
        return [
            dict(zip(collected.names, next(turns[place]), strict=True))
            for place in collected.order
        ]

    @memo
    def _packer(self, place: Place, count: int) -> Callable[..., Any]:
        lanes, here = self._layout.lanes(place), self._layout.by_lane(place)
        one = {name: struct((lanes,), "float32", here) for name in self._names}
        return self._programs.get(
            _pack, ([one] * count,), out_shardings=self._layout.replicated(place)
        )


def _pack(values: list[Scalars]) -> jax.Array:
    return jnp.stack([jnp.stack([x[name] for name in sorted(x)]) for x in values])
