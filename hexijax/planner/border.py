"""What a microbatch costs between two stages: on the way, and on their devices.

    mesh, mesh, bytes -> Borders.border -> seconds there and back, bytes, programs

As the simulator has it (``costs.borders``), with nothing else on the ways: every device
of a lane gets all of the lane's samples, so a tensor degree multiplies what crosses to
another node. Stages of unlike lanes or dtypes cut and join messages in programs.
"""

import dataclasses
import math

from hexijax.cluster import Cluster, LinkProfile
from hexijax.costs.rates import CALL_S
from hexijax.layers.chain import ITEM_BYTES
from hexijax.planner.mesh import Mesh
from hexijax.planner.network import Network


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Border:
    """One microbatch's activations there and cotangents back."""

    seconds: float
    """On the way, the mean of both."""

    sent_bytes: tuple[int, int]
    """All copies, there and back."""

    kept_s: tuple[float, float]
    """Of the one's and the other's way out, by copies there and back."""

    programs_s: tuple[float, float]
    """What both together take of the one's devices, and of the other's."""


class Borders:
    """Between the meshes of one cluster."""

    def __init__(self, cluster: Cluster, network: Network) -> None:
        self._cluster, self._network = cluster, network
        self._links: dict[tuple[str, str], LinkProfile] = {}

    def border(self, a: Mesh, b: Mesh, num_bytes: int) -> Border:
        """Where stages on two meshes meet.

        Args:
          a: the one that sends activations.
          b: the one that sends cotangents.
          num_bytes: of a microbatch's activations.
        """
        ends = ((a, b), (b, a))
        ways_s = [self._way_s(source, target, num_bytes) for source, target in ends]
        return Border(
            seconds=sum(own_s for own_s, _ in ways_s) / 2,
            sent_bytes=(num_bytes * b.shape.tensor, num_bytes * a.shape.tensor),
            kept_s=(ways_s[0][1], ways_s[1][1]),
            programs_s=(
                self._programs_s(a, b, num_bytes),
                self._programs_s(b, a, num_bytes),
            ),
        )

    def _way_s(self, source: Mesh, target: Mesh, num_bytes: int) -> tuple[float, float]:
        """Of one message, alone; and how long it keeps the source's way from others."""
        if source.devices == target.devices:
            return 0.0, 0.0
        ends = (source.devices[0], target.devices[-1])
        link = self._links.get(ends)
        if link is None:
            link = self._links[ends] = self._cluster.link(*ends)
        out, into = source.shape, target.shape
        if source.node == target.node:
            copies = -(-into.tensor // out.tensor)
            longest = max(num_bytes * copies // out.lanes, num_bytes // into.lanes)
            own_s = link.transfer_s(longest)
            return own_s, own_s
        ways = self._network.between(source.node, target.node)
        sent = num_bytes * into.tensor
        slowest = min(ways.out_bytes_per_s, ways.into_bytes_per_s)
        own_s = max(
            link.transfer_s(sent),
            link.flow_s(num_bytes // math.lcm(out.lanes, into.lanes)),
            link.latency_s + sent / slowest,
        )
        return own_s, sent / ways.out_bytes_per_s

    def _programs_s(self, mesh: Mesh, other: Mesh, num_bytes: int) -> float:
        """Cutting what a mesh sends and joining what it gets."""
        shape = mesh.shape
        wider = ITEM_BYTES[shape.dtype] > ITEM_BYTES[other.shape.dtype]
        if not wider and shape.lanes % other.shape.lanes == 0:
            return 0.0
        moved = 2 * num_bytes / shape.lanes
        return 2 * (CALL_S + moved / shape.profile.memory_bytes_per_s)
