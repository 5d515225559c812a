"""One forward, one backward: stage k of S holds at most min(S - k, M) microbatches."""

from collections.abc import Sequence

from hexijax.program.schedules.turn import Stream, backwards, forwards, one_by_one


def one_f_one_b(
    device_sets: Sequence[int], num_microbatches: int, *, ahead: int = 1
) -> tuple[Stream, ...]:
    """One stream a stage; stages that share devices meet on the clock.

    Args:
      device_sets: of each stage.
      num_microbatches: in all.
      ahead: microbatches that a stage holds more than the next.
    """
    num_stages = len(device_sets)
    microbatches = range(num_microbatches)
    return tuple(
        one_by_one(
            forwards(stage, microbatches),
            backwards(stage, microbatches),
            lead=min(ahead * (num_stages - stage - 1), num_microbatches),
        )
        for stage in range(num_stages)
    )
