"""The state of all islands on each of them, for those who want it whole.

    homes -> a reader on each island -> NumPy arrays

One group after another, so that no device holds more than one home's.
"""

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import jax
import numpy as np

from hexijax.plan.plan import Place
from hexijax.runtime.carrying import Spot, at_spot
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
            with at_spot(Spot(("state", turn, name, home), what)):
                held = state[home, name] if layout.here(home) else None
                like = group.computed_structs(home)
                told = {x: _read(layout, like[x], held and held[x]) for x in fields}
            yield (home, name), told


def _read(layout: Layout, like: Sequence[Any], held: Any) -> list[np.ndarray]:
    """Arrays, or those elsewhere that are like some structs, on this island's host."""
    arrays = list(like)
    if held is not None:
        arrays = jax.device_put(list(held), [x.sharding for x in like])
    return [np.asarray(x) for x in layout.carrier.settle(layout.tell(arrays))]
