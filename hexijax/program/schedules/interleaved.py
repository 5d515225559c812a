"""Several stages a device set, taken in turn: a smaller bubble for more sends.

Stage k runs on device set k mod S, as Megatron's virtual stages do. Microbatches pass
in groups: a group runs through a set's first stage, then its second, and so on.
Megatron asks for groups of exactly S; here any number divides into groups as even as
can be, none smaller than S, as a smaller one stalls or deadlocks. Fewer than S are one
group.
"""

from collections.abc import Sequence

from hexijax.program.schedules.one_f_one_b import one_f_one_b
from hexijax.program.schedules.turn import Stream, backwards, forwards, one_by_one


def interleaved(
    device_sets: Sequence[int], num_microbatches: int
) -> tuple[Stream, ...]:
    """One stream a device set; other layouts than k mod S run as 1F1B a stage."""
    num_sets = max(device_sets) + 1
    num_rounds, rest = divmod(len(device_sets), num_sets)
    if rest or list(device_sets) != [*range(num_sets)] * num_rounds:
        return one_f_one_b(device_sets, num_microbatches)
    groups = _groups(num_microbatches, num_sets)
    largest = max(len(group) for group in groups)
    streams = []
    for device_set in range(num_sets):
        stages = range(device_set, len(device_sets), num_sets)
        first = [t for g in groups for k in stages for t in forwards(k, g)]
        second = [t for g in groups for k in reversed(stages) for t in backwards(k, g)]
        lead = 2 * (num_sets - device_set - 1) + (num_rounds - 1) * largest
        streams.append(one_by_one(first, second, lead=min(lead, len(first))))
    return tuple(streams)


def _groups(num_microbatches: int, num_sets: int) -> list[range]:
    number = max(num_microbatches // num_sets, 1)
    starts = [i * num_microbatches // number for i in range(number + 1)]
    return [range(starts[i], starts[i + 1]) for i in range(number)]
