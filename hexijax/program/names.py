"""Names of the buffers, so that every pass and every rule spells them alike."""

from hexijax.plan.plan import Place
from hexijax.program.program import HOST, Buffer, Kind


def state(home: Place, group: str, step: int = 0) -> Buffer:
    """A group's masters and moments at one home."""
    return Buffer(Kind.STATE, home, group, step=step)


def param(place: Place, group: str, step: int = 0) -> Buffer:
    """A group's parameters as a stage computes with them."""
    return Buffer(Kind.PARAM, place, group, step=step)


def param_slice(home: Place, group: str) -> Buffer:
    """A home's boxes of the new parameters, before they are gathered."""
    return Buffer(Kind.PARAM, home, f"slice {group}", step=1)


def is_slice(buffer: Buffer) -> bool:
    """Whether a Param is a home's boxes, on their way to where they are used."""
    return buffer.kind is Kind.PARAM and buffer.subject.startswith("slice ")


def partial_grad(place: Place, group: str, count: int) -> Buffer:
    """A stage's gradient after ``count`` additions to the first."""
    return Buffer(Kind.GRAD, place, group, count)


def grad(home: Place, group: str) -> Buffer:
    """A home's boxes of the summed gradient."""
    return Buffer(Kind.GRAD, home, group)


def act(place: Place, layer: int, microbatch: int) -> Buffer:
    """What enters a layer."""
    return Buffer(Kind.ACT, place, f"L{layer}", microbatch)


def cot(place: Place, layer: int, microbatch: int) -> Buffer:
    """Cotangents of what enters a layer."""
    return Buffer(Kind.COT, place, f"L{layer}", microbatch)


def res(place: Place, segment: int, microbatch: int) -> Buffer:
    """What a segment's forward keeps for its backward."""
    return Buffer(Kind.RES, place, f"g{segment}", microbatch)


def weight_res(place: Place, segment: int, microbatch: int) -> Buffer:
    """What the input part of a backward keeps for the weight part."""
    return Buffer(Kind.RES, place, f"g{segment} weight", microbatch)


def batch(place: Place, microbatch: int) -> Buffer:
    """Batch arrays, keys and mask on one stage."""
    return Buffer(Kind.BATCH, place, "batch", microbatch)


def wire(target: Place, tag: int, microbatch: int) -> Buffer:
    """A message on its way."""
    return Buffer(Kind.WIRE, target, f"t{tag}", microbatch)


def loss(place: Place, microbatch: int) -> Buffer:
    """Sum, weight and metric sums of one microbatch."""
    return Buffer(Kind.SCALAR, place, "loss", microbatch)


def seed(place: Place) -> Buffer:
    """Cotangent of a loss sum: loss scale over global weight."""
    return Buffer(Kind.SCALAR, place, "seed")


def group_norm(home: Place, group: str) -> Buffer:
    """Sum of squares of a home's boxes of the summed gradient."""
    return Buffer(Kind.SCALAR, home, f"norm {group}")


def agreed(member: Place, name: str) -> Buffer:
    """What an Agree gives to one member."""
    return Buffer(Kind.SCALAR, member, name)


WEIGHT = Buffer(Kind.SCALAR, HOST, "weight")
"""Weight of the whole global batch, known before the first backward."""
