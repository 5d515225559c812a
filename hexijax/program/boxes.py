"""Where each row of the state lives, and which pieces go from one tiling to another.

    Plan, Chain, Group -> state_boxes -> place -> leaf id -> Box
    two tilings -> intersect -> (Piece, ...)

A box is one (start, stop) per dim of a leaf. A leaf is cut along one dim, rows in
proportion to the shares of its homes. Gather, Reduce, checkpoint and recovery all move
what ``intersect`` lists.
"""

import dataclasses
import functools
import math
from collections.abc import Mapping, Sequence

from hexijax.layers.chain import Chain, Group, Leaf
from hexijax.plan.plan import Params, Place, Plan, PlanError, Stage, StateShare

Box = tuple[tuple[int, int], ...]
Tiling = Mapping[Place, Mapping[str, Box]]
"""Boxes by place and leaf id; a place without rows of a leaf does not list it."""

PART = " part "
"""Between the name of a group and the number of some of its leaves."""

MIN_CUT_SIZE = 2**14
"""Leaves of fewer elements stay whole: a message costs more than their bytes."""


MIN_UNITS = 4
"""Of rows in a home, where they are cut in units: what is uneven stays small."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """A box that two tilings share, held by ``source`` and wanted by ``target``."""

    leaf: str
    box: Box
    source: Place
    target: Place


def users(plan: Plan, group: Group) -> tuple[Place, ...]:
    """Places that compute with a group, ``r0.s0`` first."""
    return tuple(_devices(plan, group))


def residence(plan: Plan, group: Group) -> dict[Place, Params]:
    """How long each of them has its parameters: as the segment that asks for most.

    What does not train is kept by all: it never changes.
    """
    return {place: _residence(plan.stage(place), group) for place in users(plan, group)}


def _residence(stage: Stage, group: Group) -> Params:
    if not stage.params or not group.trainable:
        return Params.KEPT
    asked = {
        each
        for g, each in enumerate(stage.params)
        if _reads(stage.segment_layers(g), group.layers)
    }
    return next(each for each in _MOST_FIRST if each in asked)


_MOST_FIRST = (Params.KEPT, Params.STREAMED, Params.FREED)


def used_as_it_is(plan: Plan, chain: Chain, group: Group) -> bool:
    """Whether its first user computes with a group's leaves in their own dtypes."""
    stage = plan.stage(users(plan, group)[0])
    uncast = {x for layer in chain.layers[slice(*stage.layers)] for x in layer.uncast}
    return all(x.dtype == stage.dtype or x.id in uncast for x in group.leaves)


class _Users:
    """Who computes with which layers, of one plan; many groups ask in a row."""

    def __init__(self, plan: Plan | None) -> None:
        self.plan = plan
        self.devices: dict[tuple[int, ...], dict[Place, int]] = {}
        self.units: dict[tuple[int, ...], int] = {}


_asked_last = _Users(None)


def _users_of(plan: Plan) -> _Users:
    """Kept for the plan asked about last: a hash of it costs more than an answer."""
    global _asked_last
    known = _asked_last
    if known.plan is not plan:
        known = _asked_last = _Users(plan)
    return known


def _devices(plan: Plan, group: Group) -> dict[Place, int]:
    """The same, each with how many devices it has."""
    known = _users_of(plan).devices
    if group.layers not in known:
        known[group.layers] = {
            place: len(stage.devices)
            for place, stage in plan.stages()
            if _reads(stage.layers, group.layers)
        }
    return known[group.layers]


@functools.lru_cache(maxsize=2**14)
def _reads(stage: tuple[int, int], layers: tuple[int, ...]) -> bool:
    """Whether a run of layers has one of some ascending ones."""
    start, stop = stage
    if not layers or layers[-1] < start or layers[0] >= stop:
        return False
    return any(start <= layer < stop for layer in layers)


def state_share(plan: Plan, group: Group) -> StateShare | None:
    """What the plan says of a group's state, or of all groups'; None: nothing."""
    name = group.name.split(PART)[0]
    named = [s for s in plan.state if name in s.groups]
    shares = named or [s for s in plan.state if "*" in s.groups]
    return shares[-1] if shares else None


def homes(plan: Plan, chain: Chain, group: Group) -> tuple[tuple[Place, float], ...]:
    """Places that hold a group's state, with shares that sum to 1; none is 0.

    What does not train is no state to divide: its first user holds it.
    """
    if not group.trainable:
        return ((users(plan, group)[0], 1.0),)
    share = state_share(plan, group)
    given = dict(share.shares) if share else {}
    if not given:
        given = dict[Place, float](_devices(plan, group))
    total = sum(given.values())
    if min(given.values()) < 0 or not total > 0 or not math.isfinite(total):
        raise PlanError(
            f"The state shares of group {group.name!r} are {given}. A share is a part "
            "on any scale: none is negative, and at least one is above 0. Leave the "
            "shares empty to divide evenly over the stages that compute with the group."
        )
    return tuple((place, share / total) for place, share in given.items() if share)


