"""How fast microbatches pass a pipeline.

    seconds of each stage and border -> pipeline_s -> first, and what each further adds

1F1B in its steady state: the slowest stage or border sets the pace, unless messages
keep a run of stages waiting for each other. Of two neighbours the first has one more
microbatch in flight, so n stages in a row turn n microbatches while one goes through
them and back, borders included.
"""

from collections.abc import Sequence

LONGEST_RUN = 16
"""Stages in a row that are looked at; longer runs average out."""


def pipeline_s(
    stage_s: Sequence[float],
    border_s: Sequence[float],
    num_sets: int,
    *,
    bounded: bool = True,
) -> tuple[float, float]:
    """Time of the first microbatch, and what each further one adds.

    Args:
      stage_s: forward and backward of one microbatch in each stage.
      border_s: one microbatch's activations across each border between them.
      num_sets: device sets; fewer than stages under ``interleaved``, whose bubble is
        shorter by the stages a set holds.
      bounded: as in 1F1B, a stage has one more microbatch in flight than the next.
    """
    set_s = [sum(stage_s[k::num_sets]) for k in range(num_sets)]
    rounds = len(stage_s) // num_sets
    slowest_s = max(set_s)
    first_s = slowest_s + (sum(set_s) - slowest_s) / rounds + 2 * sum(border_s)
    pace_s = max(slowest_s, *border_s, 0.0)
    if bounded and rounds == 1:
        for k in range(len(stage_s)):
            trip_s = stage_s[k]
            for length in range(2, min(len(stage_s) - k, LONGEST_RUN) + 1):
                trip_s += 2 * border_s[k + length - 2] + stage_s[k + length - 1]
                pace_s = max(pace_s, trip_s / length)
    return first_s, pace_s
