"""Small plans and the Programs they become, as text to read.

Write the files again after a wanted change: python -m tests.program.golden
"""

import dataclasses
from pathlib import Path

from hexijax.layers.chain import Chain
from hexijax.plan.plan import Place, Plan, Schedule, Stage, StateShare
from hexijax.program.lower import StepRules, lower
from hexijax.program.text import by_stage, render
from tests.program.examples import make_chain, make_plan, make_stages

FROZEN = ("l0/kernel", "l0/bias", "l1/kernel", "l1/bias", "l2/kernel", "l3/kernel")
"""All of the first two layers; of the third and fourth all but a bias."""


def in_bfloat16(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """The same, computing in it."""
    return tuple(dataclasses.replace(stage, dtype="bfloat16") for stage in stages)


FOLDER = Path(__file__).parent / "golden"

CASES: dict[str, tuple[Plan, Chain, StepRules, bool]] = {
    "1f1b": (
        make_plan((make_stages([1, 1]), 3)),
        make_chain(2),
        StepRules(),
        False,
    ),
    "gpipe_with_segments": (
        make_plan(
            (make_stages([2, 2], segments=[[1, 1], [2]]), 2), schedule=Schedule.GPIPE
        ),
        make_chain(4),
        StepRules(),
        False,
    ),
    "interleaved": (
        make_plan(
            (make_stages([1, 1, 1, 1], num_sets=2), 2), schedule=Schedule.INTERLEAVED
        ),
        make_chain(4),
        StepRules(),
        False,
    ),
    "zero_bubble_with_segments": (
        make_plan(
            (make_stages([1, 2, 1], segments=[[1], [1, 1], [1]]), 3),
            schedule=Schedule.ZERO_BUBBLE,
        ),
        make_chain(4),
        StepRules(),
        False,
    ),
    "eager": (
        make_plan((make_stages([1, 1]), 4), schedule=Schedule.EAGER),
        make_chain(2),
        StepRules(),
        False,
    ),
    "layered_with_segments": (
        make_plan(
            (make_stages([2, 2], segments=[[1, 1], [1, 1]]), 2),
            schedule=Schedule.LAYERED,
        ),
        make_chain(4),
        StepRules(),
        False,
    ),
    "ministages": (
        make_plan(
            (make_stages([1, 1, 1, 1], num_sets=2), 3), schedule=Schedule.LAYERED
        ),
        make_chain(4),
        StepRules(),
        False,
    ),
    "layered_freed": (
        make_plan(
            (make_stages([3], segments=[[1, 1, 1]], freed=True), 2),
            schedule=Schedule.LAYERED,
            state=(
                StateShare(
                    groups=("*",),
                    shares={
                        Place("r0.s0"): 0.0,
                        Place("b/0"): 3.0,
                        Place("b/1"): 1.0,
                    },
                ),
            ),
        ),
        make_chain(3, sizes=[256, 256, 256]),
        StepRules(),
        False,
    ),
    "layered_waiting": (
        make_plan(
            (make_stages([3], segments=[[1, 1, 1]], waits=True), 4),
            schedule=Schedule.LAYERED,
        ),
        make_chain(3),
        StepRules(),
        False,
    ),
    "freed_in_a_pipeline": (
        make_plan((make_stages([2, 1], segments=[[1, 1], [1]], freed=True), 2)),
        make_chain(3, tied={"embed": [0, 2]}),
        StepRules(clip=True),
        False,
    ),
    "freed_evaluation": (
        make_plan((make_stages([2], segments=[[1, 1]], freed=True), 2)),
        make_chain(2),
        StepRules(),
        True,
    ),
    "tied_over_two_replicas_clipped": (
        make_plan((make_stages([2, 1]), 2), (make_stages([3], prefix="b"), 1)),
        make_chain(3, tied={"embed": [0, 2]}),
        StepRules(clip=True),
        False,
    ),
    "two_replicas_under_a_dynamic_scale": (
        make_plan((make_stages([1, 1]), 2), (make_stages([2], prefix="b"), 1)),
        make_chain(2),
        StepRules(dynamic_scale=True),
        False,
    ),
    "three_stages_beside_two": (
        make_plan(
            (make_stages([2, 1, 1]), 2), (make_stages([1, 3], prefix="b", tensor=2), 1)
        ),
        make_chain(4),
        StepRules(),
        False,
    ),
    "frozen_first_layers": (
        make_plan(
            (make_stages([2, 1, 1, 1], segments=[[2], [1], [1], [1]]), 5),
        ),
        make_chain(5, frozen=FROZEN),
        StepRules(clip=True),
        False,
    ),
    "frozen_zero_bubble_in_bfloat16": (
        make_plan(
            (in_bfloat16(make_stages([1, 1, 2], segments=[[1], [1], [1, 1]])), 2),
            (make_stages([4], prefix="b"), 1),
            schedule=Schedule.ZERO_BUBBLE,
        ),
        make_chain(4, frozen=["l1/kernel", "l1/bias", "l3/kernel"]),
        StepRules(),
        False,
    ),
    "state_elsewhere": (
        make_plan(
            (make_stages([2]), 1),
            state=(
                StateShare(
                    groups=("*",), shares={Place("a/0"): 1.0, Place("store/0"): 3.0}
                ),
            ),
        ),
        make_chain(2, sizes=[256, 256]),
        StepRules(),
        False,
    ),
    "evaluation": (
        make_plan((make_stages([1, 1]), 2)),
        make_chain(2),
        StepRules(),
        True,
    ),
}


def golden_text(name: str) -> str:
    """The picture by stages, and the Program."""
    plan, chain, rules, evaluation = CASES[name]
    program = lower(plan, chain, rules=rules, evaluation=evaluation)
    return f"{by_stage(program)}\n\n{render(program)}"


if __name__ == "__main__":
    FOLDER.mkdir(exist_ok=True)
    for case in CASES:
        (FOLDER / f"{case}.txt").write_text(golden_text(case))
