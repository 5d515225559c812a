"""Bytes of each buffer of a Program on one device of the place that holds it.

    Buffer, plan, chain -> BufferBytes -> bytes

In the terms of ``plan_memory``, so that the two can be compared: what a segment keeps
follows from the remat of its layers, a border from the dtype of its stage.
"""

import functools
from collections.abc import Callable, Mapping

from hexijax.cluster import Cluster
from hexijax.costs.activations import (
    Within,
    batch_bytes,
    enter_bytes,
    handed_bytes,
    segment_kept_bytes,
    within_bytes,
)
from hexijax.costs.instructions import PlanCosts
from hexijax.costs.memory import stage_within
from hexijax.costs.sums import (
    GRAD_BYTES,
    MOMENTS,
    STATE_BYTES,
    box_size,
    shard_size,
)
from hexijax.layers.chain import ITEM_BYTES, Chain
from hexijax.plan.plan import Memory, Place, Plan, stage_place
from hexijax.program import names
from hexijax.program.program import Buffer, Kind


class BufferBytes:
    """Of one plan; call it with a buffer. Scalars count nothing."""

    def __init__(
        self,
        plan: Plan,
        chain: Chain,
        cluster: Cluster,
        costs: PlanCosts,
        moments: int = MOMENTS,
        *,
        whole_leaves: bool = False,
    ) -> None:
        """The buffers of one plan.

        Args:
          plan: what is where.
          chain: the model.
          cluster: kinds of the stages' devices: what attention they run.
          costs: the plan's, which knows its buckets and homes.
          moments: fp32 arrays of the optimizer for each parameter.
          whole_leaves: no leaf's state is cut.
        """
        self._chain, self._costs = chain, costs
        self._moments, self._whole_leaves = moments, whole_leaves
        self._stages = dict(plan.stages())
        self._samples: dict[Place, int] = {}
        self._within: dict[Place, Within] = {}
        for r, replica in enumerate(plan.replicas):
            for s, stage in enumerate(replica.stages):
                place = stage_place(r, s)
                self._samples[place] = replica.microbatch_size // stage.lanes
                self._within[place] = stage_within(plan, chain, cluster, replica, s)
        self._sizes: Mapping[Kind, Callable[[Buffer], int]] = {
            Kind.STATE: self._state,
            Kind.PARAM: self._param,
            Kind.GRAD: self._grad,
            Kind.PIECES: self._pieces,
            Kind.ACT: self._border,
            Kind.COT: self._border,
            Kind.RES: self._res,
            Kind.BATCH: self._batch,
            Kind.WIRE: lambda _: 0,  # a Wire is the border that its Send reads
            Kind.SCALAR: lambda _: 0,
        }
        self._held = functools.cache(self._held_size)
        self._known: dict[object, int] = {}
        self.transient = functools.cache(self._transient)
        """Alive inside a segment's backward only."""

    def __call__(self, buffer: Buffer) -> int:
        """Its bytes; those of all microbatches are alike."""
        if buffer.memory is Memory.HOST:
            return 0
        first = buffer.microbatch is None
        key = (buffer.kind, buffer.place, buffer.subject, first)
        size = self._known.get(key)
        if size is None:
            size = self._known[key] = self._sizes[buffer.kind](buffer)
        return size

    def wire(self, sent: Buffer, target: Place) -> int:
        """A border on its way, on a device of its target."""
        return self._border(Buffer(sent.kind, target, sent.subject))

    def _transient(self, place: Place, segment: int) -> int:
        return within_bytes(
            self._chain,
            self._within[place],
            self._stages[place],
            self._samples[place],
            segment,
        )

    def _state(self, buffer: Buffer) -> int:
        if not self._costs.groups[buffer.subject].trainable:
            return 0  # the parameters themselves, or in host memory
        size = self._held(buffer.place, buffer.subject)
        return size * STATE_BYTES * (1 + self._moments)

    def _param(self, buffer: Buffer) -> int:
        stage = self._stages.get(buffer.place)
        item = ITEM_BYTES[stage.dtype] if stage else STATE_BYTES
        if names.is_slice(buffer):
            group = buffer.subject.removeprefix("slice ")
            return item * self._held(buffer.place, group)
        return item * self._shard(buffer)

    def _grad(self, buffer: Buffer) -> int:
        if buffer.microbatch is None:
            return GRAD_BYTES * self._held(buffer.place, buffer.subject)
        return GRAD_BYTES * self._shard(buffer)

    def _pieces(self, buffer: Buffer) -> int:
        """Of each member's gradient; of parameters, each lane's part."""
        what, name = buffer.subject.split(" ", 1)
        if what == "grad":
            members = self._costs.exchange(name).num_members
            return GRAD_BYTES * members * self._held(buffer.place, name)
        stage = self._stages[buffer.place]
        shard = shard_size(self._costs.groups[name], stage.tensor)
        return ITEM_BYTES[stage.dtype] * shard // stage.lanes

    def _shard(self, buffer: Buffer) -> int:
        group = self._costs.groups[buffer.subject]
        return shard_size(group, self._stages[buffer.place].tensor)

    def _held_size(self, home: Place, name: str) -> int:
        group, stage = self._costs.groups[name], self._stages.get(home)
        leaves = {leaf.id: leaf for leaf in group.leaves}
        lanes = 1 if stage is None or self._whole_leaves else stage.lanes
        tensor = 1 if stage is None else stage.tensor
        return sum(
            box_size(leaves[leaf], box, lanes=lanes, tensor=tensor)
            for leaf, box in self._costs.boxes(name).get(home, {}).items()
        )

    def _border(self, buffer: Buffer) -> int:
        layer = int(buffer.subject.removeprefix("L"))
        stage, samples = self._stages[buffer.place], self._samples[buffer.place]
        return enter_bytes(self._chain, layer, stage.dtype, samples)

    def _res(self, buffer: Buffer) -> int:
        place = buffer.place
        stage, samples = self._stages[place], self._samples[place]
        within = self._within[place]
        segment = int(buffer.subject.split(" ")[0].removeprefix("g"))
        start, stop = stage.segment_layers(segment)
        if names.is_handed(buffer):
            of = stage.dtype, stage.tensor, samples
            layers = within.layers[start:stop]
            return sum(handed_bytes(self._chain, layer, *of) for layer in layers)
        if within.joined and segment == len(stage.segments) - 1:
            return 0  # inside the program
        return segment_kept_bytes(
            self._chain, within.layers, start, stop, stage, samples
        )

    def _batch(self, buffer: Buffer) -> int:
        place = buffer.place
        layers = self._stages[place].layers
        return batch_bytes(self._chain, *layers, self._samples[place])
