"""1F1B with split backwards: weight parts do the waiting, so that no device does.

ZB-H1 of Qi et al., Zero Bubble Pipeline Parallelism (arXiv 2401.10241). Only the input
part of a backward is waited for by another stage: it runs where 1F1B runs the whole
one. Stage k runs the weight part k microbatches later, so that what is left fills the
drain. Forwards and input parts start no later than in 1F1B, whatever stages take, and a
bubble of (S - 1)(F + B) becomes (S - 1)(F + input - weight) where stages are alike.

From a forward to its input part stage k of S holds at most min(S - k, M) microbatches,
as 1F1B does, and k more until their weight part: none holds more than 1F1B's first.
Nobody waits for the first stage's cotangents, so its backwards stay whole.
"""

from collections.abc import Sequence

from hexijax.program.schedules.one_f_one_b import one_f_one_b
from hexijax.program.schedules.turn import Stream, Turn, Way


def zero_bubble(
    device_sets: Sequence[int], num_microbatches: int
) -> tuple[Stream, ...]:
    """One stream a stage; stages that share devices meet on the clock."""
    streams = one_f_one_b(device_sets, num_microbatches)
    return (streams[0], *(_split(stream) for stream in streams[1:]))


def _split(stream: Stream) -> Stream:
    """A weight part of ``stage`` microbatches before behind each input part."""
    turns: list[Turn] = []
    waiting: list[Turn] = []
    for turn in stream:
        if turn.way is Way.FORWARD:
            turns.append(turn)
            continue
        turns.append(Turn(Way.INPUT, turn.stage, turn.microbatch))
        waiting.append(Turn(Way.WEIGHT, turn.stage, turn.microbatch))
        if len(waiting) > turn.stage:
            turns.append(waiting.pop(0))
    return (*turns, *waiting)
