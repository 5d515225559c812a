"""Clusters drawn at random, of any figures that a cluster may have.

From a ``random.Random`` and not as a strategy: runtime type checks draw random numbers
of their own, which hypothesis refuses inside a strategy.
"""

import random

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
from hexijax.cluster.profile import DTYPES

LINES = [
    "",
    "plain",
    'quoted "so"',
    "back\\slash",
    "# no comment",
    "größer ≥ 2",
    "🙂",
    "'",
]
CELLS = [*LINES, True, 0, -7, 2**60, 0.1, -1e-300, 1e18]
NAMES = ["a", "b.c", "d-e", "F_1", "9"]


def random_cluster(rng: random.Random) -> Cluster:
    """Up to four nodes of known and declared kinds, with links at every level."""
    profiles = [_profile(rng, kind) for kind in rng.sample(NAMES, rng.randrange(3))]
    if rng.random() < 0.3:
        profiles.append(_profile(rng, rng.choice(catalog.kinds())))
    kinds = [*(profile.kind for profile in profiles), *rng.sample(catalog.kinds(), 2)]
    names = rng.sample(NAMES, rng.randint(1, 4))
    nodes = tuple(_node(rng, name, kinds) for name in names)
    pairs = [(a, b) for a in names for b in names if a < b and rng.random() < 0.4]
    links = Links(
        in_node=_link(rng),
        between_nodes=_link(rng),
        node_pairs=tuple(NamedLink(between=pair, link=_link(rng)) for pair in pairs),
        site_pairs=(NamedLink(between=(nodes[0].site,) * 2, link=_link(rng)),),
    )
    return Cluster(name="drawn", nodes=nodes, links=links, profiles=tuple(profiles))


def _node(rng: random.Random, name: str, kinds: list[str]) -> Node:
    """A node of up to three groups; one device of a larger one may be absent."""
    groups = tuple(
        DeviceGroup(kind=rng.choice(kinds), count=rng.randint(1, 3))
        for _ in range(rng.randint(1, 3))
    )
    num_slots = sum(group.count for group in groups)
    return Node(
        name=name,
        devices=groups,
        host_memory_bytes=_memory_bytes(rng),
        host_cores=rng.randint(1, 999),
        link=_link(rng) if rng.random() < 0.5 else None,
        nic=_link(rng) if rng.random() < 0.5 else None,
        host_link_bytes_per_s=_rate(rng) if rng.random() < 0.5 else None,
        host_out_bytes_per_s=_rate(rng) if rng.random() < 0.5 else None,
        host_update_params_per_s=_rate(rng) if rng.random() < 0.5 else None,
        host_return_bytes_per_s=_rate(rng) if rng.random() < 0.5 else None,
        site=rng.choice(["x", "y"]),
        island=rng.choice(["", "left"]),
        absent=(rng.randrange(num_slots),) if num_slots > 1 else (),
    )


def _profile(rng: random.Random, kind: str) -> DeviceProfile:
    """A kind of any figures, whatever the catalog says of it."""
    dtypes = rng.sample(DTYPES, rng.randint(1, len(DTYPES)))
    return DeviceProfile(
        kind=kind,
        vendor=rng.choice(["nvidia", "cpu", "other"]),
        nominal_memory_bytes=_memory_bytes(rng),
        dense_flops_per_s={dtype: 10 ** rng.uniform(7, 17) for dtype in dtypes},
        memory_bytes_per_s=_rate(rng),
        host_link_bytes_per_s=_rate(rng),
        compute_capability=rng.choice([None, "7.0", "12.0"]),
        compute_units=rng.choice([None, 132]),
        boost_clock_hz=rng.choice([None, 1e9, rng.uniform(1e8, 1e10)]),
        jax_runs=rng.random() < 0.5,
        tdp_w=rng.choice([None, 250.0]),
        layer_times=tuple(
            {line: rng.choice(CELLS) for line in rng.sample(LINES, rng.randrange(3))}
            for _ in range(rng.randrange(3))
        ),
        source=rng.choice(LINES),
    )


def _link(rng: random.Random) -> LinkProfile:
    """A link, with a table of measured times or without."""
    sizes = sorted(rng.sample(range(1, 2**40), rng.randrange(4)))
    return LinkProfile(
        latency_s=rng.choice([0.0, rng.random() * 1e-3]),
        bytes_per_s=_rate(rng),
        measured=tuple((size, 0.01 + size * 1e-12) for size in sizes),
        flow_bytes_per_s=_rate(rng) if rng.random() < 0.2 else None,
    )


def _rate(rng: random.Random) -> float:
    """Bytes per second, from modem to memory."""
    return 10 ** rng.uniform(4, 13)


def _memory_bytes(rng: random.Random) -> int:
    """Bytes, from a few MiB to some TiB."""
    return rng.choice([2**36, rng.randint(2**24, 2**44)])
