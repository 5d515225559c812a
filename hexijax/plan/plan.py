"""The Plan: what is where.

    Cluster + Chain -> planner, or a person's text file -> Plan -> program.lower

A plan is data: it prints (``text``), parses back, and compares equal. Devices, layers
and groups are named, never numbered by rank, so a plan reads without the cluster beside
it.
"""

import dataclasses
import enum
import functools
from collections.abc import Iterator, Mapping
from typing import NewType

from hexijax.errors import UserError
from hexijax.layers.chain import Remat

FORMAT_VERSION = 1

Place = NewType("Place", str)
"""Where an array lives: a stage's mesh, ``r0.s1``, or one device, ``a/3``."""


class PlanError(UserError):
    """A plan that cannot be, or does not belong to this model or cluster."""


class Schedule(enum.StrEnum):
    """Order of the microbatches in a replica's stages."""

    ONE_F_ONE_B = "1f1b"
    GPIPE = "gpipe"
    INTERLEAVED = "interleaved"
    ZERO_BUBBLE = "zero-bubble"
    EAGER = "eager-1f1b"
    LAYERED = "layered"


class Params(enum.StrEnum):
    """How long a stage has the parameters of a segment."""

    KEPT = "kept"
    """All step: new ones are gathered once."""
    FREED = "freed"
    """For a pass over the segment: gathered before it from where their state lives,
    gone after it."""
    STREAMED = "streamed"
    """For a pass as well: they rest in pinned host memory beside the stage's devices,
    where new ones are written once a step."""


CHUNK_SIZE = 2**25
"""Of a plan that does not say: its copies reach a link's rate."""


class Memory(enum.StrEnum):
    """Which memory of its place holds an array."""

    DEVICE = "device"
    HOST = "host"
    """Pinned host memory beside the place's devices."""


class UpdateOrder(enum.StrEnum):
    """When a step's updates are dispatched."""

    FIFO = "fifo"
    """Before all that the next step does."""
    PRIORITY = "priority"
    """Each before the next forward that needs it, and no earlier."""


