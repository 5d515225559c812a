"""What a step takes beyond its last backward: gradient sums, updates, new parameters.

    layout, layers -> what each way carries of which stages -> exposed_s -> seconds

Stages of one node share its way to other nodes; those to a node whose link carries less
than both ways share that link too. Equal ways are reckoned once.
"""

import dataclasses
import math
from collections.abc import Mapping, Sequence

import numpy as np
from jaxtyping import Float, Int

from hexijax.costs.rates import CALL_S
from hexijax.costs.sums import GRAD_BYTES, STATE_BYTES
from hexijax.layers.chain import ITEM_BYTES, Chain
from hexijax.planner.exposed import Programs, Sums, exposed_s, passes_s
from hexijax.planner.fit import Fitted
from hexijax.planner.mesh import Layout, Mesh
from hexijax.planner.network import Network
from hexijax.planner.segments import num_segments

FORWARD_SHARE = 1 / 3
"""Of a stage's time; the backward makes two products for each of the forward's."""

Layers = tuple[int, ...]
"""Those that use the same parameters; as a rule one of a stage stands for all."""

Load = tuple[object, float]
"""A stage, and how long a byte of each of its parameters takes on a way."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class _Homes:
    """Who has a layer: each is a home of a share of its state, by its devices."""

    num_devices: int
    """In all replicas."""

    members_N: Int[np.ndarray, " nodes"]
    """Replicas that have it, by node."""

    shares_N: Float[np.ndarray, " nodes"]
    """Of the devices."""

    unlike: tuple[int, ...]
    """Nodes, the two with most devices of those alike."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class _Around:
    """Who else has a layer, seen from a node."""

    num_devices: int
    """That have it, in all replicas."""

    num_near: int
    """Replicas that have it in this node."""

    far: Mapping[object, tuple[float, float, int]]
    """By way out of the node: its rate, the share of the layer's homes that it leads
    to, and how many replicas have it there."""


