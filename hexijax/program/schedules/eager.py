"""1F1B with twice the lead: what crosses a border does so behind another's compute.

Eager 1F1B of Zhuang et al., On Optimizing the Communication of Model Parallelism
(arXiv 2211.05322). In 1F1B a stage has one microbatch more in flight than the next, and
waits while that one is on its way there and back. Here it has two more: one at work,
one on the way. Of stages that take s seconds for both directions, borders of up to s/2
cost nothing in the steady state, where 1F1B shows each in its pace.

The price is memory: stage k of S holds up to min(2 (S - k) - 1, M) microbatches.
"""

from collections.abc import Sequence

from hexijax.program.schedules.one_f_one_b import one_f_one_b
from hexijax.program.schedules.turn import Stream


def eager(device_sets: Sequence[int], num_microbatches: int) -> tuple[Stream, ...]:
    """One stream a stage; stages that share devices meet on the clock."""
    return one_f_one_b(device_sets, num_microbatches, ahead=2)
