"""The instructions of a Program and the buffers they read and write.

    Plan + Chain -> lower -> Program -> runtime.executor, simulator

A Program is one total order of instructions: the order of dispatch. Buffers are written
once; a read marked as dying is the last one. The order is all there is: the executor
owns no queue and makes no choice.
"""

import dataclasses
import enum
import json
import re
from collections.abc import Iterator
from typing import NamedTuple, TypeVar, dataclass_transform

from hexijax.errors import UserError
from hexijax.plan.plan import Memory, Place

FORMAT_VERSION = 1

Value = TypeVar("Value")

SECTIONS = ("prologue", "body", "drain")
"""Of a Program, in the order in which they run."""

HOST = Place("host")
"""Where the weight of a step is known and its metrics arrive."""

PIECES = 0
"""The path of what goes by pieces alone, each copied from where it is to where it must
be. Any other is how many elements of each home's boxes go in one collective over the
users: fewer are padded, and what is beyond them goes by pieces."""

PLAIN = r"[\w./+*-]+"
"""A word that stands in the text as it is; any other is quoted as in JSON."""


def word(name: str) -> str:
    """A name as one word of the text form."""
    return name if re.fullmatch(PLAIN, name) else json.dumps(name)


def words(name: str) -> str:
    """A name that may be several words."""
    return name if re.fullmatch(rf"{PLAIN}(?: {PLAIN})*", name) else json.dumps(name)


class ProgramError(UserError):
    """A Program that cannot be read, or must not run."""


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
    """Sum, weight, norm, finite, scale, metrics."""
    WIRE = "Wire"
    """A message between Send and Recv."""
    PIECES = "Pieces"
    """A group's boxes where they arrive: of gradients at a home, from Reduce to Sum; of
    new parameters at a user, from Gather to Join."""


class Buffer(NamedTuple):
    """A value that is written once: ``Act[r0.s1 L4 #2]``, ``State[a/3 l0]@1``."""

    kind: Kind
    place: Place
    """The stage's mesh or the device that holds it."""
    subject: str
    """Group name, ``g2`` for a segment, ``L4`` for the border before layer 4."""
    microbatch: int | None = None
    """None for what a step has once; of a Grad, how many sums came before it; of
    freed parameters, how many passes of the place."""
    step: int = 0
    """Steps ahead of the body's own step; State@1 is what the next step reads, and
    Grad@-1 what the step before left to be updated with."""

    memory: Memory = Memory.DEVICE
    """Prefetch and WriteBack copy a buffer to its twin in the other memory."""

    def __str__(self) -> str:
        name = f"{word(self.place)} {words(self.subject)}"
        mb = "" if self.microbatch is None else f" #{self.microbatch}"
        memory = "" if self.memory is Memory.DEVICE else f"~{self.memory}"
        step = f"@{self.step}" if self.step else ""
        return f"{self.kind}[{name}{mb}]{step}{memory}"


class Read(NamedTuple):
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


@dataclass_transform(kw_only_default=True, frozen_default=True)
def instruction(kind: type[Value]) -> type[Value]:
    """Frozen to the type checker, plain at run time.

    Python's own frozen classes take three times as long to make, which was most of what
    lowering cost.
    """
    return dataclasses.dataclass(kw_only=True, slots=True, unsafe_hash=True)(kind)


@instruction
class Instruction:
    """What every instruction has."""

    reads: tuple[Read, ...] = ()
    writes: tuple[Buffer, ...] = ()


@instruction
class Load(Instruction):
    """Place one microbatch's batch arrays on the stages that read them.

    Writes Batch on each such stage. The weights of the whole step are known by the
    first Load, which writes their sum, Scalar ``weight`` at the host. Each replica's
    first Load writes Scalar ``seed`` on its last stage: the cotangent of the loss sum,
    the loss scale over the weight. A dynamic scale it reads there.
    """

    replica: int
    microbatch: int


@instruction
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


@instruction
class Backward(Instruction):
    """Run a segment backward and add to its gradients.

    Reads Param of its groups, Res, the Act at its first border, Batch and the Cot at
    its last border (the last segment: Scalar ``seed``). Of each of its groups it reads
    the stage's Grad so far (the first that adds to it reads none) and writes the next,
    so the order of addition is data. Writes Cot at its first border (not for layer 0).

    The input part writes Cot and a Res ``g<n> weight`` for the weight part, which reads
    that, Param and Batch, and adds to the gradients. All microbatches of a segment are
    split, or none.
    """

    place: Place
    segment: int
    microbatches: tuple[int, int]
    part: Part = Part.BOTH


