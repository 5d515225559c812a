"""Which last segments run forward and backward as one program.

A last segment's backward needs nothing but its own forward. Where it is the next thing
its stage does anyway (1F1B, or one microbatch), both are compiled as one: no residual
is written to memory, and XLA sees the step as the plain program would. Of a split
backward it is the input part. The order of instructions stays the Program's; the work
is done where the Forward stands.
"""

from collections.abc import Mapping

from hexijax.plan.plan import Place
from hexijax.program.program import Backward, Forward, Kind, Part, Program

Key = tuple[Place, int]

Pairs = Mapping[tuple[Place, int, tuple[int, int]], Backward]
"""By place, segment and microbatches."""


def fused_segments(program: Program) -> set[Key]:
    """Segments whose every Forward is followed, at its place, by its own Backward."""
    work: dict[Place, list[Forward | Backward]] = {}
    for instruction in program.body:
        if isinstance(instruction, Forward | Backward):
            work.setdefault(instruction.place, []).append(instruction)
    fused: set[Key] = set()
    for place, stream in work.items():
        last = {i.segment for i in stream if _ends_in_loss(i)}
        pairs = [
            _is_pair(first, second)
            for first, second in zip(stream, [*stream[1:], None], strict=True)
            if _ends_in_loss(first)
        ]
        if last and all(pairs):
            fused |= {(place, segment) for segment in last}
    return fused


def fused_pairs(program: Program) -> Pairs:
    """The Backwards that their Forwards do."""
    fused = fused_segments(program)
    return {
        (i.place, i.segment, i.microbatches): i
        for i in program.body
        if isinstance(i, Backward)
        and i.part is not Part.WEIGHT
        and (i.place, i.segment) in fused
    }


def _ends_in_loss(instruction: Forward | Backward) -> bool:
    return (
        isinstance(instruction, Forward)
        and instruction.grad
        and any(b.kind is Kind.SCALAR for b in instruction.writes)
    )


def _is_pair(first: Forward | Backward, second: Forward | Backward | None) -> bool:
    return (
        isinstance(second, Backward)
        and second.part is not Part.WEIGHT
        and second.segment == first.segment
        and second.microbatches == first.microbatches
    )
