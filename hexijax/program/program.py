"""The instructions of a Program and the buffers they read and write.

    Plan + Chain -> lower -> Program -> runtime.executor, simulator

A Program is one total order of instructions: the order of dispatch. Buffers are written
once; a read marked as dying is the last one. The order is all there is: the executor
owns no queue and makes no choice.
"""

import dataclasses
import enum
from collections.abc import Iterator

from hexijax.plan.plan import Place

FORMAT_VERSION = 1


class Kind(enum.StrEnum):
    """What a buffer holds."""

    STATE = "State"
    """fp32 master parameters and optimizer moments of a group's box at one place."""
    PARAM = "Param"
    """A group's parameters as a stage computes with them."""
    GRAD = "Grad"
    """fp32 gradient: of a group on a stage, partial by lane; or its sum at a home."""
    ACT = "Act"
    """What crosses a border for one microbatch: a tuple of arrays."""
    COT = "Cot"
    """Cotangents of the float arrays of an Act."""
    RES = "Res"
    """What a segment's forward keeps for its backward: an opaque flat list."""
    BATCH = "Batch"
    """Batch arrays, keys and sample mask of one microbatch on one stage."""
    SCALAR = "Scalar"
    """Sum, weight, norm, finite, metrics."""
    WIRE = "Wire"
    """A message between Send and Recv."""


@dataclasses.dataclass(frozen=True, slots=True, order=True)
class Buffer:
    """A value that is written once: ``Act[r0.s1 L4 #2]@0``."""

    kind: Kind
    place: Place
    """The stage's mesh or the device that holds it."""
    subject: str
    """Group name, ``g2`` for a segment, ``L4`` for the border before layer 4, a name."""
    microbatch: int | None = None
    """None for what a step has once."""
    step: int = 0
    """Steps ahead of the body's own step; State@1 is what the next step reads."""

    def __str__(self) -> str:
        mb = "" if self.microbatch is None else f" #{self.microbatch}"
        return f"{self.kind}[{self.place} {self.subject}{mb}]@{self.step}"


@dataclasses.dataclass(frozen=True, slots=True)
class Read:
    """An input, and whether this is its last reader (then it is donated or freed)."""

    buffer: Buffer
    dies: bool = False

    def __str__(self) -> str:
        return f"{self.buffer}{'!' if self.dies else ''}"


class Part(enum.StrEnum):
    """Which half of a backward."""

    BOTH = "both"
    INPUT = "input"
    WEIGHT = "weight"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Instruction:
    """What every instruction has."""

    reads: tuple[Read, ...] = ()
    writes: tuple[Buffer, ...] = ()


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Load(Instruction):
    """Place one microbatch's batch arrays on the stages that read them.

    Writes Batch on each such stage. The weights of the whole step are known by the
    first Load: its global sum is Scalar[host weight].
    """

    replica: int
    microbatch: int


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Forward(Instruction):
    """Run a segment forward.

    Reads Param of each of its groups, Act at its first border (none for layer 0) and
    Batch; writes Act at its last border, Res ``g<n>`` when ``grad``; the last segment
    writes Scalar ``loss`` (sum, weight and metric sums, one a lane) instead of an Act.
    """

    place: Place
    segment: int
    microbatches: tuple[int, int]
    grad: bool = True


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Backward(Instruction):
    """Run a segment backward and add to its gradients.

    Reads Param of its groups, Res, the Act at its first border, Batch and the Cot at its
    last border (the last segment: Scalar ``seed``); reads and writes Grad of each of its
    groups with the microbatch as version; writes Cot at its first border.
    """

    place: Place
    segment: int
    microbatches: tuple[int, int]
    part: Part = Part.BOTH


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Send(Instruction):
    """Start moving an Act or Cot towards another stage: it becomes a Wire."""

    tag: int
    source: Place
    target: Place


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Recv(Instruction):
    """Finish a move: the Wire becomes an Act or Cot on the target's mesh and dtype."""

    tag: int
    source: Place
    target: Place


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Gather(Instruction):
    """Bring a group's new parameters from their homes to one stage that uses them."""

    group: str
    homes: tuple[Place, ...]
    place: Place


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Reduce(Instruction):
    """Sum a group's gradients over all its users and lanes, at its homes.

    ``members`` is the order of addition. Writes Grad at each home and, there, Scalar
    ``norm <group>``: the sum of squares of that home's boxes.
    """

    group: str
    members: tuple[Place, ...]
    homes: tuple[Place, ...]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Agree(Instruction):
    """Sum scalars over places in the order listed, and give the result to ``members``.

    ``name`` is ``loss`` (metrics for people) or ``norm`` (clip factor, finite flag).
    """

    name: str
    members: tuple[Place, ...]


class Site(enum.StrEnum):
    """Where an update runs."""

    DEVICE = "device"
    STREAMED = "streamed"
    HOST = "host"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Update(Instruction):
    """One optimizer step of a group's boxes at one home.

    Reads State@0!, Grad!, Scalar ``norm`` if clipped or guarded; writes State@1 and the
    Param slice at the home, subject ``slice <group>``.
    """

    group: str
    home: Place
    site: Site = Site.DEVICE
    chunk: int = 0


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Prefetch(Instruction):
    """Copy a buffer from host memory to the device, into a slot of a pool."""

    buffer: Buffer
    pool: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class WriteBack(Instruction):
    """Copy a buffer from the device to host memory, freeing its slot."""

    buffer: Buffer
    pool: str


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Snapshot(Instruction):
    """Copy state to pinned host memory for a checkpoint, after a drain."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Free(Instruction):
    """Release buffers whose last reader is behind."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One island's order of dispatch."""

    prologue: tuple[Instruction, ...] = ()
    """Once, before the first body: parameters from their state."""

    body: tuple[Instruction, ...] = ()
    """One step. State@1 and Param@1 it writes are the next body's State@0 and Param@0."""

    drain: tuple[Instruction, ...] = ()
    """Back to one whole step; empty while no body reaches into the next."""

    def __iter__(self) -> Iterator[Instruction]:
        yield from (*self.prologue, *self.body, *self.drain)
