"""What a simulated step is made of: tasks, and what each uses.

Instruction -> Task(use, after, ...) on the queues of devices, ways and hosts
"""

import dataclasses
import enum
from collections.abc import Sequence

from hexijax.costs.ways import NO_LOAD, Load
from hexijax.program import program as ops
from hexijax.program.program import Instruction


class What(enum.StrEnum):
    """What a task is, for people."""

    FORWARD = "forward"
    BACKWARD = "backward"
    BOTH = "both"
    """A last segment's forward and backward as one program."""
    MOVE = "move"
    """Activations or cotangents between stages."""
    SYNC = "sync"
    """Gradients to their homes, new parameters to their users, the norm."""
    UPDATE = "update"
    SKIP = "skip"
    """Microbatches that are not played, since they repeat."""


Hosts = tuple[tuple[str, float], ...]
"""Islands whose host dispatches a call, and how many such calls it makes."""


@dataclasses.dataclass(frozen=True, slots=True, eq=False)
class Use:
    """What equal tasks have in common: one object for all of them."""

    what: What
    seconds: float
    devices: tuple[str, ...]
    """Kept from start to end."""
    load: Load = NO_LOAD
    """Ways, kept from the start for as long as its bytes need each."""
    hosts: Hosts = ()
    behind: tuple[str, ...] = ()
    """Devices waited for, not kept."""


@dataclasses.dataclass(slots=True)
class Task:
    """One use of some queues at once."""

    use: Use
    instruction: Instruction
    """The one it belongs to; a Reduce or a Gather has several tasks."""
    after: Sequence[int] = ()
    """Tasks of the same step that end before this starts."""
    along: Sequence[int] = ()
    """Tasks that have begun when this starts, and ended when it ends."""
    before: Sequence[tuple[int, float]] = ()
    """Tasks of the step before that end before this starts, and seconds between."""
    held: Sequence[int] = ()
    """Tasks that end before its hosts dispatch this, and what follows in their order:
    copies of what takes the same memory, or calls with which its device is full."""


def name(instruction: Instruction) -> str:
    """An instruction as a person reads it on a timeline."""
    kind = type(instruction).__name__
    match instruction:
        case (
            ops.Forward(segment=g, microbatches=(m, _))
            | ops.Backward(segment=g, microbatches=(m, _))
        ):
            return f"{kind} g{g} #{m}"
        case (
            ops.Send(source=source, target=target)
            | ops.Recv(source=source, target=target)
        ):
            return f"{kind} {source} > {target}"
        case (
            ops.Reduce(group=group)
            | ops.Sum(group=group)
            | ops.Gather(group=group)
            | ops.Join(group=group)
            | ops.Update(group=group)
        ):
            return f"{kind} {group}"
        case ops.Agree(name=name):
            return f"{kind} {name}"
        case ops.Prefetch(buffer=buffer) | ops.WriteBack(buffer=buffer):
            return f"{kind} {buffer}"
        case _:
            return kind
