"""Small problems and judged plans of them."""

import dataclasses
from collections.abc import Sequence

from hexijax.cli.choosing import search
from hexijax.plan.training import Training
from hexijax.report.judged import Judged
from hexijax.report.problem import Problem
from tests.plan.examples import make_chain, make_cluster, make_kind

KINDS = (make_kind("fast"), make_kind("slow", tflops=2.5))


def make_problem(
    nodes: Sequence[Sequence[tuple[str, int]]] = ((("fast", 2),), (("slow", 2),)),
    *,
    batch_size: int = 32,
    gb_per_s: float = 10.0,
    block_flops: float = 1e10,
) -> Problem:
    """A toy model on a toy cluster; samples of 16 tokens."""
    chain = make_chain(10, width=256, rows=512, block_flops=block_flops)
    names = {kind for node in nodes for kind, _ in node}
    return Problem(
        name="toy",
        chain=dataclasses.replace(chain, tokens_per_sample=16),
        cluster=make_cluster(
            nodes, [kind for kind in KINDS if kind.kind in names], gb_per_s=gb_per_s
        ),
        batch_size=batch_size,
        training=Training(),
    )


def make_judged(problem: Problem | None = None) -> Judged:
    """What the search finds."""
    return search(problem or make_problem(), "hexijax").best
