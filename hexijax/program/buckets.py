"""Which parameters are reduced, updated and gathered by one instruction.

    Plan, Chain -> buckets -> (Group, ...), each of one or more groups of the chain

A program call costs about the same whatever its size, and small collectives use little
of a link: a card that ran a call a layer stood idle for a tenth of its step. A bucket
joins groups that the same segments use and the same homes hold, and that train, or do
not; these only with others that are cast, or are not, since where the masters lie
follows. It ends where its copies in flight would cost memory worth having. Where state
comes from host memory for its update a bucket is a chunk: small enough that one comes
while another is updated and a third leaves, so large groups are cut between leaves, and
large leaves between rows.
"""

import dataclasses
import itertools
import math

from hexijax.layers.chain import Chain, Group, Leaf, LeafPart
from hexijax.plan.plan import Memory, Place, Plan
from hexijax.program.boxes import PART, state_share, used_as_it_is, users
from hexijax.program.program import Site

ALONE_SIZE = 2**28
"""Most parameters of a bucket that one stage uses and is home of: no copies arrive."""

SHARED_SIZE = 2**26
"""Most of any other, of a small model: each user's gradient is copied to the homes."""

SHARED_COUNT = 8
"""Larger models have larger ones, about so many: a bucket is four calls of a device,
and no host is more than 32 ahead of it; what comes behind is dispatched while it waits.
"""

SLACK = 8
"""A chunk, or its one large leaf, may have one part in so many more: a bias beside its
matrix."""


def shared_size(num_params: int) -> int:
    """Most parameters of a bucket that several stages use or are home of, in a model of
    so many: 2^26 to 2^28."""
    return max(SHARED_SIZE, min(ALONE_SIZE, num_params // SHARED_COUNT))


def buckets(
    plan: Plan, chain: Chain, *, whole_leaves: bool = False
) -> tuple[Group, ...]:
    """The chain's groups, joined; named after their first, in the order of the chain.

    A larger group stays whole, and ends the bucket before it; but for chunks.
    ``whole_leaves`` cuts no leaf, for optimizers that look inside one.
    """
    found: list[list[Group]] = []
    sizes: list[int] = []
    open_at: dict[object, int] = {}
    segments_L = layer_segments(plan, len(chain.layers))
    parts = (_parts(plan, whole, whole_leaves) for whole in chain.groups)
    shared = shared_size(chain.num_trained)
    for group in itertools.chain(*parts):
        users = user_segments(segments_L, group)
        stages = {place for place, _ in users}
        kind = group.trainable or (False, used_as_it_is(plan, chain, group))
        key = (users, _share(plan, group), kind)
        at = open_at.get(key)
        limit = ALONE_SIZE if _is_alone(plan, group, stages) else shared
        if streams_state(plan, group):
            limit = plan.chunk
        if at is None or sizes[at] + group.size > limit:
            open_at[key] = len(found)
            found.append([group])
            sizes.append(group.size)
        else:
            found[at].append(group)
            sizes[at] += group.size
    return tuple(map(_joined, found))


def streams_state(plan: Plan, group: Group) -> bool:
    """Whether a group's state rests in host memory."""
    share = state_share(plan, group)
    return group.trainable and share is not None and share.memory is Memory.HOST


def update_site(plan: Plan, group: Group) -> Site:
    """Where a group's update runs."""
    if not streams_state(plan, group):
        return Site.DEVICE
    share = state_share(plan, group)
    on_host = share is not None and share.update is Memory.HOST
    return Site.HOST if on_host else Site.STREAMED


def _parts(plan: Plan, group: Group, whole_leaves: bool) -> list[Group]:
    """The group, or its chunks where its state rests in host memory."""
    if not streams_state(plan, group):
        return [group]
    lanes = math.lcm(*(plan.stage(place).lanes for place in users(plan, group)))
    return chunks(group, plan.chunk, lanes=lanes, whole_leaves=whole_leaves)


def chunks(
    group: Group, size: int, *, lanes: int, whole_leaves: bool = False
) -> list[Group]:
    """The group, or where it has more than ``size`` parameters, runs of its leaves and
    of parts of leaves, each of rows that ``lanes`` divides. A leaf of two chunks or
    less is one, since a segment puts parts together each time that it runs."""
    if group.size <= size:
        return [group]
    leaves = group.leaves
    if not whole_leaves:
        leaves = tuple(x for leaf in leaves for x in _rows(leaf, size, lanes))
    runs: list[list[Leaf]] = [[]]
    for leaf in leaves:
        sizes = [leaf.size, *(x.size for x in runs[-1])]
        if runs[-1] and sum(sizes) > max(size, *sizes) + size // SLACK:
            runs.append([])
        runs[-1].append(leaf)
    return [
        dataclasses.replace(
            group, name=f"{group.name}{PART}{i}" if i else group.name, leaves=tuple(run)
        )
        for i, run in enumerate(runs)
    ]


def _rows(leaf: Leaf, size: int, unit: int) -> list[Leaf]:
    """The leaf, or where it is too large for a chunk, parts of about equal size, each
    of some units of rows along the first dim that has enough and is not split."""
    for dim, rows in enumerate(leaf.shape):
        most = size * rows // leaf.size // unit * unit
        if leaf.size <= 2 * size or dim == leaf.tensor_dim or not most:
            continue
        each = -(-rows // -(-rows // most))
        each = -(-each // unit) * unit
        return [
            LeafPart(
                name=leaf.name,
                shape=(
                    *leaf.shape[:dim],
                    min(each, rows - start),
                    *leaf.shape[dim + 1 :],
                ),
                dtype=leaf.dtype,
                row=leaf.row,
                tensor_dim=leaf.tensor_dim,
                trainable=leaf.trainable,
                whole=leaf,
                dim=dim,
                start=start,
            )
            for start in range(0, rows, each)
        ]
    return [leaf]


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
    name = group.name.split(PART)[0]
    wanted = {name, "*"} if everywhere else {name}
    own = [i for i, share in enumerate(plan.state) if name in share.groups]
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
