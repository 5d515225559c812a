"""How fast microbatches pass a pipeline.

    seconds of each stage and border -> pipeline_s -> first, and what each further adds

1F1B in its steady state: the slowest stage, border or way sets the pace, unless
messages keep a run of stages waiting for each other. A microbatch goes through n stages
in a row and back, borders included; then the first of them turns to the forward that
stands after it. Where each has ``ahead`` microbatches more in flight than the next,
that is ``ahead * (n - 1) + 1`` microbatches later: n of them in 1F1B, 2n - 1 in eager
1F1B.
"""

from collections.abc import Sequence

LONGEST_RUN = 16
"""Stages in a row that are looked at; longer runs average out."""


def pipeline_s(
    stage_s: Sequence[float],
    border_s: Sequence[float],
    num_sets: int,
    *,
    ahead: int | None = 1,
    way_s: float = 0.0,
) -> tuple[float, float]:
    """Time of the first microbatch, and what each further one adds.

    Args:
      stage_s: forward and backward of one microbatch in each stage.
      border_s: one microbatch's activations across each border between them.
      num_sets: device sets; fewer than stages under ``interleaved``, whose bubble is
        shorter by the stages a set holds.
      ahead: microbatches a stage has more in flight than the next; None: as in GPipe,
        stages wait for no backward.
      way_s: what a microbatch takes of the way that most borders share.
    """
    set_s = [sum(stage_s[k::num_sets]) for k in range(num_sets)]
    rounds = len(stage_s) // num_sets
    slowest_s = max(set_s)
    first_s = slowest_s + (sum(set_s) - slowest_s) / rounds + 2 * sum(border_s)
    pace_s = max(slowest_s, *border_s, way_s)
    if ahead is not None and rounds == 1:
        for k in range(len(stage_s)):
            trip_s = stage_s[k]
            for length in range(2, min(len(stage_s) - k, LONGEST_RUN) + 1):
                trip_s += 2 * border_s[k + length - 2] + stage_s[k + length - 1]
                pace_s = max(pace_s, trip_s / (ahead * (length - 1) + 1))
    return first_s, pace_s
