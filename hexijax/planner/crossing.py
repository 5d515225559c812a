"""What replicas that cross the same network card wait for each other.

    layout, layers, microbatches -> crossing_s -> the soonest that the batch can end

A replica alone is paced by its own borders (``pace``). Those of all replicas share the
ways of the nodes they cross, each way activations of one border and cotangents of
another: a way carries its bytes once, however many replicas they are of.
"""

import math
from collections.abc import Sequence

from hexijax.planner.batches import BatchShare
from hexijax.planner.fit import Fitted
from hexijax.planner.mesh import Layout
from hexijax.planner.network import Network


def crossing_s(
    layout: Layout,
    fitted: Sequence[Fitted],
    shares: Sequence[BatchShare],
    network: Network,
) -> float:
    """When the busiest way is done, and what must come before and after it.

    Before its first message and after its last one a replica computes.
    """
    busy_s: dict[object, float] = {}
    beside_s: dict[object, float] = {}
    for meshes, fit, share in zip(layout, fitted, shares, strict=True):
        for k, sent_bytes in enumerate(fit.sent_bytes):
            nodes = [meshes[i % len(meshes)].node for i in (k, k + 1)]
            if nodes[0] == nodes[1]:
                continue
            own_s = sum(fit.stage_s[: k + 1])
            for (a, b), each in zip((nodes, nodes[::-1]), sent_bytes, strict=True):
                ways = network.between(a, b)
                sent = each * share.microbatches
                for way, rate in (
                    ((a, "out"), ways.out_bytes_per_s),
                    ((b, "in"), ways.into_bytes_per_s),
                    ((a, b), ways.link_bytes_per_s),
                ):
                    busy_s[way] = busy_s.get(way, 0.0) + sent / rate
                    beside_s[way] = min(beside_s.get(way, math.inf), own_s)
    return max((busy_s[way] + beside_s[way] for way in busy_s), default=0.0)
