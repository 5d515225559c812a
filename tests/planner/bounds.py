"""The least that a step can take, from what no order of instructions can avoid.

Each stage computes every microbatch, in the order of 1F1B, after its border arrived;
then the first stage's gradients leave for the other replicas' homes, and only then the
next step may begin. Whatever else the simulator knows (hosts, links that are shared,
updates, new parameters) only makes a step longer.
"""

import dataclasses
import functools
import itertools

from hexijax.cluster import Cluster
from hexijax.costs.activations import Within
from hexijax.costs.compute import MeshShape, layer_times
from hexijax.costs.links import slowest_link
from hexijax.costs.memory import stage_parts
from hexijax.costs.rates import CALL_S
from hexijax.costs.sums import GRAD_BYTES
from hexijax.layers.chain import Chain, Remat
from hexijax.plan.plan import Replica, Stage
from hexijax.program.boxes import MIN_CUT_SIZE


@dataclasses.dataclass(frozen=True, slots=True)
class Mesh:
    """Devices of one stage."""

    devices: tuple[str, ...]
    lanes: int
    tensor: int


class Bounds:
    """Lower bounds under one remat policy and dtype."""

    def __init__(
        self, chain: Chain, cluster: Cluster, remat: Remat, dtype: str
    ) -> None:
        self._chain, self._cluster = chain, cluster
        self._remat, self._dtype = remat, dtype
        self._sums = functools.cache(self._layer_sums)
        self._stage_bytes = functools.cache(self._least_stage_bytes)
        self._border_s = functools.cache(self._least_border_s)
        self._fastest = functools.cache(self._fastest_bytes_per_s)
        # Small leaves are not cut: their one home may be anywhere.
        self._cut_sizes = [
            sum(
                leaf.size
                for name in layer.groups
                for leaf in chain.group(name).leaves
                if leaf.size >= MIN_CUT_SIZE
            )
            for layer in chain.layers
        ]

    def ideal_s(self, layout: tuple[tuple[Mesh, ...], ...], batch_size: int) -> float:
        """With every device busy all the time, in its best microbatch."""
        rate = 0.0
        for mesh in (mesh for meshes in layout for mesh in meshes):
            each_s = min(
                (f[-1] + b[-1]) / size
                for size in range(1, batch_size + 1)
                for f, b in [self._sums(mesh, size)]
            )
            rate += mesh.lanes / each_s if each_s else float("inf")
        return batch_size / rate

    def step_s(
        self,
        meshes: tuple[Mesh, ...],
        edges: tuple[int, ...],
        microbatches: int,
        size: int,
        others: int,
    ) -> float:
        """Of a step in which one replica does this, beside so many others."""
        forward_s, backward_s, border_s = [], [], []
        for k, (mesh, span) in enumerate(
            zip(meshes, itertools.pairwise(edges), strict=True)
        ):
            start, stop = span
            forward, backward = self._sums(mesh, size // mesh.lanes)
            forward_s.append(CALL_S + forward[stop] - forward[start])
            backward_s.append(CALL_S + backward[stop] - backward[start])
            if k:
                border_s.append(self._border_s(meshes[k - 1], mesh, start, size))
        backward_s[-1] -= CALL_S  # the last stage's forward and backward are one call
        spans_s = [
            microbatches * (f + b) for f, b in zip(forward_s, backward_s, strict=True)
        ]
        spans_s[0] = one_f_one_b_s(forward_s, backward_s, border_s, microbatches)
        return max(
            span_s + self._leave_s(mesh, layers, others)
            for span_s, mesh, layers in zip(
                spans_s, meshes, itertools.pairwise(edges), strict=True
            )
        )

    def may_fit(
        self, meshes: tuple[Mesh, ...], edges: tuple[int, ...], count: int, size: int
    ) -> bool:
        """Whether parameters, gradients and activations do; state may be elsewhere."""
        return all(
            self._stage_bytes(mesh, span, size, min(len(meshes) - k, count))
            <= self._room(mesh)
            for k, (mesh, span) in enumerate(
                zip(meshes, itertools.pairwise(edges), strict=True)
            )
        )

    def _least_stage_bytes(
        self, mesh: Mesh, layers: tuple[int, int], size: int, live: int
    ) -> int:
        stage = Stage(
            devices=mesh.devices,
            layers=layers,
            lanes=mesh.lanes,
            tensor=mesh.tensor,
            dtype=self._dtype,
            remat=(self._remat,) * (layers[1] - layers[0]),
        )
        replica = Replica(
            stages=(stage,), microbatches=live, microbatch_size=size, samples=size
        )
        within = Within(
            profile=self._cluster.device(mesh.devices[0]).profile,
            layers=self._chain.layers,
            joined=live == 1 and layers[1] == len(self._chain.layers),
        )
        return stage_parts(self._chain, within, replica, stage, live).parts.total_bytes

    def _room(self, mesh: Mesh) -> int:
        return min(self._cluster.device(d).usable_memory_bytes for d in mesh.devices)

    def _leave_s(self, mesh: Mesh, layers: tuple[int, int], others: int) -> float:
        """Gradients on their way to homes in other replicas, a device at least each."""
        if not others:
            return 0.0
        num_devices = len(mesh.devices)
        params = sum(self._cut_sizes[slice(*layers)])
        # Rows are cut whole: a row's worth may stay.
        away = params * others / (num_devices + others) * 0.98
        return away * GRAD_BYTES / num_devices / self._fastest(mesh.devices)

    def _layer_sums(self, mesh: Mesh, samples: int) -> tuple[list[float], list[float]]:
        """Forward and backward of the first 0, 1, ... layers."""
        devices = [self._cluster.device(name) for name in mesh.devices]
        shape = MeshShape(
            profile=devices[0].profile,
            dtype=self._dtype,
            lanes=mesh.lanes,
            tensor=mesh.tensor,
            link=slowest_link(self._cluster, mesh.devices),
            usable_memory_bytes=min(d.usable_memory_bytes for d in devices),
        )
        forward, backward = [0.0], [0.0]
        for times in layer_times(self._chain, shape, samples):
            forward.append(forward[-1] + times.forward_s)
            backward.append(
                backward[-1] + times.backward_s + times.recompute_s[self._remat]
            )
        return forward, backward

    def _least_border_s(self, a: Mesh, b: Mesh, layer: int, size: int) -> float:
        """All pairs of devices at once, each over the fastest of their links."""
        ways = max(len(a.devices), len(b.devices))
        num_bytes = self._chain.layers[layer - 1].border_bytes * size
        rate = max(
            self._cluster.link(x, y).bytes_per_s for x in a.devices for y in b.devices
        )
        return num_bytes / ways / rate

    def _fastest_bytes_per_s(self, devices: tuple[str, ...]) -> float:
        """Out of any of some devices to any other of the cluster."""
        return max(
            self._cluster.link(name, other).bytes_per_s
            for name in devices
            for other in (d.name for d in self._cluster.devices)
            if other not in devices
        )


def one_f_one_b_s(
    forward_s: list[float], backward_s: list[float], border_s: list[float], count: int
) -> float:
    """From the first stage's first forward to its last backward.

    A border carries one microbatch at a time each way.
    """
    num_stages = len(forward_s)
    orders = [_order(min(num_stages - k, count), count) for k in range(num_stages)]
    at = [0] * num_stages
    free_s = [0.0] * num_stages
    sent_s = [[0.0] * num_stages for _ in range(2)]
    # When each microbatch is there, for forwards and backwards of each stage.
    there: list[list[dict[int, float]]] = [[{}, {}] for _ in range(num_stages)]
    there[0][0] = dict.fromkeys(range(count), 0.0)
    left = 2 * count * num_stages
    while left:
        for k in range(num_stages):
            while at[k] < 2 * count:
                backward, m = orders[k][at[k]]
                if m not in there[k][backward]:
                    break
                start = max(free_s[k], there[k][backward][m])
                end = start + (backward_s if backward else forward_s)[k]
                free_s[k] = end
                at[k] += 1
                left -= 1
                if not backward and k == num_stages - 1:
                    there[k][1][m] = end
                    continue
                to = k - 1 if backward else k + 1
                if to >= 0:
                    link = sent_s[backward]
                    link[k] = max(link[k], end) + border_s[min(k, to)]
                    there[to][backward][m] = link[k]
    return free_s[0]


@functools.cache
def _order(warm: int, count: int) -> tuple[tuple[int, int], ...]:
    """(backward, microbatch) in a stage that holds ``warm`` microbatches."""
    order = [(0, m) for m in range(warm)]
    for m in range(count):
        order.append((1, m))
        if warm + m < count:
            order.append((0, warm + m))
    return tuple(order)
