"""The state of all islands on each of them, for those who want it whole.

    homes -> a reader on each island -> NumPy arrays

One group after another, so that no device holds more than one home's.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hexijax.plan.plan import Place
from hexijax.runtime.carrying import Spot, spot
from hexijax.runtime.groups import GroupRuntime
from hexijax.runtime.layout import Layout
from hexijax.runtime.state import State


def everywhere(
    layout: Layout,
    groups: Mapping[str, GroupRuntime],
    state: State,
    fields: Sequence[str] = ("master",),
    *,
    turn: int,
) -> State:
    """What ``state`` has of the homes that are here, of all homes; all islands ask.

    In one process it is the same state. ``turn``: how often they have asked.
    """
    if not layout.readers:
        return state
    return dict(_told(layout, groups, state, fields, turn))


def _told(
    layout: Layout,
    groups: Mapping[str, GroupRuntime],
    state: State,
    fields: Sequence[str],
    turn: int,
) -> Iterator[tuple[tuple[Place, str], Any]]:
    for name, group in groups.items():
        for home in group.homes:
            what = f"the state of {name} at {home}"
            spot.set(Spot(("state", turn, name, home), what))
            like = group.computed_structs(home)
            told: dict[str, Any] = {}
            for field in fields:
                wanted = list(like[field])
                given = wanted
                if layout.here(home):
                    held = list(state[home, name][field])
                    given = jax.device_put(held, [x.sharding for x in wanted])
                told[field] = _read(layout, given)
            yield (home, name), told


def _read(layout: Layout, arrays: Sequence[Any]) -> list[np.ndarray]:
    """Arrays, or structs of those elsewhere, on this island's host."""
    readers = layout.readers
    sent = [x for x in arrays for _ in readers]
    came = layout.move(sent, readers * len(arrays))[layout.reader :: len(readers)]
    return [np.asarray(x) for x in layout.carrier.settle(came)]
