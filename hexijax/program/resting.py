"""Which arrays the state of a bucket is of where it rests in host memory.

    sizes of boxes, who may, site, devices -> joined -> numbers of those that are one

A copy's start takes as long as 4 MB on their way, so what is small of a chunk that
comes to its device and leaves again rests as one array. The runtime moves state so, and
the costs count its arrays so.
"""

import math
from collections.abc import Mapping, Sequence

from hexijax.layers.chain import Chain, Group, Leaf, whole_leaf
from hexijax.plan.plan import Plan, Stage
from hexijax.program.boxes import Box, users
from hexijax.program.buckets import update_site
from hexijax.program.program import Site

LOOSE_SIZE = 2**20
"""Most elements of an array that rests joined to others of its chunk (H200, where a
copy's start takes 70 microseconds)."""


def joined(
    sizes: Sequence[int], may: Sequence[bool], *, site: Site, devices: int
) -> tuple[int, ...]:
    """Numbers of the arrays that rest as one; empty: none do.

    Args:
      sizes: elements of each array at one home.
      may: whether each is of float32, and nobody asks for it by itself.
      site: where the update runs: the host's own memory has them as they are.
      devices: of the home: several share an array's parts, not arrays.
    """
    if site is not Site.STREAMED or devices > 1:
        return ()
    small = [
        i
        for i, (size, yes) in enumerate(zip(sizes, may, strict=True))
        if yes and size <= LOOSE_SIZE
    ]
    return tuple(small) if len(small) > 1 else ()


def state_arrays(
    plan: Plan,
    chain: Chain,
    group: Group,
    boxes: Mapping[str, Box],
    *,
    devices: int,
    moments: int,
) -> tuple[int, int]:
    """Arrays of a bucket's state at a home: masters, and moments that are like them.

    What else an optimizer keeps, such as a count of steps, is not among them.

    Args:
      plan: where state rests.
      chain: whose parameters.
      group: the bucket.
      boxes: what the home holds, by leaf.
      devices: of the home.
      moments: of the optimizer for each parameter.
    """
    cast = casts(plan, chain, group)
    held = [(leaf, boxes[leaf.id]) for leaf in group.leaves if leaf.id in boxes]
    return count_arrays(
        [math.prod(stop - start for start, stop in box) for _, box in held],
        [leaf.dtype == "float32" for leaf, _ in held],
        [cast[leaf.id] for leaf, _ in held],
        site=update_site(plan, group),
        devices=devices,
        moments=moments,
    )


def count_arrays(
    sizes: Sequence[int],
    wide: Sequence[bool],
    cast: Sequence[bool],
    *,
    site: Site,
    devices: int,
    moments: int,
) -> tuple[int, int]:
    """Masters and moments of boxes of so many elements; ``wide``: of float32, as its
    moments are then; ``cast``: its users get it in another dtype."""

    def count(sizes: Sequence[int], may: Sequence[bool]) -> int:
        which = joined(sizes, may, site=site, devices=devices)
        return len(sizes) - max(0, len(which) - 1)

    may = [a and b for a, b in zip(wide, cast, strict=True)]
    return count(sizes, may), count([*sizes] * moments, [*wide] * moments)


def casts(plan: Plan, chain: Chain, group: Group) -> dict[str, bool]:
    """By leaf, whether its users get it in another dtype than its master's: a master
    that is not cast is what they get, so it rests by itself."""
    found = {
        tuple(used_as(chain, plan.stage(at), leaf, group) for leaf in group.leaves)
        for at in users(plan, group)
    }
    if len(found) > 1:  # each user casts for itself
        return {leaf.id: False for leaf in group.leaves}
    (dtypes,) = found
    return {
        leaf.id: dtype != leaf.dtype
        for leaf, dtype in zip(group.leaves, dtypes, strict=True)
    }


def used_as(chain: Chain, stage: Stage, leaf: Leaf, group: Group) -> str:
    """The dtype in which a stage's segments are handed a leaf of a group."""
    start, stop = stage.layers
    name = whole_leaf(leaf).id
    uncast = any(
        name in chain.layers[i].uncast for i in group.layers if start <= i < stop
    )
    floats = leaf.dtype.startswith(("float", "bfloat"))
    return stage.dtype if floats and not uncast else leaf.dtype
