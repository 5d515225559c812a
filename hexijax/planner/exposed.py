"""What gradient sums, updates and new parameters add to a step, by formula.

    stages with their bytes and when they are idle -> exposed_s

A stage's sums are ready when its last backward ends and its parameters are wanted when
its next forward begins; in a pipeline that is early for late stages, and late for them
too. Whatever fits between travels for nothing. Each way serves its stages in the order
in which they are ready: gradients a segment at a time beside the backward, and new
parameters when all of a stage's gradients have come. Sums over lanes, updates and joins
are programs of the stage's own devices, so that the first hold up its backward.
"""

import dataclasses
import heapq
import math
from collections.abc import Sequence

FORWARD_OF_BACKWARD = 1 / 2
"""A forward makes one product where the backward makes two."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Sums:
    """A stage's gradients and new parameters, as far as they leave by one way."""

    begin_s: float
    """When its last backward begins; 0 is the end of the replica's last backward, if
    there were no sums."""

    backward_s: float
    """Of one microbatch."""

    wanted_s: float
    """When its next forward begins, from the start of the next step."""

    num_segments: int
    """Whose gradients leave one after another."""

    grads_s: float
    """On the way to their homes."""

    params_s: float
    """On the way back."""

    programs: "Programs"
    """On the devices."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Programs:
    """What a stage's devices compute for its sums, all segments together."""

    cut_s: float
    """Gradients summed over lanes and cut to their homes, after each backward."""

    update_s: float
    """What has come added up, and the optimizer."""

    join_s: float
    """Parameters made of their pieces."""


def exposed_s(found: Sequence[Sums]) -> float:
    """By how much the next step begins later than the last backward ended.

    Args:
      found: all that leave by one way: a node's, or a device's own.
    """
    late_s, free_s = 0.0, -math.inf
    waiting: list[tuple[float, int, int]] = []
    for i, sums in enumerate(found):
        each_s = (sums.backward_s + sums.programs.cut_s) / sums.num_segments
        waiting += [
            (sums.begin_s + each_s * (g + 1), i, g) for g in range(sums.num_segments)
        ]
    heapq.heapify(waiting)
    while waiting:
        ready_s, i, g = heapq.heappop(waiting)
        sums, count = found[i], found[i].num_segments
        begin_s = max(ready_s, free_s)
        if g < count:
            free_s = begin_s + sums.grads_s / count
            if g == count - 1:
                home_s = free_s + sums.programs.update_s
                heapq.heappush(waiting, (home_s, i, count))
            continue
        free_s = begin_s + sums.params_s
        # The first segment's are there sooner, but may take longer to join.
        join_s, rest = sums.programs.join_s, 1 - 1 / count
        there_s = max(free_s, free_s + (join_s - sums.params_s) * rest)
        late_s = max(late_s, there_s + join_s / count - sums.wanted_s)
    return late_s


def passes_s(found: Sequence[Sums]) -> float:
    """The same where parameters are gathered for each pass over a segment.

    Forwards hide a gather of all, backwards another and the sums; of each what is left
    is seen, and what the first pass waits for. What joins parameters keeps the devices
    twice.
    """
    freed = [dataclasses.replace(sums, params_s=0.0) for sums in found]
    free = [
        dataclasses.replace(x, programs=dataclasses.replace(x.programs, join_s=0.0))
        for x in freed
    ]
    gather_s = sum(sums.params_s for sums in found)
    grads_s = sum(sums.grads_s for sums in found)
    join_s = max(sums.programs.join_s for sums in found)
    backward_s = max(sums.backward_s for sums in found)
    first_s = max(sums.params_s / sums.num_segments for sums in found)
    forward_s = backward_s * FORWARD_OF_BACKWARD
    seen_s = max(0.0, gather_s - forward_s)
    seen_s += max(0.0, gather_s - max(0.0, backward_s - grads_s))
    return exposed_s(free) + first_s + seen_s + 2 * join_s
