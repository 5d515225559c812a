"""Chooses few cheap cases whose factors cover every pair.

python -m tests.laws.cover    # prints the seeds for test_exactness
"""

import itertools
from collections.abc import Iterable
from typing import Any

from tests.laws.cases import FACTORS, Case, draw

VALUES: dict[str, tuple[Any, ...]] = {
    "cut": ("alike", "unlike"),
    "api": ("nnx", "linen"),
    "schedule": ("1f1b", "gpipe", "interleaved", "zero-bubble", "eager-1f1b"),
}
Pair = tuple[tuple[str, Any], tuple[str, Any]]


def all_pairs() -> set[Pair]:
    """Every pair of values of two factors."""
    settings = [(f, v) for f in FACTORS for v in VALUES.get(f, (False, True))]
    return {p for p in itertools.combinations(settings, 2) if p[0][0] != p[1][0]}


def pairs(case: Case) -> set[Pair]:
    """The pairs a case is an example of."""
    return set(itertools.combinations([(f, case.factors[f]) for f in FACTORS], 2))


def covered(cases: Iterable[Case]) -> set[Pair]:
    """The pairs that some case is an example of."""
    return set().union(*map(pairs, cases))


def choose(seeds: Iterable[int]) -> list[int]:
    """Greedily: most new pairs for the time a case takes, and rather few cases."""
    cases = [draw(seed) for seed in seeds]
    left, chosen = all_pairs(), []
    while left:
        best = max(cases, key=lambda c: len(pairs(c) & left) ** 2 / (6 + c.cost))
        assert pairs(best) & left, left
        left -= pairs(best)
        chosen.append(best.seed)
    return chosen


if __name__ == "__main__":
    seeds = choose(range(9000))
    print(seeds, sum(draw(s).cost for s in seeds), "segments")
