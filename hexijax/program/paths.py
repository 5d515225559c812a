"""Pass 3, before: what of a bucket travels by a collective, and what by pieces.

    groups, streams, costs -> groups with their paths

Pieces run beside compute. A collective does not, and all its devices stand still until
the last of them comes to it. So it has a chance only where nothing is left to compute:
the gradients that a step's last backwards complete, and new parameters where no update
starts before. What a stage frees is gathered for one stage's pass, beside the pass
before it: by pieces; and so does what is updated on its way through a device. Sums may
go by a collective where the plan's reductions are fast.
"""

import dataclasses
from collections.abc import Iterable, Sequence
from typing import Protocol, runtime_checkable

from hexijax.plan.plan import Place, Plan, Reductions
from hexijax.program.linearise import Costs
from hexijax.program.placement import GroupPlaces, StepRules
from hexijax.program.program import Instruction, Kind, Memory


@runtime_checkable
class PathCosts(Costs, Protocol):
    """Durations, and which path is the fastest with nothing beside it."""

    def gather_path(self, group: str, *, alone: bool) -> int:
        """For new parameters; ``alone``: of one bucket at a time."""
        ...

    def reduce_path(self, group: str) -> int:
        """For gradients."""
        ...


def paths(
    plan: Plan,
    groups: Sequence[GroupPlaces],
    streams: Iterable[Sequence[Instruction]],
    costs: Costs,
    rules: StepRules,
) -> tuple[GroupPlaces, ...]:
    """The groups, in the same order."""
    if not isinstance(costs, PathCosts):
        return tuple(groups)
    last = _last(streams)
    made: list[GroupPlaces] = []
    for g in groups:
        if g.trainable and len(g.users) > 1 and g.memory is Memory.DEVICE:
            at_end = all((user, g.group) in last for user in g.users)
            if at_end and plan.reductions is Reductions.FAST:
                path = costs.reduce_path(g.group)
                g = dataclasses.replace(g, reduce_path=path)
            if (at_end or rules.update_waits) and g.keepers == g.users:
                path = costs.gather_path(g.group, alone=not rules.update_waits)
                g = dataclasses.replace(g, gather_path=path)
        made.append(g)
    return tuple(made)


def _last(streams: Iterable[Sequence[Instruction]]) -> set[tuple[Place, str]]:
    """Stages and buckets of which a stream's last instruction ends the gradient."""
    return {
        (buffer.place, buffer.subject)
        for stream in streams
        for buffer in (stream[-1].writes if stream else ())
        if buffer.kind is Kind.GRAD
    }
