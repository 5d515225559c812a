"""Links between the meshes of drafts: what borders and gradient sums take.

    pipelines -> Ways -> classes of equal pipelines, seconds of borders and sums

Links are asked for once a pair of nodes and mesh shapes, since clusters have few kinds
of links and drafts thousands of borders.
"""

import collections
import functools
import itertools
from collections.abc import Mapping, Sequence

from hexijax.cluster import LinkProfile
from hexijax.costs.links import slowest_link, transfer_s
from hexijax.costs.sums import GRAD_BYTES
from hexijax.layers.chain import ITEM_BYTES
from hexijax.planner.baselines.devices import Mesh, Pipeline, Yard

Key = tuple[int, ...]
"""Equal for pipelines of equal meshes and links."""

Classes = Mapping[Key, tuple[Pipeline, int]]
"""One of each class of equal pipelines, and how many there are; by key."""


class Ways:
    """The links of one cluster, as drafts use them."""

    def __init__(self, yard: Yard, num_params: int) -> None:
        self._cluster = yard.cluster
        self._num_params = num_params
        self._named_pairs = bool(yard.cluster.links.device_pairs)
        self._keys: dict[Pipeline, Key] = {}
        self._kinds: dict[object, int] = {}
        self._borders: dict[object, int] = {}
        self._borders_s: dict[tuple[int, int], float] = {}
        self._many_s: dict[tuple[int, tuple[int, ...]], tuple[float, ...]] = {}
        self.classes = functools.cache(self._classes)
        self._slowest = functools.cache(self._slowest_between)
        self._link = functools.cache(self._link_between)
        self._sent = functools.cache(self._sent_by_node)

    # Pipelines that cost the same.

    def _classes(self, pipelines: tuple[Pipeline, ...]) -> Classes:
        """Equal pipelines counted."""
        keys = list(map(self.key, pipelines))
        counts = collections.Counter(keys)
        first = dict(zip(keys, pipelines, strict=True))
        return {key: (first[key], counts[key]) for key in sorted(first)}

    def key(self, pipeline: Pipeline) -> Key:
        """Equal for pipelines of equal meshes and links."""
        found = self._keys.get(pipeline)
        if found is None:
            borders = itertools.starmap(self._border, itertools.pairwise(pipeline))
            found = (*(mesh.key for mesh in pipeline), *borders)
            self._keys[pipeline] = found
        return found

    # Borders.

    def border_s(self, a: Mesh, b: Mesh, num_bytes: int) -> float:
        """Seconds to move an array from one mesh to the next."""
        key = (self._border(a, b), num_bytes)
        if key not in self._borders_s:
            self._borders_s[key] = transfer_s(
                self._cluster, a.devices, b.devices, num_bytes
            )
        return self._borders_s[key]

    def borders_s(self, a: Mesh, b: Mesh, sizes: tuple[int, ...]) -> tuple[float, ...]:
        """The same for arrays of many sizes."""
        key = (self._border(a, b), sizes)
        if key not in self._many_s:
            self._many_s[key] = tuple(self.border_s(a, b, n) for n in sizes)
        return self._many_s[key]

    def _border(self, a: Mesh, b: Mesh) -> int:
        """Equal for borders over which everything takes as long."""
        where: object = (a.key, b.key, a.block.node, b.block.node)
        if self._named_pairs:
            where = (a, b)
        found = self._borders.get(where)
        if found is None:
            link = self._cluster.link(a.devices[0], b.devices[0])
            kind = (
                link,
                min(len(a.devices), len(b.devices)),
                a.block.node == b.block.node,
                where if self._named_pairs else None,
            )
            found = self._kinds.setdefault(kind, len(self._kinds))
            self._borders[where] = found
        return found

    # What all replicas pay together.

    def sync_s(self, pipelines: Sequence[Pipeline]) -> float:
        """Into the busiest node: gradients, and parameters for every lane."""
        members = len(pipelines)
        if members == 1:
            return 0.0
        nodes: dict[str, float] = {}
        for pipeline in pipelines:
            for node, each in self._sent(pipeline):
                nodes[node] = nodes.get(node, 0.0) + each
        link = self._slowest(frozenset(nodes))
        if link is None:
            ends = [pipeline[0].devices[0] for pipeline in pipelines[:2]]
            link = slowest_link(self._cluster, ends)
        assert link, "two replicas have two devices"
        once = self._num_params * (members - 1) / members
        return link.transfer_s(int(max(nodes.values()) * once))

    def _sent_by_node(self, pipeline: Pipeline) -> tuple[tuple[str, float], ...]:
        """Bytes of a parameter that a replica sends into each of its nodes."""
        nodes: dict[str, float] = {}
        for mesh in pipeline:
            item = ITEM_BYTES[mesh.shape.dtype]
            each = (GRAD_BYTES + item * mesh.lanes) / len(pipeline)
            nodes[mesh.block.node] = nodes.get(mesh.block.node, 0.0) + each
        return tuple(nodes.items())

    def _slowest_between(self, nodes: frozenset[str]) -> LinkProfile | None:
        """Of the links between some nodes."""
        links = {self._link(a, b) for a, b in itertools.combinations(sorted(nodes), 2)}
        return min(
            links, key=lambda link: (link.bytes_per_s, -link.latency_s), default=None
        )

    def _link_between(self, a: str, b: str) -> LinkProfile:
        cluster = self._cluster
        link = cluster.links.between(cluster.node(a), cluster.node(b))
        assert link, f"{a} and {b} were checked when the cluster was made"
        return link

    def crowd(self, pipelines: Sequence[Pipeline]) -> int:
        """Meshes of the busiest island: one host dispatches for all of them."""
        nodes = collections.Counter(
            mesh.block.node for pipeline in pipelines for mesh in pipeline
        )
        islands = collections.Counter[str]()
        for name, count in nodes.items():
            islands[self._cluster.node(name).island] += count
        return max(islands.values())
