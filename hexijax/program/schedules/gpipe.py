"""All forwards, then all backwards: every stage holds every microbatch at its peak."""

from collections.abc import Sequence

from hexijax.program.schedules.turn import Stream, backwards, forwards


def gpipe(device_sets: Sequence[int], num_microbatches: int) -> tuple[Stream, ...]:
    """One stream a stage; stages that share devices meet on the clock."""
    microbatches = range(num_microbatches)
    return tuple(
        (*forwards(stage, microbatches), *backwards(stage, microbatches))
        for stage in range(len(device_sets))
    )
