"""Clusters as people have them, and models that fit: drawn from a seed.

    seed, number -> draw -> Contest(cluster, chain, batch size)

A node holds 1 to 8 cards of one kind, joined by NVLink where the kind has it and by
PCIe where not; a kind's nodes share one network and each a card of it, 0.1 to 25 GB/s;
half the clusters stand at two sites. Equal arguments draw equal contests.
"""

import dataclasses
import functools
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
    catalog,
)
from hexijax.layers.chain import Chain
from hexijax.layers.known import NAMES, known

GIB = 2**30
FAMILIES = ("gpt", "llama", "bert", "vit")

NVLINK_BYTES_PER_S = 200e9
"""One figure for every NVLink: from 130 (V100) to 370 GB/s (H100) are sustained."""

PCIE_SHARE = 0.7
"""Of a card's nominal host link, between two cards of a node."""

STATE_BYTES = 20
"""Of a parameter: bfloat16, float32 gradient, master, two moments; rounded up."""

ROOM = 0.6
"""Of the cluster's memory that parameters and state may take; the rest is for
activations."""


BATCH_TOKENS = (2**18, 2**19, 2**20, 2**21)
"""Of a step: what people train with is a matter of the model, not of the cluster; at
least two samples a card."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Contest:
    """Something to plan."""

    seed: int
    """Of the whole series."""

    number: int
    """In it."""

    cluster: Cluster
    """Drawn."""

    chain: Chain
    """A known model that fits the cluster's memory."""

    batch_size: int
    """Samples a step."""

    dtype: str
    """Compute dtype; kinds that lack it use the next they have."""

    def __str__(self) -> str:
        counts: dict[str, int] = {}
        for device in self.cluster.devices:
            counts[device.kind] = counts.get(device.kind, 0) + 1
        cards = " + ".join(f"{count} {kind}" for kind, count in counts.items())
        return f"{self.chain.name}, batch {self.batch_size}, on {cards}"


def draw(seed: int, number: int, *, most_devices: int = 512) -> Contest:
    """The contest of that number."""
    rng = random.Random(f"{seed}/{number}")
    cluster = _cluster(rng, most_devices)
    chain = _chain(rng, cluster)
    batch_size = rng.choice(BATCH_TOKENS) // chain.tokens_per_sample
    return Contest(
        seed=seed,
        number=number,
        cluster=cluster,
        chain=chain,
        batch_size=max(batch_size, 2 * len(cluster.devices)),
        dtype="bfloat16",
    )


def _cluster(rng: random.Random, most_devices: int) -> Cluster:
    num_devices = round(4 * (most_devices / 4) ** rng.random())
    kinds = [p for p in catalog.profiles().values() if _is_gpu(p)]
    chosen = rng.sample(kinds, min(rng.randint(2, 6), num_devices))
    sites = rng.choice([("here",), ("here", "there")])
    counts = _parts(rng, num_devices, len(chosen))
    nodes: list[Node] = []
    for profile, count in zip(chosen, counts, strict=True):
        nodes += _nodes(rng, profile, count, rng.choice(sites), len(nodes))
    used = sorted({node.site for node in nodes})
    between = NamedLink(between=("here", "there"), link=_network(rng, slowest=0.1))
    return Cluster(
        name="drawn",
        nodes=tuple(nodes),
        links=Links(site_pairs=(between,) if len(used) > 1 else ()),
    )


def _is_gpu(profile: DeviceProfile) -> bool:
    return profile.jax_runs and profile.vendor in ("nvidia", "amd")


def _parts(rng: random.Random, total: int, count: int) -> Sequence[int]:
    """Positive numbers of like size that sum to ``total``."""
    weights = [rng.uniform(0.5, 2) for _ in range(count)]
    parts = [max(1, round(total * w / sum(weights))) for w in weights]
    while sum(parts) != total:
        i = max(range(count), key=lambda i: parts[i])
        parts[i] += 1 if sum(parts) < total else -1
    return parts


def _nodes(
    rng: random.Random, profile: DeviceProfile, count: int, site: str, first: int
) -> list[Node]:
    """``count`` cards of a kind, in nodes of one size; the last may have fewer."""
    fits = [n for n in (1, 2, 4, 8) if n <= count]
    # Nobody wires hundreds of single cards.
    size = rng.choice([n for n in fits if count // n <= 64] or fits[-1:])
    nvlink = profile.kind.endswith(("-sxm", "-nvl"))
    rate = NVLINK_BYTES_PER_S if nvlink else profile.host_link_bytes_per_s * PCIE_SHARE
    inside = LinkProfile(latency_s=5e-6 if nvlink else 15e-6, bytes_per_s=rate)
    nic = _network(rng, slowest=0.1)
    sizes = [min(size, count - start) for start in range(0, count, size)]
    return [
        Node(
            name=f"n{first + i}",
            devices=(DeviceGroup(kind=profile.kind, count=cards),),
            host_memory_bytes=64 * GIB * cards,
            host_cores=16 * cards,
            link=inside,
            nic=nic,
            site=site,
        )
        for i, cards in enumerate(sizes)
    ]


def _network(rng: random.Random, *, slowest: float, fastest: float = 25) -> LinkProfile:
    """GB/s, every rate as likely as its double."""
    rate = slowest * (fastest / slowest) ** rng.random()
    return LinkProfile(latency_s=50e-6, bytes_per_s=rate * 1e9)


_known = functools.cache(known)


def _chain(rng: random.Random, cluster: Cluster) -> Chain:
    """A size that fits, of a family drawn first; a smaller one if none does."""
    room = sum(d.usable_memory_bytes for d in cluster.devices) * ROOM
    family = rng.choice(FAMILIES)
    chains = [_known(name) for name in NAMES if name.startswith(family)]
    fits = [c for c in chains if c.num_params * STATE_BYTES <= room]
    return rng.choice(fits or [min(chains, key=lambda c: c.num_params)])
