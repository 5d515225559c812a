"""Which parameters are reduced, updated and gathered by one instruction.

    Plan, Chain -> buckets -> (Group, ...), each of one or more groups of the chain

A program call costs about the same whatever its size, and small collectives use little
of a link: a card that ran a call a layer stood idle for a tenth of its step. A bucket
joins groups that the same segments use and the same homes hold, and that train, or do
not; these only with others that are cast, or are not, since where the masters lie
follows. It ends where its copies in flight would cost memory worth having.
"""

import dataclasses

from hexijax.layers.chain import Chain, Group
from hexijax.plan.plan import Place, Plan
from hexijax.program.boxes import used_as_it_is

ALONE_SIZE = 2**28
"""Most parameters of a bucket that one stage uses and is home of: no copies arrive."""

SHARED_SIZE = 2**26
"""Most of any other: each user's gradient is copied to the homes."""


def buckets(plan: Plan, chain: Chain) -> tuple[Group, ...]:
    """The chain's groups, joined; named after their first, in the order of the chain.

    A larger group stays whole, and ends the bucket before it.
    """
    found: list[list[Group]] = []
    sizes: list[int] = []
    open_at: dict[object, int] = {}
    segments_L = layer_segments(plan, len(chain.layers))
    for group in chain.groups:
        users = user_segments(segments_L, group)
        stages = {place for place, _ in users}
        kind = group.trainable or (False, used_as_it_is(plan, chain, group))
        key = (users, _share(plan, group), kind)
        at = open_at.get(key)
        limit = ALONE_SIZE if _is_alone(plan, group, stages) else SHARED_SIZE
        if at is None or sizes[at] + group.size > limit:
            open_at[key] = len(found)
            found.append([group])
            sizes.append(group.size)
        else:
            found[at].append(group)
            sizes[at] += group.size
    return tuple(map(_joined, found))


def segment_buckets(
    groups: tuple[Group, ...], layers: tuple[int, int]
) -> tuple[Group, ...]:
    """Those that layers [start, stop) use."""
    start, stop = layers
    return tuple(
        group for group in groups if any(start <= at < stop for at in group.layers)
    )


Segments = tuple[tuple[Place, int], ...]
"""Stages and indices of their segments, in the order of the plan."""


def layer_segments(plan: Plan, num_layers: int) -> list[Segments]:
    """For each layer, those that compute it."""
    found: list[list[tuple[Place, int]]] = [[] for _ in range(num_layers)]
    for place, stage in plan.stages():
        first = stage.layers[0]
        for segment, count in enumerate(stage.segments):
            for layer in range(first, first + count):
                found[layer].append((place, segment))
            first += count
    return list(map(tuple, found))


def user_segments(segments_L: list[Segments], group: Group) -> Segments:
    """Segments that compute with a group."""
    if len(group.layers) == 1:
        return segments_L[group.layers[0]]
    return tuple(sorted({at for layer in group.layers for at in segments_L[layer]}))


def _share(plan: Plan, group: Group, *, everywhere: bool = False) -> int | None:
    """Index of the state share that names the group; ``everywhere``: or all groups."""
    wanted = {group.name, "*"} if everywhere else {group.name}
    own = [i for i, share in enumerate(plan.state) if group.name in share.groups]
    named = [i for i, share in enumerate(plan.state) if wanted & set(share.groups)]
    return (own or named or [None])[-1]


def _is_alone(plan: Plan, group: Group, stages: set[Place]) -> bool:
    """Whether one stage uses a group and holds its state: nothing is copied then."""
    share = _share(plan, group, everywhere=True)
    homes = set(plan.state[share].shares) if share is not None else set[Place]()
    return len(stages) == 1 and homes <= stages


def _joined(groups: list[Group]) -> Group:
    return dataclasses.replace(
        groups[0],
        leaves=tuple(leaf for group in groups for leaf in group.leaves),
        layers=tuple(sorted({layer for group in groups for layer in group.layers})),
    )
