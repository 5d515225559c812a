"""Plays equal replicas once: the part of a plan that stands for all of it.

    Plan, Chain, Cluster -> fold -> Fold: a smaller plan, how often each stage counts

Replicas that share a node share its ways, so they stay together as a bundle. Bundles
are equal when their stages, kinds, layers, microbatches, links and shares of the state
are, the rows at home to within ``ALIKE``: the largest stands for the others. What a
bundle sends to and gets from all others counts their number (``costs.exchange``).
O(stages of the plan), once for each of its groups.
"""

import collections
import dataclasses
import math
from collections.abc import Iterator, Mapping, Sequence

from hexijax.cluster import Cluster, Node
from hexijax.costs.instructions import Copies
from hexijax.layers.chain import Chain, Group
from hexijax.plan.plan import Place, Plan, stage_place
from hexijax.program.boxes import Box, cut, homes, row_unit
from hexijax.program.buckets import buckets

ALIKE = 0.1
"""Bundles whose rows at home differ by no more, relatively, are equal."""

Bundle = tuple[int, ...]
"""Replicas that share nodes."""

_Cut = tuple[tuple[int, ...], int | None]
"""Shape of a leaf, and the dim that tensor shards divide."""

_Alike = tuple[tuple[tuple[Place, float], ...], int, tuple[_Cut, ...]]
"""Homes of a bucket with their shares, rows that stay together, and its leaves."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Fold:
    """The part to play, and what it stands for."""

    plan: Plan
    """Its replicas stand for all."""

    copies: Copies | None
    """How often; None: the part is the whole plan."""

    like: Mapping[str, tuple[str, ...]]
    """Devices, nodes and islands by the one that is played; others stand for
    themselves."""


def fold(plan: Plan, chain: Chain, cluster: Cluster) -> Fold:
    """The smallest part that stands for the plan."""
    whole = Fold(plan=plan, copies=None, like={})
    stores = _stores(plan)
    bundles = _bundles(plan, cluster)
    alike: dict[object, list[Bundle]] = {}
    for bundle in bundles:
        key = _key(plan, cluster, bundle, stores)
        alike.setdefault(key, []).append(bundle)
    if len(alike) == len(bundles):
        return whole
    two = sorted(b for same in alike.values() for b in same[:2])
    groups = buckets(_part(plan, two), chain)
    held = _held(plan, chain, groups)
    classes = [c for same in alike.values() for c in _by_size(same, held)]
    if len(classes) == len(bundles):
        return whole
    played = sorted(classes, key=lambda same: same[0])
    number = {r: n for n, r in enumerate(r for same in played for r in same[0])}
    return Fold(
        plan=_part(plan, [same[0] for same in played]),
        copies=Copies(
            groups=groups,
            boxes={g.name: _boxes(plan, chain, g, number) for g in groups},
            count={
                place: len(same)
                for same in played
                for place, *_ in _places(plan, same[:1], number)
            },
            twin={
                place: devices[1]
                for same in played
                if len(same) > 1
                for place, *devices in _places(plan, same[:2], number)
            },
        ),
        like=_like(plan, cluster, played),
    )


def _bundles(plan: Plan, cluster: Cluster) -> list[Bundle]:
    """Replicas joined by the nodes they share."""
    parent = list(range(len(plan.replicas)))

    def root(r: int) -> int:
        while parent[r] != r:
            parent[r] = r = parent[parent[r]]
        return r

    first: dict[str, int] = {}
    for r, replica in enumerate(plan.replicas):
        for stage in replica.stages:
            for device in stage.devices:
                other = first.setdefault(cluster.device(device).node, r)
                parent[root(r)] = root(other)
    found: dict[int, list[int]] = {}
    for r in range(len(plan.replicas)):
        found.setdefault(root(r), []).append(r)
    return [tuple(bundle) for bundle in found.values()]


def _stores(plan: Plan) -> list[str]:
    """Devices that are homes by their own name."""
    stages = {place for place, _ in plan.stages()}
    return [p for share in plan.state for p in share.shares if p not in stages]


def _key(plan: Plan, cluster: Cluster, bundle: Bundle, stores: Sequence[str]) -> object:
    """What equal bundles have in common; names are counted as they come."""
    numbers: dict[str, int] = {}
    nodes: dict[str, Node] = {}
    stages: list[object] = []
    for r in bundle:
        replica = plan.replicas[r]
        stages.append((replica.microbatches, replica.microbatch_size))
        for s, stage in enumerate(replica.stages):
            where = []
            for name in stage.devices:
                device = cluster.device(name)
                nodes[device.node] = cluster.node(device.node)
                ends = (name, f"node {device.node}", f"island {device.island}")
                where.append((device.kind, *(_count(numbers, e) for e in ends)))
            shares = [x.shares.get(stage_place(r, s)) for x in plan.state]
            plain = dataclasses.replace(stage, devices=())
            stages.append((plain, tuple(where), tuple(shares)))
    own = [d for d in stores if cluster.device(d).node in nodes]
    links = tuple(_links(cluster, node) for node in nodes.values())
    return tuple(stages), links, tuple(own)


def _count(numbers: dict[str, int], name: str) -> int:
    return numbers.setdefault(name, len(numbers))


def _links(cluster: Cluster, node: Node) -> object:
    """What decides a node's links; one that a pair names is like no other."""
    named = {
        end.split("/")[0]
        for pair in (*cluster.links.node_pairs, *cluster.links.device_pairs)
        for end in pair.between
    }
    return node.name if node.name in named else (node.site, node.nic, node.link)


