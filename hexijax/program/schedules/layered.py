"""Layers outside, microbatches inside: a segment runs all microbatches before the next.

Layered gradient accumulation of Cephalo (arXiv 2411.01075): a segment's parameters are
needed for two passes a step, however many microbatches there are, and its gradient is
complete when its pass is over. A device set that holds several stages of a replica
takes them in the same way, one after another: ministages, as
Zorse has them, so that a pipeline of many short stages gathers each once a pass, too.

The loss's segment is the exception: its backward needs nothing but its own forward, so
each microbatch goes back at once, and no logits wait.

The price is a border activation of every microbatch at every segment, on the device or
in host memory, and a pipeline that starts backward only when its forwards are over.
"""

from collections.abc import Sequence

from hexijax.program.schedules.turn import Stream, Turn, Way


def layered(
    device_sets: Sequence[int], num_microbatches: int, segments: Sequence[int]
) -> tuple[Stream, ...]:
    """One stream a device set.

    Args:
      device_sets: of each stage.
      num_microbatches: in all.
      segments: how many each stage has.
    """
    microbatches = range(num_microbatches)
    loss = len(device_sets) - 1, segments[-1] - 1
    streams: list[Stream] = []
    for device_set in dict.fromkeys(device_sets):
        held = [
            (stage, segment)
            for stage, number in enumerate(segments)
            if device_sets[stage] == device_set
            for segment in range(number)
        ]
        turns = [_turn(Way.FORWARD, at, m) for at in held for m in microbatches]
        if held[-1] == loss:
            held.pop()
            del turns[len(held) * num_microbatches :]
            for m in microbatches:
                turns += [_turn(Way.FORWARD, loss, m), _turn(Way.BACKWARD, loss, m)]
        turns += [
            _turn(Way.BACKWARD, at, m) for at in reversed(held) for m in microbatches
        ]
        streams.append(tuple(turns))
    return tuple(streams)


def _turn(way: Way, at: tuple[int, int], microbatch: int) -> Turn:
    stage, segment = at
    return Turn(way, stage, microbatch, segment)
