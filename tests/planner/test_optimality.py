"""The plan is the best there is, where all plans can be tried.

Up to four devices and eight layers against full enumeration; above that against dynamic
programs, on clusters where those are exact.
"""

import itertools
import math
from collections.abc import Callable, Iterable

import pytest

from hexijax.layers.chain import Remat
from hexijax.planner import InfeasiblePlanError, PlanOptions, make_plan
from hexijax.simulator import predict
from tests.planner import enumeration
from tests.planner.enumeration import enumerate_plans
from tests.planner.small_cases import Case, small_case

OPTIONS = PlanOptions(remat=(Remat.NONE,), layers_per_segment=8, offload=False)
"""The enumeration's space: one remat policy, one segment a stage."""

WITHIN = 1.02
EQUAL = 1 + 1e-9


def planned_s(case: Case) -> float:
    """The simulated step of the planner's plan; infinite if it found none."""
    try:
        plan = make_plan(
            case.chain, case.cluster, batch_size=case.batch_size, options=OPTIONS
        )
    except InfeasiblePlanError:
        return math.inf
    return predict(plan, case.chain, case.cluster).step_s


def ratio(case: Case) -> float | None:
    """The planner's step over the best; None where no plan fits."""
    ours_s = planned_s(case)
    best = enumerate_plans(case.chain, case.cluster, case.batch_size, below_s=ours_s)
    return None if best.step_s == math.inf else ours_s / best.step_s


def check(
    cases: Iterable[Case], count: int, record_property: Callable[[str, object], None]
) -> None:
    """Holds the first ``count`` cases that can be planned to the law."""
    ratios: dict[str, float] = {}
    for case in cases:
        if (found := ratio(case)) is not None:
            ratios[str(case)] = found
        if len(ratios) == count:
            break
    equal = sum(r <= EQUAL for r in ratios.values())
    worst = max(ratios, key=lambda name: ratios[name])
    record_property(
        "planner against full enumeration",
        f"{len(ratios)} cases, equal in {equal}, worst {ratios[worst]:.4f} ({worst})",
    )
    late = [f"{r:.4f} {name}" for name, r in ratios.items() if r > WITHIN]
    assert not late, "\n".join(late)
    assert equal >= 0.95 * len(ratios)


@pytest.mark.parametrize("seed", [0, 4, 6, 7, 13, 15])
def test_no_plan_of_a_small_cluster_is_faster(seed: int):
    found = ratio(small_case(seed))
    assert found is not None
    assert found <= WITHIN


@pytest.mark.laws
def test_no_plan_is_faster(record_property: Callable[[str, object], None]):
    check(map(small_case, itertools.count()), 240, record_property)


@pytest.mark.laws
def test_no_plan_of_four_devices_and_eight_layers_is_faster(
    record_property: Callable[[str, object], None],
):
    cases = (small_case(seed, full=True) for seed in itertools.count(1000))
    check(cases, 60, record_property)


class NoBounds(enumeration.Bounds):
    """Nothing is left out."""

    def ideal_s(self, *_: object) -> float:
        return 0.0

    def step_s(self, *_: object) -> float:
        return 0.0

    def may_fit(self, *_: object) -> bool:
        return True


@pytest.mark.parametrize("seed", range(3))
def test_bounds_leave_no_better_plan_out(seed: int, monkeypatch: pytest.MonkeyPatch):
    case = next(
        case
        for case in map(small_case, itertools.count(100 * seed))
        if len(case.cluster.devices) == 2 and len(case.chain.layers) <= 4
    )
    made = enumerate_plans(case.chain, case.cluster, 3)
    monkeypatch.setattr(enumeration, "Bounds", NoBounds)
    every = enumerate_plans(case.chain, case.cluster, 3)
    assert every.simulated > 2 * made.simulated
    assert every.step_s == made.step_s
