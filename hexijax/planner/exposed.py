"""What gradient sums, updates and new parameters add to a step, by formula.

    stages with their bytes and when they are idle -> exposed_s

A stage's sums are ready when its last backward ends and its parameters are wanted when
its next forward begins; in a pipeline that is early for late stages, and late for them
too. Whatever fits between travels for nothing. Each node's way serves its stages in the
order in which they are ready; sums over lanes and updates are programs of the stage's
own devices.
"""

import dataclasses
import math
from collections.abc import Iterable, Sequence


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Piece:
    """One segment's gradients."""

    ready_s: float
    """When its last backward ends; 0 is the end of the replica's last backward."""

    wanted_s: float
    """When its next forward begins, from the start of the next step."""

    travel_s: float
    """On the way: sums to their homes and new parameters back."""

    program_s: float
    """On the devices: sums over lanes, the update."""


def pieces(
    *,
    before_s: tuple[float, float],
    own_s: tuple[float, float],
    travel_s: float,
    program_s: float,
    num_segments: int,
) -> Iterable[Piece]:
    """A stage's pieces, the last segment's first: the backward meets it first.

    Args:
      before_s: forward and backward of one microbatch in all stages before.
      own_s: forward and backward of one microbatch in this stage.
      travel_s: of the whole stage.
      program_s: of the whole stage.
      num_segments: of the stage.
    """
    for g in reversed(range(num_segments)):
        yield Piece(
            ready_s=-before_s[1] - own_s[1] * g / num_segments,
            wanted_s=before_s[0] + own_s[0] * g / num_segments,
            travel_s=travel_s / num_segments,
            program_s=program_s / num_segments,
        )


def exposed_s(found: Sequence[Piece]) -> float:
    """By how much the next step begins later than the last backward ended.

    Args:
      found: all that leave by one way: a node's, or a device's own.
    """
    free_s, late_s = -math.inf, 0.0
    for piece in sorted(found, key=lambda piece: piece.ready_s):
        free_s = max(piece.ready_s, free_s) + piece.travel_s
        late_s = max(late_s, free_s + piece.program_s - piece.wanted_s)
    return late_s
