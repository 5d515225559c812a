"""Seconds of each instruction of a Program: what settles its order, and the simulator.

plan, chain, cluster -> PlanCosts -> duration_s(instruction), border(...), exchange(...)
"""

import dataclasses
import functools
import itertools
from collections.abc import Callable, Mapping
from typing import Any

from hexijax.cluster import Cluster
from hexijax.costs.activations import enter_bytes, is_joined, segment_kept_bytes
from hexijax.costs.borders import OURS, Border, Carriage, border
from hexijax.costs.collectives import Collective
from hexijax.costs.compute import LayerTime, MeshShape, layer_times
from hexijax.costs.exchange import Call, Exchange, Site
from hexijax.costs.host_rates import host_side
from hexijax.costs.links import slowest_link
from hexijax.costs.measured import update_s_per_param
from hexijax.costs.memory import stage_within
from hexijax.costs.rates import CALL_S, HOST_PIECE_S
from hexijax.costs.sums import (
    GRAD_BYTES,
    MOMENTS,
    STATE_BYTES,
    alike,
    leaf_shard,
)
from hexijax.costs.ways import NO_LOAD, Load, Ways
from hexijax.layers.chain import ITEM_BYTES, Chain, Group
from hexijax.plan.plan import Place, Plan, Replica, Schedule, Stage
from hexijax.program import names
from hexijax.program import program as ops
from hexijax.program.boxes import Box, state_boxes, users
from hexijax.program.buckets import buckets, streams_state, update_site
from hexijax.program.program import (
    HOST,
    PIECES,
    Agree,
    Backward,
    Forward,
    Gather,
    Instruction,
    Join,
    Kind,
    Part,
    Prefetch,
    Recv,
    Reduce,
    Send,
    Sum,
    Update,
    WriteBack,
)
from hexijax.program.resting import state_arrays, used_as


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


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True, eq=False)
class Copies:
    """Of a plan whose stages stand for several equal ones."""

    groups: tuple[Group, ...]
    """The whole plan's buckets."""

    boxes: Mapping[str, Mapping[Place, Mapping[str, Box]]]
    """By bucket, the boxes of the homes that stand for all."""

    count: Mapping[Place, int]
    """How many stages each stands for, itself included."""

    twin: Mapping[Place, tuple[str, ...]]
    """Devices of another of them, where there are several."""


