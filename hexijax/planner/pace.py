"""How fast microbatches pass a pipeline.

    seconds of each stage and border -> pipeline_s -> first, and what each further adds

1F1B in its steady state: the slowest stage or border sets the pace, unless a microbatch
takes so long from a stage to the end and back that the few it may have in flight leave
it waiting.
"""

from collections.abc import Sequence


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
      bounded: stage k of S has at most S - k microbatches in flight (1F1B).
    """
    set_s = [sum(stage_s[k::num_sets]) for k in range(num_sets)]
    rounds = len(stage_s) // num_sets
    slowest_s = max(set_s)
    first_s = slowest_s + (sum(set_s) - slowest_s) / rounds + 2 * sum(border_s)
    pace_s = max(slowest_s, *border_s, 0.0)
    if bounded and rounds == 1:
        round_trip_s = 0.0
        for in_flight, k in enumerate(reversed(range(len(stage_s))), start=1):
            round_trip_s += stage_s[k]
            pace_s = max(pace_s, round_trip_s / in_flight)
            if k:
                round_trip_s += 2 * border_s[k - 1]
    return first_s, pace_s
