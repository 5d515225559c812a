"""Seconds of each instruction of a Program: what settles its order, and the simulator.

plan, chain, cluster -> PlanCosts -> duration_s(instruction)
"""

import functools
import itertools
from collections.abc import Sequence

from hexijax.cluster import Cluster
from hexijax.costs.compute import (
    LayerTime,
    MeshShape,
    border_bytes_in,
    layer_times,
)
from hexijax.costs.links import slowest_link, transfer_s
from hexijax.costs.memory import GRAD_BYTES, MOMENTS, STATE_BYTES
from hexijax.costs.rates import CALL_S
from hexijax.layers.chain import ITEM_BYTES, Chain
from hexijax.plan.plan import Place, Plan, Replica, Stage
from hexijax.program.buckets import buckets
from hexijax.program.program import (
    HOST,
    Agree,
    Backward,
    Forward,
    Gather,
    Instruction,
    Kind,
    Part,
    Reduce,
    Send,
    Update,
)


def mesh_shape(cluster: Cluster, stage: Stage) -> MeshShape:
    """What costs need to know of a stage's devices."""
    devices = [cluster.device(name) for name in stage.devices]
    return MeshShape(
        profile=devices[0].profile,
        dtype=stage.dtype,
        lanes=stage.lanes,
        tensor=stage.tensor,
        link=slowest_link(cluster, stage.devices),
        usable_memory_bytes=min(d.usable_memory_bytes for d in devices),
    )