class PlanCosts:
    """Durations under one plan, each with nothing else running."""

    def __init__(
        self,
        plan: Plan,
        chain: Chain,
        cluster: Cluster,
        moments: int = MOMENTS,
        *,
        whole_leaves: bool = False,
        copies: Copies | None = None,
        carriage: Carriage = OURS,
    ) -> None:
        """The durations of one plan.

        Args:
          plan: what is where.
          chain: the model.
          cluster: devices and links.
          moments: fp32 arrays of the optimizer for each parameter.
          whole_leaves: no leaf's state is cut.
          copies: the plan's stages stand for several each.
          carriage: how the system that runs it moves activations.
        """
        self._plan = plan
        self._chain = chain
        self._cluster = cluster
        self._moments = moments
        self._copies = copies
        self._whole_leaves = whole_leaves
        self.carriage: Carriage = carriage
        self._ways = Ways.of(cluster)
        self._stages = dict(plan.stages())
        self._exchanges: dict[object, Exchange] = {}
        self._collectives: dict[Exchange, Collective | None] = {}
        self._crossings: dict[object, Border] = {}
        self._handlers: dict[type[Instruction], Callable[[Any], float]] = {
            Forward: self._forward_s,
            Backward: self._backward_s,
            Send: self._send_s,
            Recv: lambda i: self.message(i).merge_s,
            Reduce: self._reduce_s,
            Sum: lambda i: self.exchange(i.group).add(i.home).seconds,
            Gather: self._gather_s,
            Join: self._join_s,
            Update: self._update_s,
            Agree: self._agree_s,
            Prefetch: lambda i: self.host_copy(i).seconds,
            WriteBack: lambda i: self.host_copy(i).seconds,
        }
        self._times: dict[tuple[MeshShape, int], tuple[LayerTime, ...]] = {}
        self.repeats: Mapping[Place, float] = {}
        """By stage, microbatches that each of a Program's stands for."""
        self.layer_times = functools.cache(self._layer_times)
        self.segment_s = functools.cache(self._segment_s)
        self._part_s = functools.cache(self._segment_part_s)
        self.border = functools.cache(self._border)
        self.exchange = functools.cache(self._exchange)
        self._site = functools.cache(self._make_site)
        self._host_load = functools.cache(self._make_host_load)

    @functools.cached_property
    def groups(self) -> Mapping[str, Group]:
        """The plan's buckets by name."""
        if self._copies:
            made = self._copies.groups
        else:
            made = buckets(self._plan, self._chain, whole_leaves=self._whole_leaves)
        return {group.name: group for group in made}

    @property
    def layered(self) -> bool:
        """Whether each segment runs all microbatches before the next."""
        return self._plan.schedule is Schedule.LAYERED

    def duration_s(self, instruction: Instruction) -> float:
        """Seconds from start to end, with nothing else on the ways."""
        handler = self._handlers.get(type(instruction))
        return handler(instruction) if handler else 0.0

    def boxes(self, group: str) -> Mapping[Place, Mapping[str, Box]]:
        """Of a bucket's state, at each home."""
        if self._copies:
            return self._copies.boxes[group]
        return state_boxes(
            self._plan,
            self._chain,
            self.groups[group],
            whole_leaves=self._whole_leaves,
        )

    def gather_path(self, group: str, *, alone: bool) -> int:
        """The fastest for new parameters; ``alone``: of one bucket at a time."""
        collective = self.collective(group)
        return collective.gather_path(alone=alone) if collective else PIECES

    def reduce_path(self, group: str) -> int:
        """The fastest for gradients."""
        collective = self.collective(group)
        return collective.reduce_path() if collective else PIECES

    def collective(self, group: str) -> Collective | None:
        """Over a bucket's users; None: they are no devices of one kind and client, each
        of them one user."""
        exchange = self.exchange(group)
        if exchange not in self._collectives:
            self._collectives[exchange] = self._collective(exchange)
        return self._collectives[exchange]

    def _collective(self, exchange: Exchange) -> Collective | None:
        sites = [exchange.site(member) for member in exchange.members]
        devices = [d for site in sites for d in (*site.devices, *site.twin)]
        alone = all(len(site.devices) == 1 for site in sites)
        if len(devices) < 2 or not alone or len({*devices}) < len(devices):
            return None
        found = [self._cluster.device(name) for name in devices]
        if self.carriage != OURS or len({(d.kind, d.island) for d in found}) > 1:
            return None
        link = slowest_link(self._cluster, devices)
        ends = [site.devices[0] for site in sites]
        hops = self._ways.counted(zip(ends, ends[1:] + ends[:1], strict=True))
        return Collective(exchange, link, hops) if link else None

    def stage_s(self, place: Place) -> float:
        """Forward and backward of one microbatch through a stage, calls included."""
        stage = self._stages[place]
        return sum(
            self.segment_s(place, g, way)
            for g in range(len(stage.segments))
            for way in (True, False)
        )

    def devices(self, place: Place) -> tuple[str, ...]:
        """Of a stage, or the device a place names; none for the host."""
        if place in self._stages:
            return self._stages[place].devices
        return () if place == HOST else (place,)

    def copies(self, place: Place) -> int:
        """How many stages of the whole plan one stands for."""
        return self._copies.count.get(place, 1) if self._copies else 1

    def twin(self, place: Place) -> tuple[str, ...]:
        """Devices of another stage that one stands for, where it does."""
        return self._copies.twin.get(place, ()) if self._copies else ()

    def message(self, instruction: Send | Recv) -> Border:
        """What a Send and its Recv cost."""
        if isinstance(instruction, Send):
            moved = instruction.reads[0].buffer
        else:
            moved = instruction.writes[0]
        key = (instruction.source, instruction.target, moved.subject, moved.kind)
        crossing = self._crossings.get(key)
        if crossing is None:
            layer = int(moved.subject[1:])
            crossing = self.border(*key[:2], layer, moved.kind is Kind.COT)
            self._crossings[key] = crossing
        return crossing

    def host_copy(self, instruction: Prefetch | WriteBack) -> Load:
        """A buffer's way to host memory or back: each device has ways of its own."""
        buffer = instruction.buffer
        return self._host_load(
            buffer.kind, buffer.place, buffer.subject, isinstance(instruction, Prefetch)
        )

    def _make_host_load(
        self, kind: Kind, place: Place, subject: str, comes: bool
    ) -> Load:
        num_bytes = self._moved_bytes(kind, place, subject)
        pieces = self._moved_pieces(kind, place, subject)
        return self._way(place, num_bytes, pieces, comes=comes)

    def _moved_pieces(self, kind: Kind, place: Place, subject: str) -> int:
        """Of how many arrays a buffer is that waits or rests on the host; of what a
        segment keeps, that is not known and taken for one."""
        if kind is Kind.PARAM:
            return len(self.groups[subject].leaves)
        if kind is Kind.GRAD:
            return len(self.boxes(subject).get(place, ()))
        if kind is not Kind.STATE:
            return 1
        return sum(self._state_arrays(place, subject))

    def _state_arrays(self, home: Place, name: str) -> tuple[int, int]:
        """Masters and moments of a bucket at a home."""
        return state_arrays(
            self._plan,
            self._chain,
            self.groups[name],
            self.boxes(name).get(home, {}),
            devices=len(self.devices(home)),
            moments=self._moments,
        )

    def _way(self, place: Place, num_bytes: int, pieces: int, *, comes: bool) -> Load:
        devices, end = self.devices(place), "in" if comes else "out"
        hosts = [host_side(self._cluster, name) for name in devices]
        each_s = tuple(
            pieces * HOST_PIECE_S
            + num_bytes / (host.in_bytes_per_s if comes else host.out_bytes_per_s)
            for host in hosts
        )
        return Load(
            seconds=max(each_s),
            ways=tuple(f"{name} host {end}" for name in devices),
            holds_s=each_s,
            num_bytes=(num_bytes,) * len(each_s),
        )

    def _moved_bytes(self, kind: Kind, place: Place, subject: str) -> int:
        """Of a buffer that waits or rests on the host, for each device."""
        if kind is Kind.STATE:
            held = self.exchange(subject).held.get(place, 0)
            return held * STATE_BYTES * (1 + self._moments)
        if kind is Kind.GRAD:
            return self.exchange(subject).held.get(place, 0) * GRAD_BYTES
        stage = self._stages[place]
        if kind is Kind.PARAM:
            group = self.groups[subject]
            return sum(
                leaf_shard(leaf, stage.tensor)
                * ITEM_BYTES[used_as(self._chain, stage, leaf, group)]
                for leaf in group.leaves
            )
        samples = self._replica(place).microbatch_size // stage.lanes
        if kind is Kind.RES:
            s = int(place.split(".s")[1])
            of = self._plan, self._chain, self._cluster, self._replica(place), s
            span = stage.segment_layers(int(subject.removeprefix("g")))
            layers = stage_within(*of).layers
            return segment_kept_bytes(self._chain, layers, *span, stage, samples)
        layer = int(subject.removeprefix("L"))
        return enter_bytes(self._chain, layer, stage.dtype, samples)

    def master_copy(self, home: Place, group: str) -> Load:
        """Masters that rest in host memory, to their home's devices: what a pass of
        freed parameters is gathered from."""
        if not streams_state(self._plan, self.groups[group]):
            return NO_LOAD
        num_bytes = STATE_BYTES * self.exchange(group).held.get(home, 0)
        if update_site(self._plan, self.groups[group]) is ops.Site.HOST:
            return self._returns(home, num_bytes)
        masters, _ = self._state_arrays(home, group)
        return self._way(home, num_bytes, masters, comes=True)

    def slice_copy(self, home: Place, group: str) -> Load:
        """New parameters that the host has made, to their home's devices."""
        stage = self._stages.get(home)
        item = ITEM_BYTES[stage.dtype] if stage else STATE_BYTES
        return self._returns(home, item * self.exchange(group).held.get(home, 0))

    def _returns(self, home: Place, num_bytes: int) -> Load:
        """What the host's processor has, to a home's devices."""
        load = self._way(home, num_bytes, 0, comes=True)
        returns = [
            num_bytes / host_side(self._cluster, name).return_bytes_per_s
            for name in self.devices(home)
        ]
        return dataclasses.replace(load, seconds=max(returns), holds_s=tuple(returns))

    def border_s(self, source: Place, target: Place, layer: int) -> float:
        """One microbatch's activations across the border before a layer."""
        crossing = self.border(source, target, layer, False)
        return crossing.split_s + crossing.load.seconds + crossing.merge_s

    def _border(
        self, source: Place, target: Place, layer: int, cotangent: bool
    ) -> Border:
        stages = (self._stages[source], self._stages[target])
        return border(
            self._chain,
            layer,
            *stages,
            self._replica(source).microbatch_size,
            self._ways,
            (self._memory_rate(stages[0]), self._memory_rate(stages[1])),
            cotangent=cotangent,
            link=self._site(target).link,
            carriage=self.carriage,
        )

    def _exchange(self, name: str) -> Exchange:
        """A bucket's sum and new parameters."""
        group, boxes = self.groups[name], self.boxes(name)
        members = users(self._plan, group)
        leaves = alike(group.leaves, self._whole_leaves)
        key = (
            members,
            tuple((leaf.shape, leaf.tensor_dim, count) for leaf, count in leaves),
            tuple(
                (home, tuple(held.get(leaf.id) for leaf, _ in leaves))
                for home, held in boxes.items()
            ),
        )
        if key not in self._exchanges:  # most layers of a model are alike
            self._exchanges[key] = Exchange(
                group,
                boxes,
                members,
                {place: self._site(place) for place in (*members, *boxes)},
                self._ways,
                whole_leaves=self._whole_leaves,
            )
        return self._exchanges[key]

    def _make_site(self, place: Place) -> Site:
        devices = self.devices(place)
        stage = self._stages.get(place, Stage(devices=devices, layers=(0, 0)))
        return Site(
            devices=devices,
            lanes=stage.lanes,
            tensor=stage.tensor,
            item_bytes=ITEM_BYTES[stage.dtype],
            memory_bytes_per_s=self._memory_rate(stage),
            link=slowest_link(self._cluster, devices),
            copies=self.copies(place),
            twin=self.twin(place),
        )

    def _memory_rate(self, stage: Stage) -> float:
        profile = self._cluster.device(stage.devices[0]).profile
        return profile.memory_bytes_per_s

    def _segment_s(self, place: Place, segment: int, forward: bool) -> float:
        """One microbatch's forward or backward of a segment."""
        stage, times = self._stages[place], self.layer_times(place)
        replica = self._replica(place)
        joined = is_joined(
            self._plan.schedule, replica, int(place.split(".s")[1]), segment
        )
        return CALL_S + sum(
            time.forward(policy, joined=joined)
            if forward
            else time.backward(policy, joined=joined)
            for time, policy in (
                (times[i], stage.remat[i - stage.layers[0]])
                for i in range(*stage.segment_layers(segment))
            )
        )

    def _segment_part_s(self, place: Place, segment: int, part: Part) -> float:
        """One microbatch's backward of a segment; the input part recomputes."""
        whole_s = self.segment_s(place, segment, False)
        times = self.layer_times(place)
        layers = range(*self._stages[place].segment_layers(segment))
        weight_s = sum(times[i].weight_s for i in layers)
        match part:
            case Part.BOTH:
                return whole_s
            case Part.INPUT:
                return whole_s - weight_s
            case Part.WEIGHT:
                return CALL_S + weight_s

    def _layer_times(self, place: Place) -> tuple[LayerTime, ...]:
        stage = self._stages[place]
        mesh = mesh_shape(self._cluster, stage)
        samples = self._replica(place).microbatch_size // stage.lanes
        if (mesh, samples) not in self._times:
            self._times[mesh, samples] = layer_times(self._chain, mesh, samples)
        return self._times[mesh, samples]

    def _replica(self, place: Place) -> Replica:
        return self._plan.replicas[int(place[1:].split(".s")[0])]

    def microbatches(self, i: Forward | Backward) -> float:
        """How many an instruction works on, or stands for."""
        first, stop = i.microbatches
        return (stop - first) * self.repeats.get(i.place, 1)

    def _forward_s(self, i: Forward) -> float:
        return self.segment_s(i.place, i.segment, True) * self.microbatches(i)

    def _backward_s(self, i: Backward) -> float:
        return self._part_s(i.place, i.segment, i.part) * self.microbatches(i)

    def _send_s(self, i: Send) -> float:
        crossing = self.message(i)
        return crossing.split_s + crossing.load.seconds

    def _reduce_s(self, i: Reduce) -> float:
        exchange = self.exchange(i.group)
        seconds = max(exchange.leave(m, i.path).seconds for m in exchange.members)
        if i.path:
            seconds += self.ring(i).seconds
        return seconds

    def _gather_s(self, i: Gather) -> float:
        exchange = self.exchange(i.group)
        seconds = max(exchange.spread_in(p, i.path).seconds for p in i.places)
        if names.is_freed(i.writes[0]):
            seconds += max(self.master_copy(h, i.group).seconds for h in i.homes)
        if i.path:
            seconds += self.ring(i).seconds
        return seconds

    def ring(self, i: Reduce | Gather) -> Call:
        """What goes by the collective."""
        collective = self.collective(i.group)
        assert collective, "the plan's Program has a path that its costs have not"
        item_bytes = GRAD_BYTES
        if isinstance(i, Gather):
            item_bytes = self.exchange(i.group).param_item_bytes
        return collective.ring(i.path, item_bytes)

    def _join_s(self, instruction: Join) -> float:
        join = self.exchange(instruction.group).join(instruction.place)
        return join.seconds if join else 0.0

    def _update_s(self, i: Update) -> float:
        """State, gradient and slice of the home's own boxes, once through memory.

        Unless the kind's update was measured. The host's processor does those of all
        devices of a home, with all its cores.
        """
        home = i.home
        held = self.exchange(i.group).held.get(home, 0)
        if i.site is ops.Site.HOST:
            devices = self.devices(home)
            host = host_side(self._cluster, devices[0], sharing=1)
            return held * len(devices) / host.update_params_per_s
        profile = self._cluster.device(self.devices(home)[0]).profile
        measured_s = update_s_per_param(profile)
        if measured_s:
            return CALL_S + held * measured_s
        per_param = 2 * STATE_BYTES * (1 + self._moments) + GRAD_BYTES + STATE_BYTES
        return CALL_S + held * per_param / self._site(home).memory_bytes_per_s

    def _agree_s(self, i: Agree) -> float:
        """A few bytes from each to the next: the longest latency among them."""
        ends = [self.devices(place)[0] for place in i.members if self.devices(place)]
        hops = itertools.pairwise(ends)
        return max(
            (self._ways.hop(a, b).link.transfer_s(4) for a, b in hops if a != b),
            default=0.0,
        )
