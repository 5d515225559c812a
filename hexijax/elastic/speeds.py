"""A cluster whose nodes run at other speeds than their kinds say.

Cluster, node -> speed -> Cluster with kinds of their own

Peaks and memory bandwidth fall alike, and measured times grow: a card that is hot, or
shared, is slower at everything.
"""

import dataclasses
from collections.abc import Mapping

from hexijax.cluster import Cluster, DeviceProfile, Node


def slowed(cluster: Cluster, speeds: Mapping[str, float]) -> Cluster:
    """The cluster with each named node at ``speed`` times what its kinds do."""
    speeds = {node: speed for node, speed in speeds.items() if speed != 1.0}
    if not speeds:
        return cluster
    known = {profile.kind: profile for profile in cluster.profiles}
    made = dict(known)
    nodes: list[Node] = []
    for node in cluster.nodes:
        speed = speeds.get(node.name)
        if speed is None:
            nodes.append(node)
            continue
        groups = []
        for group in node.devices:
            profile = _at(known[group.kind], speed)
            made[profile.kind] = profile
            groups.append(dataclasses.replace(group, kind=profile.kind))
        nodes.append(dataclasses.replace(node, devices=tuple(groups)))
    return dataclasses.replace(
        cluster, nodes=tuple(nodes), profiles=tuple(made.values())
    )


def _at(profile: DeviceProfile, speed: float) -> DeviceProfile:
    return dataclasses.replace(
        profile,
        kind=f"{profile.kind}-at-{speed:.2f}",
        dense_flops_per_s={
            dtype: peak * speed for dtype, peak in profile.dense_flops_per_s.items()
        },
        memory_bytes_per_s=profile.memory_bytes_per_s * speed,
        layer_times=tuple(
            {
                key: value / speed
                if key.endswith("_s") and isinstance(value, float)
                else value
                for key, value in row.items()
            }
            for row in profile.layer_times
        ),
        source=f"{profile.source}; seen at {speed:.2f} of its speed",
    )