def _by_size(same: Sequence[Bundle], held: Sequence[float]) -> Iterator[list[Bundle]]:
    """Bundles with about the same rows at home, the largest first."""
    sizes = {bundle: sum(held[r] for r in bundle) for bundle in same}
    found: list[Bundle] = []
    for bundle in sorted(same, key=lambda b: -sizes[b]):
        if found and sizes[bundle] < sizes[found[0]] * (1 - ALIKE):
            yield found
            found = []
        found.append(bundle)
    yield found


def _part(plan: Plan, bundles: Sequence[Bundle]) -> Plan:
    """The plan of some replicas alone."""
    kept = [r for bundle in bundles for r in bundle]
    number = {r: n for n, r in enumerate(kept)}
    replicas = tuple(plan.replicas[r] for r in kept)
    moved = {
        stage_place(r, s): stage_place(n, s)
        for r, n in number.items()
        for s in range(len(plan.replicas[r].stages))
    }
    stages = {place for place, _ in plan.stages()}
    state = tuple(
        dataclasses.replace(
            share,
            shares={
                moved.get(place, place): part
                for place, part in share.shares.items()
                if place in moved or place not in stages
            },
        )
        for share in plan.state
    )
    return dataclasses.replace(
        plan,
        replicas=replicas,
        state=state,
        batch_size=sum(replica.samples for replica in replicas),
    )


def _held(plan: Plan, chain: Chain, groups: Sequence[Group]) -> list[float]:
    """Parameters at home in each replica."""
    alike: collections.Counter[_Alike] = collections.Counter()
    for group in groups:
        if group.trainable:  # what does not is no part of a step
            shapes = tuple((x.shape, x.tensor_dim) for x in group.leaves)
            alike[homes(plan, chain, group), row_unit(plan, group), shapes] += 1
    held = [0.0] * len(plan.replicas)
    for (shares, unit, shapes), times in alike.items():
        parts = tuple(share for _, share in shares)
        owners = [_replica(place) for place, _ in shares]
        for (shape, tensor_dim), count in collections.Counter(shapes).items():
            for i, box in cut(shape, tensor_dim, parts, unit):
                owner = owners[i]
                if owner is not None:
                    held[owner] += times * count * math.prod(b - a for a, b in box)
    return held


def _replica(place: Place) -> int | None:
    """Of a stage's place; None for a single device."""
    return None if "/" in place else int(place[1:].split(".s")[0])


def _boxes(
    plan: Plan, chain: Chain, group: Group, number: Mapping[int, int]
) -> dict[Place, dict[str, Box]]:
    """The boxes that the played homes hold in the whole plan."""
    if not group.trainable:
        return {}
    shares = homes(plan, chain, group)
    parts = tuple(share for _, share in shares)
    moved: dict[int, Place] = {}
    for i, (place, _) in enumerate(shares):
        replica = _replica(place)
        if replica is None:
            moved[i] = place
        elif replica in number:
            stage = int(place.split(".s")[1])
            moved[i] = stage_place(number[replica], stage)
    boxes: dict[Place, dict[str, Box]] = {place: {} for place in moved.values()}
    unit = row_unit(plan, group)
    cuts: dict[object, list[tuple[Place, Box]]] = {}
    for leaf in group.leaves:
        key = (leaf.shape, leaf.tensor_dim)
        if key not in cuts:
            found = cut(*key, parts, unit)
            cuts[key] = [(moved[i], box) for i, box in found if i in moved]
        for place, box in cuts[key]:
            boxes[place][leaf.id] = box
    return boxes


def _places(
    plan: Plan, same: Sequence[Bundle], number: Mapping[int, int]
) -> Iterator[tuple[Place, *tuple[tuple[str, ...], ...]]]:
    """Each stage's place in the part, and its devices in every bundle given."""
    for j, r in enumerate(same[0]):
        for s in range(len(plan.replicas[r].stages)):
            devices = [plan.replicas[b[j]].stages[s].devices for b in same]
            yield (stage_place(number[r], s), *devices)


def _like(
    plan: Plan, cluster: Cluster, played: Sequence[Sequence[Bundle]]
) -> dict[str, tuple[str, ...]]:
    """Names that each played device, node and island stands for, its own first."""
    found: dict[str, dict[str, None]] = {}
    for same in played:
        for bundle in same:
            for r, other in zip(same[0], bundle, strict=True):
                for mine, theirs in zip(
                    plan.replicas[r].stages, plan.replicas[other].stages, strict=True
                ):
                    for a, b in zip(mine.devices, theirs.devices, strict=True):
                        one, two = cluster.device(a), cluster.device(b)
                        for x, y in (
                            (a, b),
                            (one.node, two.node),
                            (one.island, two.island),
                        ):
                            found.setdefault(x, {})[y] = None
    return {name: tuple(names) for name, names in found.items()}