class Reductions(enum.StrEnum):
    """How sums over meshes and lanes are made."""

    EXACT = "exact"
    """In the order the Program lists: bitwise repeatable."""
    FAST = "fast"
    """By the platform's collectives where one mesh allows it; promises a tolerance."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Stage:
    """A run of layers on one mesh of devices of one kind."""

    devices: tuple[str, ...]
    """Names, lane-major: the first ``tensor`` devices are lane 0."""

    layers: tuple[int, int]
    """First layer and the one past the last, as indices into the chain."""

    lanes: int = 1
    """Data-parallel copies inside the stage."""

    tensor: int = 1
    """Tensor degree: devices that share each weight."""

    dtype: str = "float32"
    """Compute dtype."""

    segments: tuple[int, ...] = ()
    """Layers in each segment, in order; they sum to the stage's layers."""

    remat: tuple[Remat, ...] = ()
    """One policy a layer, in order."""

    params: tuple[Params, ...] = ()
    """One a segment, in order; empty: all are kept. What several segments of the stage
    use is kept if one of them keeps it, else streamed if one streams it; what does not
    train is kept."""

    waits: tuple[Memory, ...] = ()
    """One a segment, in order; empty: the device for all. Where what crosses the
    segment's first border waits for its next turn; the first segment's says so of all
    that comes from other stages."""

    residuals: tuple[Memory, ...] = ()
    """One a segment, in order; empty: the device for all. Where what a forward keeps
    for its backward waits for it."""

    grads: int = 0
    """Under ``layered``, passes whose gradients may be there at once: a later one waits
    until they are updated. 0: all, which wait for no update."""

    leaving: int = 0
    """Chunks of state that may be on their way to the host when the next ones come, and
    twice as many buckets of parameters and of gradients. More take memory, fewer make
    dispatch wait. 0: the fewest."""

    def __post_init__(self) -> None:
        start, stop = self.layers
        if not self.segments:
            object.__setattr__(self, "segments", (stop - start,))
        if not self.remat:
            object.__setattr__(self, "remat", (Remat.NONE,) * (stop - start))
        if set(self.params) == {Params.KEPT}:
            object.__setattr__(self, "params", ())
        if set(self.waits) == {Memory.DEVICE}:
            object.__setattr__(self, "waits", ())
        if set(self.residuals) == {Memory.DEVICE}:
            object.__setattr__(self, "residuals", ())

    @property
    def num_layers(self) -> int:
        """Layers in the stage."""
        return self.layers[1] - self.layers[0]

    def frees(self, segment: int) -> bool:
        """Whether a segment's parameters are gathered for each pass over it."""
        return bool(self.params) and self.params[segment] is Params.FREED

    def streams(self, segment: int) -> bool:
        """Whether they come from host memory for each pass over it."""
        return bool(self.params) and self.params[segment] is Params.STREAMED

    def waits_on_host(self, segment: int) -> bool:
        """Whether activations at a segment's first border wait in host memory; those of
        the first: whether all do that come from other stages."""
        return bool(self.waits) and self.waits[segment] is Memory.HOST

    def keeps_on_host(self, segment: int) -> bool:
        """Whether what a segment's forward keeps waits in host memory."""
        return bool(self.residuals) and self.residuals[segment] is Memory.HOST

    def segment_layers(self, segment: int) -> tuple[int, int]:
        """First layer and the one past the last of a segment."""
        start = self.layers[0] + sum(self.segments[:segment])
        return start, start + self.segments[segment]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Replica:
    """Stages that together hold the model once."""

    stages: tuple[Stage, ...]
    """In the order of the forward; under ``interleaved`` a device set comes again."""

    microbatches: int
    """Microbatches a step."""

    microbatch_size: int
    """Samples in a microbatch over all lanes; padding included."""

    samples: int
    """Real samples a step: at most ``microbatches * microbatch_size``."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class StateShare:
    """How the state of some parameter groups is divided over places."""

    groups: tuple[str, ...]
    """Names of the groups; ``("*",)`` is every group not named elsewhere."""

    shares: Mapping[Place, float] = dataclasses.field(hash=False)
    """Parts by place, any scale; empty: even over the places that compute with it."""

    memory: Memory = Memory.DEVICE
    """Where masters and moments rest at their home; what does not train lies where it
    is used."""

    update: Memory = Memory.DEVICE
    """Where the update runs. State that rests in host memory is streamed through the
    device, or updated by the host's own processor."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prediction:
    """What the plan was chosen for."""

    step_s: float
    """Seconds a step."""

    memory_bytes: Mapping[str, int] = dataclasses.field(hash=False)
    """Promised peak by device name."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Plan:
    """Who does what, with what, for one chain on one cluster."""

    replicas: tuple[Replica, ...]
    """Their order fixes the sample map: replica 0 takes the first samples."""

    batch_size: int
    """Samples of one optimizer step, exact."""

    schedule: Schedule = Schedule.ONE_F_ONE_B
    """One schedule for all replicas."""

    reductions: Reductions = Reductions.EXACT
    """How gradients are summed."""

    order: UpdateOrder = UpdateOrder.FIFO
    """When updates run; the numbers are the same."""

    chunk: int = CHUNK_SIZE
    """About the most parameters whose state comes from host memory at once for its
    update: five times as many are on a device. Fewer take less of it, and longer."""

    state: tuple[StateShare, ...] = (StateShare(groups=("*",), shares={}),)
    """Later entries overrule ``*``."""

    objective: str = "step_time"
    """What the planner minimised."""

    chain: str = ""
    """Fingerprint of the chain it belongs to."""

    cluster: str = ""
    """Fingerprint of the cluster it belongs to."""

    prediction: Prediction | None = None
    """None for a plan written by hand."""

    def stages(self) -> Iterator[tuple[Place, Stage]]:
        """Every stage with its place, ``r0.s0`` first."""
        for r, replica in enumerate(self.replicas):
            for s, stage in enumerate(replica.stages):
                yield stage_place(r, s), stage

    def stage(self, place: Place) -> Stage:
        """The stage at a place."""
        replica, stage = place[1:].split(".s")
        return self.replicas[int(replica)].stages[int(stage)]


@functools.lru_cache(maxsize=2**16)
def stage_place(replica: int, stage: int) -> Place:
    """The place of a stage's mesh."""
    return Place(f"r{replica}.s{stage}")
