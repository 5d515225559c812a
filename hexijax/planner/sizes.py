"""Which microbatch sizes are worth trying."""

from hexijax.planner.options import PlanOptions

EVERY = 8
"""Every size up to here; then four to a doubling."""


def lane_sizes(most: int, options: PlanOptions, *, coarse: bool) -> list[int]:
    """Samples of one lane's microbatch, ascending, up to the batch and the cap.

    Args:
      most: of the batch.
      options: with the cap.
      coarse: powers of two only, and the most; sizes between are left to refinement.
    """
    most = min(most, options.max_microbatch_size or most)
    size = 1
    found: list[int] = []
    while size < most:
        found.append(size)
        if coarse:
            size *= 2
        else:
            size += max(1, 2 ** (size.bit_length() - 3)) if size >= EVERY else 1
    return [*found, most]
