"""The order of the microbatches in each stage: one file a schedule.

which stages share devices, number of microbatches -> streams of turns
"""

from collections.abc import Callable, Mapping, Sequence

from hexijax.plan.plan import Replica, Schedule
from hexijax.program.schedules.eager import eager
from hexijax.program.schedules.gpipe import gpipe
from hexijax.program.schedules.interleaved import interleaved
from hexijax.program.schedules.layered import layered
from hexijax.program.schedules.one_f_one_b import one_f_one_b
from hexijax.program.schedules.turn import Stream, Turn, Way, forwards
from hexijax.program.schedules.zero_bubble import zero_bubble

__all__ = ["SCHEDULES", "Stream", "Turn", "Way", "schedule_replica"]

SCHEDULES: Mapping[Schedule, Callable[[Sequence[int], int], tuple[Stream, ...]]] = {
    Schedule.ONE_F_ONE_B: one_f_one_b,
    Schedule.GPIPE: gpipe,
    Schedule.INTERLEAVED: interleaved,
    Schedule.ZERO_BUBBLE: zero_bubble,
    Schedule.EAGER: eager,
}
"""Each takes the device set of every stage, numbered as they come, and how many
microbatches there are. ``layered`` asks for the stages' segments as well."""


def schedule_replica(
    replica: Replica, schedule: Schedule, *, evaluation: bool = False
) -> tuple[Stream, ...]:
    """Streams of one replica; an evaluation only goes forward."""
    if evaluation:
        microbatches = range(replica.microbatches)
        return tuple(
            tuple(forwards(k, microbatches)) for k in range(len(replica.stages))
        )
    numbers: dict[tuple[str, ...], int] = {}
    device_sets = [
        numbers.setdefault(stage.devices, len(numbers)) for stage in replica.stages
    ]
    if schedule is Schedule.LAYERED:
        segments = [len(stage.segments) for stage in replica.stages]
        return layered(device_sets, replica.microbatches, segments)
    return SCHEDULES[schedule](device_sets, replica.microbatches)