class PlanCosts:
    """Durations under one plan, each with nothing else running."""

    def __init__(
        self, plan: Plan, chain: Chain, cluster: Cluster, moments: int = MOMENTS
    ) -> None:
        self._plan = plan
        self._chain = chain
        self._cluster = cluster
        self._moments = moments
        self._sizes = {group.name: group.size for group in buckets(plan, chain)}
        self._stages = dict(plan.stages())
        self._times: dict[tuple[MeshShape, int], tuple[LayerTime, ...]] = {}
        self.layer_times = functools.cache(self._layer_times)
        self.segment_s = functools.cache(self._segment_s)
        self.border_s = functools.cache(self._border_s)
        self.border_bytes = functools.cache(self._border_bytes)

    def duration_s(self, instruction: Instruction) -> float:
        """Seconds from start to end; a Recv ends with its Send."""
        match instruction:
            case Forward() | Backward():
                return self._compute_s(instruction)
            case Send():
                return self._send_s(instruction)
            case Gather() | Reduce():
                return self._sync_s(instruction)
            case Update():
                return self._update_s(instruction)
            case Agree():
                devices = [self.devices(place) for place in instruction.members]
                hops = itertools.pairwise(devices)
                return max((self._move_s(a, b, 4) for a, b in hops), default=0.0)
            case _:
                return 0.0

    def stage_s(self, place: Place) -> float:
        """Forward and backward of one microbatch through a stage, calls included."""
        stage = self._stages[place]
        return sum(
            self.segment_s(place, g, way)
            for g in range(len(stage.segments))
            for way in (True, False)
        )

    def _segment_s(self, place: Place, segment: int, forward: bool) -> float:
        """One microbatch's forward or backward of a segment."""
        stage, times = self._stages[place], self.layer_times(place)
        start, stop = stage.segment_layers(segment)
        if forward:
            return CALL_S + sum(times[i].forward_s for i in range(start, stop))
        return CALL_S + sum(
            times[i].backward_s + times[i].recompute_s[stage.remat[i - stage.layers[0]]]
            for i in range(start, stop)
        )

    def devices(self, place: Place) -> Sequence[str]:
        """Of a stage, or the device a place names; none for the host."""
        if place in self._stages:
            return self._stages[place].devices
        return () if place == HOST else (place,)

    def _border_s(self, source: Place, target: Place, layer: int) -> float:
        """One microbatch's activations across the border before a layer."""
        num_bytes = self.border_bytes(source, layer)
        return self._move_s(self.devices(source), self.devices(target), num_bytes)

    def _border_bytes(self, source: Place, layer: int) -> int:
        """Of one microbatch's activations at the border before a layer."""
        size = self._replica(source).microbatch_size
        return border_bytes_in(
            self._chain,
            self._chain.layers[layer - 1].border_bytes * size,
            self._stages[source].dtype,
        )

    def lanes_s(self, place: Place, num_bytes: int) -> float:
        """A sum over a stage's lanes of which each keeps its part, or the way back.

        A ring: each lane sends all parts but its own.
        """
        if place not in self._stages or self._stages[place].lanes == 1:
            return 0.0
        stage = self._stages[place]
        link = slowest_link(self._cluster, stage.devices)
        assert link, f"{place} has several devices"
        part = num_bytes // stage.tensor // stage.lanes
        return CALL_S + (stage.lanes - 1) * link.transfer_s(part)

    def add_s(self, home: Place, num_bytes: int, members: int) -> float:
        """Adding ``members`` arrays of fp32 at a home: each is read, one is written."""
        devices = self.devices(home)
        profile = self._cluster.device(devices[0]).profile
        moved = (members + 1) * num_bytes / len(devices)
        return CALL_S + moved / profile.memory_bytes_per_s

    def _layer_times(self, place: Place) -> tuple[LayerTime, ...]:
        stage = self._stages[place]
        mesh = mesh_shape(self._cluster, stage)
        samples = self._replica(place).microbatch_size // stage.lanes
        if (mesh, samples) not in self._times:
            self._times[mesh, samples] = layer_times(self._chain, mesh, samples)
        return self._times[mesh, samples]

    def _replica(self, place: Place) -> Replica:
        return self._plan.replicas[int(place[1:].split(".s")[0])]

    def _compute_s(self, instruction: Forward | Backward) -> float:
        first, stop = instruction.microbatches
        forward = isinstance(instruction, Forward)
        one_s = self.segment_s(instruction.place, instruction.segment, forward)
        # A split backward's two parts each do one of its two products a weight.
        half = isinstance(instruction, Backward) and instruction.part is not Part.BOTH
        return one_s * (stop - first) * (0.5 if half else 1.0)

    def _send_s(self, send: Send) -> float:
        moved = [r.buffer for r in send.reads if r.buffer.kind in (Kind.ACT, Kind.COT)]
        layers = [int(buffer.subject[1:]) for buffer in moved]
        return sum(
            (self.border_s(send.source, send.target, layer) for layer in layers), 0.0
        )

    def _sync_s(self, instruction: Gather | Reduce) -> float:
        """All bytes that leave one holder for another, over the slowest pair."""
        size = self._sizes[instruction.group]
        if isinstance(instruction, Gather):
            pairs = [(home, instruction.place) for home in instruction.homes]
            item = ITEM_BYTES[self._stages[instruction.place].dtype]
        else:
            pairs = [(m, h) for m in instruction.members for h in instruction.homes]
            item = GRAD_BYTES
        num_bytes = size * item // len(instruction.homes)
        return max(
            (
                self._move_s(self.devices(source), self.devices(target), num_bytes)
                for source, target in pairs
            ),
            default=0.0,
        )

    def _update_s(self, update: Update) -> float:
        """State, gradient and slice, once through memory."""
        devices = self.devices(update.home)
        profile = self._cluster.device(devices[0]).profile
        size = self._sizes[update.group] / len(devices)
        per_param = 2 * STATE_BYTES * (1 + self._moments) + GRAD_BYTES + STATE_BYTES
        return CALL_S + size * per_param / profile.memory_bytes_per_s

    def _move_s(
        self, sources: Sequence[str], targets: Sequence[str], num_bytes: int
    ) -> float:
        if not sources or not targets:
            return 0.0
        return transfer_s(self._cluster, sources, targets, num_bytes)