class After:
    """What comes after the backwards, for one chain on one cluster."""

    def __init__(self, chain: Chain, network: Network, moments: int) -> None:
        self._network, self._moments = network, moments
        self._num_layers = len(chain.layers)
        tied = (g for g in chain.groups if len(g.layers) > 1)
        self._tied = [g for g in tied if g.trainable]
        self._known: dict[object, list[tuple[Layers, float]]] = {}
        """Parts of the stages of one layout."""
        self._names: list[str] = []
        self._ids: dict[str, int] = {}

    def late_s(
        self,
        layout: Layout,
        fitted: Sequence[Fitted],
        per_segment: int | None,
        counts: Sequence[int] | None = None,
        *,
        freed: bool = False,
    ) -> float:
        """By how much the next step begins later than the last backward ended.

        Args:
          layout: meshes of each replica.
          fitted: their stages.
          per_segment: most layers of a segment.
          counts: each replica's microbatches, where each segment runs all of them
            before the next; None: they follow each other.
          freed: parameters are gathered for each pass; what compute does not hide of it
            is counted too.
        """
        node_RL, devices_RL = self._nodes(layout, fitted)
        self._known.clear()
        items = {ITEM_BYTES[mesh.shape.dtype] for meshes in layout for mesh in meshes}
        item = items.pop() if len(items) == 1 else STATE_BYTES
        homes: dict[Layers, _Homes] = {}
        around: dict[tuple[Layers, str], _Around] = {}
        loads: dict[object, list[Load]] = {}
        stages: dict[object, tuple[Sequence[Mesh], Fitted, int, int]] = {}
        for meshes, fit, count in zip(
            layout, fitted, counts or [0] * len(layout), strict=True
        ):
            for k in range(len(fit.spans)):
                mesh = meshes[k % len(meshes)]
                key = (id(fit), k, mesh.shape_id, count)
                stages.setdefault(key, (meshes, fit, k, count))
                for of, params in self._parts(fit, k, mesh):
                    at = (of, mesh.node)
                    if at not in around:
                        if of not in homes:
                            homes[of] = self._homes(of, fitted, node_RL, devices_RL)
                        around[at] = self._around(mesh.node, homes[of])
                    for way, each_s in self._travels(mesh, params, around[at]):
                        loads.setdefault(way, []).append((key, each_s))
        made = {
            key: self._sums(meshes, fit, k, len(layout), item, per_segment, count)
            for key, (meshes, fit, k, count) in stages.items()
        }
        late_s = 0.0
        for load in set(map(tuple, loads.values())):
            sums = [
                dataclasses.replace(
                    made[key], grads_s=each_s * GRAD_BYTES, params_s=each_s * item
                )
                for key, each_s in load
            ]
            late_s = max(late_s, passes_s(sums) if freed else exposed_s(sums))
        return late_s

    def _travels(
        self, mesh: Mesh, params: float, around: _Around
    ) -> list[tuple[object, float]]:
        """Ways that a stage's sums leave by, and seconds of a byte a parameter.

        Out to homes elsewhere and in from members elsewhere, and back: the longer.
        """
        params *= mesh.shape.tensor
        own_share = mesh.shape.num_devices / around.num_devices
        found: list[tuple[object, float]] = [
            (way, max(share, own_share * members) * params / rate)
            for way, (rate, share, members) in around.far.items()
        ]
        if around.num_near > 1:
            sent = own_share * params * (around.num_near - 1) / mesh.shape.num_devices
            found.append((mesh.devices[0], sent / self._network.near_bytes_per_s(mesh)))
        return found or [(mesh.devices[0], 0.0)]

    def _homes(
        self,
        layers: Layers,
        fitted: Sequence[Fitted],
        node_RL: Int[np.ndarray, "replicas layers"],
        devices_RL: Int[np.ndarray, "replicas layers"],
    ) -> _Homes:
        first, *others = layers
        node_M, devices_M = node_RL[:, first], devices_RL[:, first]
        if others:  # each stage that has some of them, once
            stages = [
                (r, next(x for x in layers if start <= x < stop))
                for r, fit in enumerate(fitted)
                for start, stop in fit.spans
                if any(start <= x < stop for x in layers)
            ]
            rows, columns = zip(*stages, strict=True)
            node_M, devices_M = node_RL[rows, columns], devices_RL[rows, columns]
        total = int(devices_M.sum())
        members_N = np.bincount(node_M)
        shares_N = np.bincount(node_M, weights=devices_M) / total
        alike: dict[object, list[int]] = {}
        for n in np.argsort(-shares_N, kind="stable").tolist():
            if members_N[n]:
                some = alike.setdefault(self._network.like(self._names[n]), [])
                some += [n] if len(some) < 2 else []
        return _Homes(
            num_devices=total,
            members_N=members_N,
            shares_N=shares_N,
            unlike=tuple(n for some in alike.values() for n in some),
        )

    def _around(self, node: str, homes: _Homes) -> _Around:
        here = self._id(node)
        num_near = int(homes.members_N[here])
        far: dict[object, tuple[float, float, int]] = {}
        narrow: list[tuple[float, float, int]] = []
        for n in homes.unlike:
            if n == here:
                continue
            ways = self._network.between(node, self._names[n])
            if not far:
                share = 1 - float(homes.shares_N[here])
                members = int(homes.members_N.sum()) - num_near
                far[node] = (ways.out_bytes_per_s, share, members)
            if ways.link_bytes_per_s < math.inf:
                share, members = float(homes.shares_N[n]), int(homes.members_N[n])
                narrow.append((ways.link_bytes_per_s, share, members))
        if narrow:  # of these links the one that takes longest
            far[node, "link"] = max(narrow, key=lambda x: x[1] / x[0])
        return _Around(num_devices=homes.num_devices, num_near=num_near, far=far)

    def _sums(
        self,
        meshes: Sequence[Mesh],
        fit: Fitted,
        k: int,
        num_replicas: int,
        item: int,
        per_segment: int | None,
        times: int,
    ) -> Sums:
        """A stage's, before it is known by which way they leave.

        ``times``: microbatches that each segment runs before the next; 0: one.
        """
        backward = 1 - FORWARD_SHARE
        counts = [num_segments(span, per_segment) for span in fit.spans[k:]]
        programs = [
            self._programs(
                mesh := meshes[j % len(meshes)],
                sum(params for _, params in self._parts(fit, j, mesh)),
                count,
                num_replicas,
                item,
            )
            for j, count in enumerate(counts, k)
        ]
        # A cotangent leaves when its stage's first segment is done, not cut.
        held_up_s = sum(
            later.cut_s * (1 - 1 / count)
            for later, count in zip(programs[1:], counts[1:], strict=True)
        )
        before_s, own_s = sum(fit.stage_s[:k]), fit.stage_s[k]
        if times:  # stages on the same devices take turns, others work at once
            before_s *= times / len(meshes)
            own_s *= times
        return Sums(
            begin_s=held_up_s - (before_s + own_s) * backward,
            backward_s=own_s * backward,
            wanted_s=before_s * FORWARD_SHARE,
            num_segments=counts[0],
            grads_s=0.0,
            params_s=0.0,
            programs=programs[0],
        )

    def _programs(
        self, mesh: Mesh, params: float, count: int, num_replicas: int, item: int
    ) -> Programs:
        shape, bytes_per_s = mesh.shape, mesh.shape.profile.memory_bytes_per_s
        cut_s = join_s = 0.0
        if shape.lanes > 1 and shape.link:  # a ring each for every segment
            for_ring = (shape.lanes - 1) * count
            per_lane = params / shape.lanes / count
            cut_s = for_ring * shape.link.transfer_s(int(per_lane * GRAD_BYTES))
            join_s = for_ring * shape.link.transfer_s(int(per_lane * item))
        held = params * shape.tensor / shape.num_devices / num_replicas
        per_param = 2 * STATE_BYTES * (1 + self._moments) + GRAD_BYTES + STATE_BYTES
        update_s = held * per_param / bytes_per_s + 2 * CALL_S
        if num_replicas > 1:  # cut, added up, joined
            cut_s += 2 * params * GRAD_BYTES / bytes_per_s
            update_s += held * (num_replicas + 1) * GRAD_BYTES / bytes_per_s
            join_s += 2 * params * item / bytes_per_s + count * CALL_S
        return Programs(cut_s=cut_s + count * CALL_S, update_s=update_s, join_s=join_s)

    def _parts(self, fit: Fitted, k: int, mesh: Mesh) -> list[tuple[Layers, float]]:
        """Parameters of a stage on one device that train, by the layers that use them.

        What layers of several stages share is summed over all of these.
        """
        key = (id(fit), k, mesh.shape_id)
        if key not in self._known:
            self._known[key] = self._find_parts(fit, k, mesh)
        return self._known[key]

    def _find_parts(
        self, fit: Fitted, k: int, mesh: Mesh
    ) -> list[tuple[Layers, float]]:
        first, stop = fit.spans[k]
        params, parts = fit.params[k], list[tuple[Layers, float]]()
        for group in self._tied:
            here = sum(first <= layer < stop for layer in group.layers)
            size = group.size / mesh.shape.tensor
            if 0 < here < len(group.layers):
                parts.append((group.layers, size))
                params -= here * size
            else:
                params -= max(here - 1, 0) * size
        return [((sum(fit.spans[k]) // 2,), params), *parts]

    def _nodes(
        self, layout: Layout, fitted: Sequence[Fitted]
    ) -> tuple[Int[np.ndarray, "replicas layers"], Int[np.ndarray, "replicas layers"]]:
        """The node in which each replica has each layer, numbered, and on how many
        devices."""
        node_RL = np.zeros((len(layout), self._num_layers), int)
        devices_RL = np.ones_like(node_RL)
        for r, (meshes, fit) in enumerate(zip(layout, fitted, strict=True)):
            for k, (first, stop) in enumerate(fit.spans):
                mesh = meshes[k % len(meshes)]
                node_RL[r, first:stop] = self._id(mesh.node)
                devices_RL[r, first:stop] = mesh.shape.num_devices
        return node_RL, devices_RL

    def _id(self, node: str) -> int:
        if node not in self._ids:
            self._ids[node] = len(self._names)
            self._names.append(node)
        return self._ids[node]