def state_boxes(
    plan: Plan, chain: Chain, group: Group, *, whole_leaves: bool = False
) -> dict[Place, dict[str, Box]]:
    """The boxes each home holds of each leaf; they tile every leaf exactly.

    A home that gets no row of any leaf is left out. ``whole_leaves`` cuts none, for
    optimizers that look inside a leaf: largest first, each to the home furthest below
    its share.
    """
    shares = homes(plan, chain, group)
    boxes: dict[Place, dict[str, Box]] = {place: {} for place, _ in shares}
    if whole_leaves:
        _deal_whole(group, shares, boxes)
    else:
        parts, unit = tuple(share for _, share in shares), row_unit(plan, group)
        for leaf in group.leaves:
            for i, box in cut(leaf.shape, leaf.tensor_dim, parts, unit):
                boxes[shares[i][0]][leaf.id] = box
    return {place: held for place, held in boxes.items() if held}


def holders(
    plan: Plan, chain: Chain, group: Group, *, whole_leaves: bool = False
) -> tuple[Place, ...]:
    """The homes that ``state_boxes`` lists, without the boxes."""
    if whole_leaves:
        return tuple(state_boxes(plan, chain, group, whole_leaves=True))
    shares = homes(plan, chain, group)
    parts = tuple(share for _, share in shares)
    shapes = {(leaf.shape, leaf.tensor_dim) for leaf in group.leaves}
    unit = row_unit(plan, group)
    held = {i for shape in shapes for i, _ in cut(*shape, parts, unit)}
    return tuple(place for i, (place, _) in enumerate(shares) if i in held)


def whole(leaf: Leaf) -> Box:
    """The box of all of a leaf."""
    return tuple((0, rows) for rows in leaf.shape)


def overlap(a: Box, b: Box) -> Box | None:
    """The box that two boxes share, or None; boxes without dims share ``()``."""
    shared = tuple(
        (max(a0, b0), min(a1, b1)) for (a0, a1), (b0, b1) in zip(a, b, strict=True)
    )
    return shared if all(start < stop for start, stop in shared) else None


def intersect(sources: Tiling, targets: Tiling) -> tuple[Piece, ...]:
    """Every piece that some source holds and some target wants.

    In the order of the targets, their leaves, and the sources.
    """
    holders: dict[str, list[tuple[Place, Box]]] = {}
    for place, held in sources.items():
        for leaf, box in held.items():
            holders.setdefault(leaf, []).append((place, box))
    return tuple(
        Piece(leaf=leaf, box=shared, source=source, target=target)
        for target, wanted in targets.items()
        for leaf, want in wanted.items()
        for source, box in holders.get(leaf, ())
        if (shared := overlap(box, want)) is not None
    )


def split_rows(rows: int, shares: Sequence[float]) -> list[int]:
    """Whole rows in proportion to shares, by largest remainder; ties to the first."""
    total = sum(shares)
    exact = [rows * share / total for share in shares]
    counts = [math.floor(x) for x in exact]
    by_remainder = sorted(range(len(shares)), key=lambda i: counts[i] - exact[i])
    for i in by_remainder[: rows - sum(counts)]:
        counts[i] += 1
    return counts


def row_unit(plan: Plan, group: Group) -> int:
    """Rows that all lanes can divide.

    A box goes whole to every lane that cannot have a part of it. At tensor degree 1
    they divide it along another dim.
    """
    known = _users_of(plan).units
    if group.layers not in known:
        stages = map(plan.stage, users(plan, group))
        lanes = {stage.lanes for stage in stages if stage.tensor > 1}
        known[group.layers] = math.lcm(*lanes)
    return known[group.layers]


@functools.lru_cache(maxsize=2**12)
def cut(
    shape: tuple[int, ...],
    tensor_dim: int | None,
    shares: tuple[float, ...],
    unit: int = 1,
) -> tuple[tuple[int, Box], ...]:
    """Boxes by index of the share; equal layers are cut alike, once.

    In units of some rows where a home has several; the last has the rest.
    """
    dims = [
        dim
        for dim, rows in enumerate(shape)
        if dim != tensor_dim and rows >= len(shares)
    ]
    every = tuple((0, rows) for rows in shape)
    if len(shares) == 1 or math.prod(shape) < MIN_CUT_SIZE or not dims:
        return ((max(range(len(shares)), key=lambda i: shares[i]), every),)
    boxes: list[tuple[int, Box]] = []
    dim, start = dims[0], 0
    if shape[dim] < MIN_UNITS * unit * len(shares):
        unit = 1
    last = max(i for i, share in enumerate(shares) if share)
    for i, units in enumerate(split_rows(shape[dim] // unit, shares)):
        rows = units * unit + (shape[dim] % unit if i == last else 0)
        if rows:
            stop = start + rows
            boxes.append((i, (*every[:dim], (start, stop), *every[dim + 1 :])))
            start = stop
    return tuple(boxes)


def _deal_whole(
    group: Group,
    shares: Sequence[tuple[Place, float]],
    boxes: Mapping[Place, dict[str, Box]],
) -> None:
    """Adds every leaf, whole, to ``boxes``."""
    room = {place: share * group.size for place, share in shares}
    for leaf in sorted(group.leaves, key=lambda leaf: -leaf.size):
        place = max(room, key=lambda place: room[place])
        boxes[place][leaf.id] = whole(leaf)
        room[place] -= leaf.size