@instruction
class Send(Instruction):
    """Start moving an Act or Cot towards another stage: it becomes a Wire."""

    tag: int
    source: Place
    target: Place


@instruction
class Recv(Instruction):
    """Finish a move: the Wire becomes an Act or Cot on the target's mesh and dtype."""

    tag: int
    source: Place
    target: Place


@instruction
class Gather(Instruction):
    """Start a group's new parameters on their way to stages that use them.

    Reads the Param slices of all homes (in the prologue, and where a stage frees them
    after each pass: their State); writes Pieces ``param <group>`` at each place: one,
    or by a collective all that keep them.
    """

    group: str
    homes: tuple[Place, ...]
    places: tuple[Place, ...]
    path: int = PIECES


@instruction
class Join(Instruction):
    """Make a stage's parameters of the pieces that have come: Pieces! -> Param."""

    group: str
    place: Place


@instruction
class Reduce(Instruction):
    """Sum a group's gradients over the lanes of each user, and start them homewards.

    ``members`` is the order of addition, and of the reads: the last Grad of each.
    Writes Pieces ``grad <group>`` at each home. A collective adds in an order of its
    own, the same one each time.
    """

    group: str
    members: tuple[Place, ...]
    homes: tuple[Place, ...]
    path: int = PIECES


@instruction
class Sum(Instruction):
    """Add what has come to a home: Pieces! -> Grad.

    Writes Grad (without a count) and Scalar ``norm <group>``: the sum of squares of the
    home's boxes.
    """

    group: str
    home: Place


@instruction
class Agree(Instruction):
    """Sum scalars in the order of the reads, and give the result to ``members``.

    ``name`` is ``loss`` (metrics for people), ``norm`` (clip factor, finite flag) or
    ``scale``. Writes Scalar ``name`` at each member; what it writes at the host is a
    result of the step, which the executor keeps until the next body begins.

    A dynamic loss scale is state: ``scale`` reads the host's and whether this step was
    finite, and writes the next step's at the host and at every last stage; in the
    prologue it hands out the first. ``norm`` then reads the scale, to divide it out.
    """

    name: str
    members: tuple[Place, ...]


class Site(enum.StrEnum):
    """Where an update runs."""

    DEVICE = "device"
    STREAMED = "streamed"
    HOST = "host"


@instruction
class Update(Instruction):
    """One optimizer step of a group's boxes at one home.

    Reads State@0!, Grad!, Scalar ``norm`` if clipped or guarded; writes State@1 and the
    Param slice at the home, subject ``slice <group>``, if some user keeps them.
    """

    group: str
    home: Place
    site: Site = Site.DEVICE
    chunk: int = 0


@instruction
class Prefetch(Instruction):
    """Copy a buffer from host memory to the device, into a slot of a pool.

    Reads the host twin of ``buffer`` and writes ``buffer``, which holds the slot until
    it dies.
    """

    buffer: Buffer
    pool: str


@instruction
class WriteBack(Instruction):
    """Copy a buffer from the device to host memory: reads ``buffer``, writes its twin.

    Where the read dies, the slot that ``buffer`` held is free again.
    """

    buffer: Buffer
    pool: str


@instruction
class Snapshot(Instruction):
    """Copy state to pinned host memory for a checkpoint, after a drain."""


@instruction
class Free(Instruction):
    """Release buffers whose last reader is behind."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Program:
    """One island's order of dispatch."""

    prologue: tuple[Instruction, ...] = ()
    """Once, before the first body: parameters from their state."""

    body: tuple[Instruction, ...] = ()
    """One step. State@1 and Param@1 that it writes are the next body's @0."""

    drain: tuple[Instruction, ...] = ()
    """Back to one whole step: updates that else stand in the next body. A body that
    nothing came before, or a drain, leaves them out. Empty where each body does all of
    its own."""

    pools: tuple[tuple[str, int], ...] = ()
    """Slots of each pool that Prefetch fills: name and number."""

    leaving: tuple[tuple[Place, int], ...] = ()
    """Chunks of state on their way to the host when more come, of places that have room
    for more than the fewest."""

    @property
    def late(self) -> frozenset[Buffer]:
        """What the drain writes, and instructions of a body do otherwise."""
        return frozenset(b for i in self.drain for b in i.writes)

    def __iter__(self) -> Iterator[Instruction]:
        yield from (*self.prologue, *self.body, *self.drain)
