"""Small clusters and chains drawn at random: what can be planned by trying everything.

Up to four devices of up to three kinds in up to three nodes, links of 0.2-100 GB/s,
up to eight layers. Steps last from 0.1 to 10 s, and neither compute, borders, sums nor
memory always decides.
"""

import dataclasses
import random
from collections.abc import Sequence

from hexijax.cluster import (
    Cluster,
    DeviceGroup,
    DeviceProfile,
    LinkProfile,
    Links,
    NamedLink,
    Node,
)
from hexijax.layers.chain import Array, Chain, Group, Layer, Leaf, Remat

GIB = 2**30


@dataclasses.dataclass(frozen=True, kw_only=True)
class Case:
    """Something to plan."""

    seed: int
    cluster: Cluster
    chain: Chain
    batch_size: int

    def __str__(self) -> str:
        groups = [
            f"{node.name}: {', '.join(f'{g.count} {g.kind}' for g in node.devices)}"
            for node in self.cluster.nodes
        ]
        rates = [
            f"{'-'.join(pair.between)} {pair.link.bytes_per_s / 1e9:.2g} GB/s"
            for pair in self.cluster.links.node_pairs
        ]
        params = sum(group.size for group in self.chain.groups) / 1e6
        return (
            f"seed {self.seed}: {len(self.chain.layers)} layers of {params:.0f} M, "
            f"batch {self.batch_size}; {'; '.join(groups + rates)}"
        )


def small_case(seed: int, *, full: bool = False) -> Case:
    """A case; ``full``: four devices and eight layers, else up to that."""
    rng = random.Random(seed)
    num_devices = 4 if full else rng.randint(1, 4)
    num_layers = 8 if full else rng.randint(2, 8 if num_devices < 4 else 6)
    return Case(
        seed=seed,
        cluster=small_cluster(rng, num_devices),
        chain=small_chain(rng, num_layers),
        batch_size=rng.randint(4, 8 if num_devices > 2 else 12),
    )


def small_cluster(rng: random.Random, num_devices: int) -> Cluster:
    """Devices dealt to nodes; a node may mix kinds."""
    kinds = [_kind(rng, f"k{i}") for i in range(rng.randint(1, 3))]
    num_nodes = min(rng.choice([1, 2, 2, 3]), num_devices)
    counts = [1] * num_nodes
    for _ in range(num_devices - num_nodes):
        counts[rng.randrange(num_nodes)] += 1
    nodes = tuple(
        Node(
            name=f"n{i}",
            devices=_groups(rng, kinds, count),
            host_memory_bytes=64 * GIB,
            host_cores=8,
            link=_link(rng, 5, 100) if count > 1 else None,
        )
        for i, count in enumerate(counts)
    )
    pairs = tuple(
        NamedLink(between=(a.name, b.name), link=_link(rng, 0.2, 25))
        for i, a in enumerate(nodes)
        for b in nodes[:i]
    )
    return Cluster(
        name="drawn", nodes=nodes, links=Links(node_pairs=pairs), profiles=tuple(kinds)
    )


def small_chain(rng: random.Random, num_layers: int) -> Chain:
    """Mostly equal layers; the first may be light, the last heavy, all may differ."""
    flops = 10 ** rng.uniform(11, 12)
    rows = 64 * rng.choice([8, 16, 32, 64])
    border_bytes = int(10 ** rng.uniform(6, 7.5))
    kept_bytes = int(10 ** rng.uniform(7.5, 9))
    weights = [1.0] * num_layers
    if rng.random() < 0.4:
        weights[0] = 0.05
    if rng.random() < 0.4:
        weights[-1] = rng.uniform(1, 4)
    if rng.random() < 0.3:
        weights = [rng.uniform(0.3, 2.0) for _ in weights]
    groups = tuple(
        Group(
            name=f"layer/{i}",
            leaves=(
                Leaf(name=f"layer/{i}/scale", shape=(256,)),
                Leaf(
                    name=f"layer/{i}/kernel",
                    shape=(rows, max(64, int(8 * weight) * 512)),
                    tensor_dim=1,
                ),
            ),
            layers=(i,),
        )
        for i, weight in enumerate(weights)
    )
    return weighted_chain(
        "drawn",
        groups,
        weights,
        flops=flops,
        kept_bytes=kept_bytes,
        border_bytes=border_bytes,
    )


def weighted_chain(
    name: str,
    groups: tuple[Group, ...],
    weights: Sequence[float],
    *,
    flops: float,
    kept_bytes: int,
    border_bytes: int,
) -> Chain:
    """A layer a group; FLOPs and what is kept go with its weight, borders are alike."""
    layers = tuple(
        Layer(
            name=group.name,
            signature=f"weight {weight:.17g}",
            groups=(group.name,),
            batch=("x",) if i in (0, len(weights) - 1) else (),
            forward_flops=float(weight * flops),
            backward_flops=2.0 * weight * flops,
            products=(),
            forward_bytes=float(kept_bytes * weight),
            backward_bytes=2.0 * kept_bytes * weight,
            border_bytes=border_bytes if i < len(weights) - 1 else 0,
            activation_bytes={
                Remat.NONE: int(kept_bytes * weight),
                Remat.DOTS: int(kept_bytes * weight / 2),
                Remat.FULL: border_bytes,
            },
            joined_bytes=int(kept_bytes * weight),
        )
        for i, (group, weight) in enumerate(zip(groups, weights, strict=True))
    )
    return Chain(
        name=name,
        layers=layers,
        groups=groups,
        batch={"x": Array(shape=(16,), dtype="int32")},
    )


def _groups(
    rng: random.Random, kinds: list[DeviceProfile], count: int
) -> tuple[DeviceGroup, ...]:
    if count > 1 and len(kinds) > 1 and rng.random() < 0.3:
        first, second = rng.sample(kinds, 2)
        part = rng.randint(1, count - 1)
        return (
            DeviceGroup(kind=first.kind, count=part),
            DeviceGroup(kind=second.kind, count=count - part),
        )
    return (DeviceGroup(kind=rng.choice(kinds).kind, count=count),)


def _kind(rng: random.Random, kind: str) -> DeviceProfile:
    return DeviceProfile(
        kind=kind,
        vendor="cpu",
        nominal_memory_bytes=int(GIB * rng.choice([4, 8, 16, 64, 64])),
        dense_flops_per_s={"float32": 10 ** rng.uniform(13, 14)},
        memory_bytes_per_s=10 ** rng.uniform(11.5, 12.5),
        host_link_bytes_per_s=1e10,
    )


def _link(rng: random.Random, slowest: float, fastest: float) -> LinkProfile:
    """GB/s, every size as likely as its double."""
    rate = slowest * (fastest / slowest) ** rng.random()
    return LinkProfile(latency_s=rng.choice([5e-6, 50e-6]), bytes_per_s=rate * 1e9)
