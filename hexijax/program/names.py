"""Names of the buffers, so that every pass and every rule spells them alike.

Equal names are one object while they are in the cache: a lookup by it then compares no
fields, which is most of what lowering and checking cost.
"""

import functools

from hexijax.plan.plan import Place
from hexijax.program.program import HOST, Buffer, Kind, Memory

_interned = functools.lru_cache(maxsize=2**19)


@_interned
def state(
    home: Place, group: str, step: int = 0, memory: Memory = Memory.DEVICE
) -> Buffer:
    """A group's masters and moments at one home."""
    return Buffer(Kind.STATE, home, group, step=step, memory=memory)


@_interned
def param(place: Place, group: str, step: int = 0, count: int | None = None) -> Buffer:
    """A group's parameters as a stage computes with them; ``count``: for that pass."""
    return Buffer(Kind.PARAM, place, group, count, step)


@_interned
def param_slice(home: Place, group: str) -> Buffer:
    """A home's boxes of the new parameters, before they are gathered."""
    return Buffer(Kind.PARAM, home, f"slice {group}", step=1)


def is_freed(buffer: Buffer) -> bool:
    """Whether parameters, or what they are joined from, are there for one pass."""
    param = buffer.kind is Kind.PARAM or buffer.kind is Kind.PIECES
    return param and buffer.microbatch is not None


def on_host(buffer: Buffer) -> Buffer:
    """The copy in host memory that a buffer is written back to, or comes from.

    Parameters of every pass come from the same.
    """
    count = None if buffer.kind is Kind.PARAM else buffer.microbatch
    return buffer._replace(memory=Memory.HOST, microbatch=count)


def pool(buffer: Buffer) -> str:
    """Whose slots a buffer takes that comes from the host."""
    return f"{buffer.place} {buffer.kind}"


def is_slice(buffer: Buffer) -> bool:
    """Whether a Param is a home's boxes, on their way to where they are used."""
    return buffer.kind is Kind.PARAM and buffer.subject.startswith("slice ")


@_interned
def partial_grad(place: Place, group: str, count: int) -> Buffer:
    """A stage's gradient after ``count`` additions to the first."""
    return Buffer(Kind.GRAD, place, group, count)


@_interned
def grad(home: Place, group: str) -> Buffer:
    """A home's boxes of the summed gradient."""
    return Buffer(Kind.GRAD, home, group)


@_interned
def grad_pieces(home: Place, group: str) -> Buffer:
    """Gradients of all users, cut to a home's boxes, where they arrive."""
    return Buffer(Kind.PIECES, home, f"grad {group}")


@_interned
def param_pieces(place: Place, group: str, count: int | None = None) -> Buffer:
    """New parameters of all homes, where they arrive; ``count``: for that pass."""
    return Buffer(Kind.PIECES, place, f"param {group}", count)


@_interned
def act(place: Place, layer: int, microbatch: int) -> Buffer:
    """What enters a layer."""
    return Buffer(Kind.ACT, place, f"L{layer}", microbatch)


@_interned
def cot(place: Place, layer: int, microbatch: int) -> Buffer:
    """Cotangents of what enters a layer."""
    return Buffer(Kind.COT, place, f"L{layer}", microbatch)


@_interned
def res(place: Place, segment: int, microbatch: int) -> Buffer:
    """What a segment's forward keeps for its backward."""
    return Buffer(Kind.RES, place, f"g{segment}", microbatch)


@_interned
def weight_res(place: Place, segment: int, microbatch: int) -> Buffer:
    """What the input part of a backward keeps for the weight part."""
    return Buffer(Kind.RES, place, f"g{segment} weight", microbatch)


def is_handed(buffer: Buffer) -> bool:
    """Whether a Res waits for the weight part of a backward."""
    return buffer.kind is Kind.RES and buffer.subject.endswith(" weight")


@_interned
def batch(place: Place, microbatch: int) -> Buffer:
    """Batch arrays, keys and mask on one stage."""
    return Buffer(Kind.BATCH, place, "batch", microbatch)


@_interned
def wire(target: Place, tag: int, microbatch: int) -> Buffer:
    """A message on its way."""
    return Buffer(Kind.WIRE, target, f"t{tag}", microbatch)


@_interned
def loss(place: Place, microbatch: int) -> Buffer:
    """Sum, weight and metric sums of one microbatch."""
    return Buffer(Kind.SCALAR, place, "loss", microbatch)


@_interned
def seed(place: Place) -> Buffer:
    """Cotangent of a loss sum: loss scale over global weight."""
    return Buffer(Kind.SCALAR, place, "seed")


@_interned
def scale(place: Place, step: int = 0) -> Buffer:
    """A dynamic loss scale with its count of good steps."""
    return Buffer(Kind.SCALAR, place, "scale", step=step)


def is_scale(buffer: Buffer) -> bool:
    """Whether a Scalar is a loss scale, which the next step reads."""
    return buffer.kind is Kind.SCALAR and buffer.subject == "scale"


@_interned
def group_norm(home: Place, group: str) -> Buffer:
    """Sum of squares of a home's boxes of the summed gradient."""
    return Buffer(Kind.SCALAR, home, f"norm {group}")


@_interned
def agreed(member: Place, name: str) -> Buffer:
    """What an Agree gives to one member."""
    return Buffer(Kind.SCALAR, member, name)


WEIGHT = Buffer(Kind.SCALAR, HOST, "weight")
"""Weight of the whole global batch, known before the first backward."""
