"""Random grouping: who works with whom is drawn, all else is as good as ours.

    seed -> layouts drawn -> layers, remat and batch by the planner -> steps that fit

What grouping by speed and bandwidth is worth: HexiScale draws groups for the same
comparison. Layers, remat, microbatches and the batch's division stay exact.
"""

import random
from collections.abc import Iterator

from experiments.golden.problem import DTYPE, Problem
from hexijax.planner.finished import BUDGET_SHARES
from hexijax.planner.judge import Judge
from hexijax.planner.mesh import Layout, MeshMaker
from hexijax.planner.score import Scorer

MOST_REPLICAS = 4
"""Of a drawn layout."""


def drawn_steps_s(problem: Problem, *, seed: int, draws: int) -> list[float]:
    """Seconds of the drawn layouts that fit, in the order drawn."""
    scorer = Scorer(problem.chain, problem.cluster, problem.batch_size, problem.options)
    judge = Judge(problem.chain, problem.cluster, problem.options)
    steps = (
        _step_s(layout, scorer, judge) for layout in _layouts(problem, seed, draws)
    )
    return [step for step in steps if step is not None]


def _layouts(problem: Problem, seed: int, draws: int) -> Iterator[Layout]:
    """All cards, each a stage, in an order and in replicas drawn."""
    rng = random.Random(seed)
    maker = MeshMaker(problem.cluster, DTYPE)
    names = [device.name for device in problem.cluster.devices]
    for _ in range(draws):
        rng.shuffle(names)
        replicas = rng.randint(1, MOST_REPLICAS)
        cuts = sorted(rng.sample(range(1, len(names)), replicas - 1))
        edges = zip([0, *cuts], [*cuts, len(names)], strict=True)
        yield tuple(
            tuple(maker.mesh((name,), 1) for name in names[start:stop])
            for start, stop in edges
        )


def _step_s(layout: Layout, scorer: Scorer, judge: Judge) -> float | None:
    for share in BUDGET_SHARES:
        scored = scorer.score(layout, share)
        if scored is None:
            return None
        plan = scorer.plan(scored)
        if judge.fits(plan):
            return judge.step_s(plan)
    return None
