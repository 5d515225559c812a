"""Plans by price and by energy are the cheapest there are, where all can be tried."""

import dataclasses
import itertools
import math
import random
from collections.abc import Mapping

import pytest

from hexijax.cluster import Cluster
from hexijax.plan import Plan, PlanError
from hexijax.plan.plan import Replica
from hexijax.planner import InfeasiblePlanError, Objective, PlanOptions, make_plan
from hexijax.planner.bound import least_cost
from hexijax.planner.objective import Goal
from hexijax.planner.search import search
from hexijax.simulator import Timeline, predict
from tests.planner import enumeration
from tests.planner.enumeration import enumerate_plans
from tests.planner.small_cases import Case, small_case
from tests.planner.test_optimality import EQUAL, OPTIONS, WITHIN, NoBounds
from tests.report.problems import make_problem


def prices(case: Case) -> dict[str, float]:
    """Of each kind: faster cards cost more, but seldom in step with their speed."""
    rng = random.Random(case.seed)
    return {
        profile.kind: (profile.dense_flops_per_s["float32"] / 1e13)
        ** rng.uniform(0.4, 1.6)
        for profile in case.cluster.profiles
    }


def powered(case: Case) -> Case:
    """The case with board power; some cards wait for little, some for much."""
    rng = random.Random(case.seed)
    profiles = [
        dataclasses.replace(p, tdp_w=rng.uniform(100, 700), idle_w=rng.choice([20, 90]))
        for p in case.cluster.profiles
    ]
    cluster = dataclasses.replace(case.cluster, profiles=tuple(profiles))
    return dataclasses.replace(case, cluster=cluster)


def busy_s(timeline: Timeline) -> dict[str, float]:
    return {d: sum(parts.values()) for d, parts in timeline.busy_s.items()}


def usd(plan: Plan, case: Case, usd_per_hour: Mapping[str, float]) -> float:
    """Dollars of a step, from the definition."""
    step_s = predict(plan, case.chain, case.cluster).step_s
    used = {name for _, stage in plan.stages() for name in stage.devices}
    kinds = [case.cluster.device(name).kind for name in used]
    return step_s * sum(usd_per_hour[kind] for kind in kinds) / 3600


def planned(case: Case, options: PlanOptions) -> Plan | None:
    try:
        return make_plan(
            case.chain, case.cluster, batch_size=case.batch_size, options=options
        )
    except InfeasiblePlanError:
        return None


def cheapest_usd(case: Case, usd_per_hour: Mapping[str, float], below: float) -> float:
    """The least of the fastest plans on every set of devices."""
    names = [device.name for device in case.cluster.devices]
    least = below
    for count in range(1, len(names) + 1):
        for used in itertools.combinations(names, count):
            part = only(case.cluster, used)
            rate = sum(usd_per_hour[device.kind] for device in part.devices) / 3600
            best = enumerate_plans(
                case.chain, part, case.batch_size, below_s=least / rate
            )
            if best.plan:
                least = min(least, usd(best.plan, case, usd_per_hour))
    return least


def only(cluster: Cluster, used: tuple[str, ...]) -> Cluster:
    others = [device.name for device in cluster.devices if device.name not in used]
    return cluster.without(*others) if others else cluster


def price_ratio(case: Case) -> float | None:
    """The planner's dollars over the least; None where no plan fits."""
    its = prices(case)
    options = dataclasses.replace(OPTIONS, objective=Objective.PRICE, usd_per_hour=its)
    plan = planned(case, options)
    ours = usd(plan, case, its) if plan else math.inf
    least = cheapest_usd(case, its, ours)
    return None if least == math.inf else ours / least


@pytest.mark.parametrize("seed", [0, 4, 6, 13])
def test_no_plan_of_a_small_cluster_is_cheaper(seed: int):
    found = price_ratio(small_case(seed))
    assert found is not None
    assert found <= WITHIN


@pytest.mark.laws
def test_no_plan_is_cheaper(record_property):
    ratios: dict[int, float] = {}
    for seed in range(120):
        if (found := price_ratio(small_case(seed))) is not None:
            ratios[seed] = found
    equal = sum(ratio <= EQUAL for ratio in ratios.values())
    record_property(
        "price against full enumeration",
        f"{len(ratios)} cases, equal in {equal}, worst {max(ratios.values()):.4f}",
    )
    assert {s: r for s, r in ratios.items() if r > WITHIN} == {}
    assert equal >= 0.95 * len(ratios)


class Thriftiest(enumeration._Search):
    """Keeps the plan of least energy; ``Found.step_s`` are joules."""

    def _step_s(self, replicas: list[Replica], bound_s: float) -> float:
        del bound_s
        plan = Plan(replicas=tuple(replicas), batch_size=self._batch_size)
        goal = Goal(self._cluster, Objective.ENERGY)
        timeline = predict(plan, self._chain, self._cluster)
        joules = goal.joules(timeline.step_s, busy_s(timeline))
        assert joules is not None
        if joules < self.found.step_s:
            self.found.step_s, self.found.plan = joules, plan
        return joules


@pytest.mark.parametrize("seed", range(3))
def test_no_plan_of_two_devices_takes_less_energy(
    seed: int, monkeypatch: pytest.MonkeyPatch
):
    case = next(
        case
        for case in map(small_case, itertools.count(100 * seed))
        if len(case.cluster.devices) == 2
        and len(case.chain.layers) <= 4
        and all(p.nominal_memory_bytes >= 64 * 2**30 for p in case.cluster.profiles)
    )
    case = dataclasses.replace(powered(case), batch_size=4)
    options = dataclasses.replace(OPTIONS, objective=Objective.ENERGY)
    plan = planned(case, options)
    assert plan
    timeline = predict(plan, case.chain, case.cluster)
    ours = Goal(case.cluster, Objective.ENERGY).joules(
        timeline.step_s, busy_s(timeline)
    )
    assert ours is not None
    monkeypatch.setattr(enumeration, "Bounds", NoBounds)
    monkeypatch.setattr(enumeration, "_Search", Thriftiest)
    least = enumerate_plans(case.chain, case.cluster, case.batch_size)
    assert least.plan
    assert ours <= least.step_s * WITHIN


@pytest.mark.parametrize("objective", [Objective.PRICE, Objective.ENERGY])
@pytest.mark.parametrize("seed", [0, 6, 7])
def test_no_plan_is_below_the_bound(seed: int, objective: Objective):
    case = powered(small_case(seed))
    options = dataclasses.replace(
        OPTIONS, objective=objective, usd_per_hour=prices(case)
    )
    found = search(
        case.chain, case.cluster, batch_size=case.batch_size, options=options
    )
    goal = Goal(case.cluster, objective, options.usd_per_hour)
    bound = least_cost(
        case.chain,
        case.cluster,
        goal,
        batch_size=case.batch_size,
        dtype="float32",
    )
    assert bound <= found.costs[0] * (1 + 1e-9)
    assert list(found.costs) == sorted(found.costs)
    assert found.plan.objective == objective.value


LARGE = [[("fast", 2)], [("slow", 2)], [("slow", 2)]]


def on_large(usd_per_hour: Mapping[str, float], objective: Objective) -> Plan:
    problem = make_problem(LARGE)
    return make_plan(
        problem.chain,
        problem.cluster,
        batch_size=problem.batch_size,
        options=PlanOptions(objective=objective, usd_per_hour=usd_per_hour),
    )


@pytest.mark.parametrize(
    ("usd_per_hour", "uses"),
    [({"fast": 30.0, "slow": 1.0}, {"slow"}), ({"fast": 2.0, "slow": 1.0}, {"fast"})],
)
def test_what_is_dear_for_its_speed_is_left_out(usd_per_hour, uses):
    """A fast card has four times the speed of a slow one."""
    plan = on_large(usd_per_hour, Objective.PRICE)
    cluster = make_problem(LARGE).cluster
    used = {d for _, stage in plan.stages() for d in stage.devices}
    assert {cluster.device(name).kind for name in used} == uses


def test_of_free_plans_the_fastest_counts():
    free = on_large({"fast": 0.0, "slow": 0.0}, Objective.PRICE)
    fastest = on_large({}, Objective.STEP)
    assert free.prediction
    assert fastest.prediction
    assert free.prediction.step_s == pytest.approx(fastest.prediction.step_s, rel=0.02)


@pytest.mark.parametrize(
    ("objective", "says"),
    [
        (
            Objective.PRICE,
            "nothing says what an hour of these kinds costs: fast, slow. Give --price "
            "FILE, which has a table [usd_per_hour] and in it a line `fast = 1.0`, or "
            "the cluster file a line `price_usd_per_hour = 1.0` in its table "
            "[kinds.fast]; a card of your own may cost 0.",
        ),
        (
            Objective.ENERGY,
            "nothing says what the boards of these kinds draw: fast, slow. Give the "
            "cluster file a line `tdp_w = 300`, in watts, in its table [kinds.fast].",
        ),
    ],
)
def test_kinds_without_figures_are_named(objective: Objective, says: str):
    with pytest.raises(PlanError) as caught:
        on_large({}, objective)
    assert says in str(caught.value)


@pytest.mark.parametrize("seed", [0, 6])
def test_by_step_time_the_cost_is_the_step_to_the_last_bit(seed: int):
    """Whatever a card costs or draws."""
    case = small_case(seed)
    plain = search(case.chain, case.cluster, batch_size=case.batch_size)
    priced = search(
        case.chain,
        case.cluster,
        batch_size=case.batch_size,
        options=PlanOptions(usd_per_hour=prices(case)),
    )
    plans = (plain.plan, *plain.runners_up)
    assert (priced.plan, *priced.runners_up) == plans
    assert plain.costs == tuple(p.prediction.step_s for p in plans if p.prediction)


def test_energy_counts_waiting_at_a_share_of_board_power():
    case = small_case(0)
    profiles = tuple(dataclasses.replace(p, tdp_w=300.0) for p in case.cluster.profiles)
    cluster = dataclasses.replace(case.cluster, profiles=profiles)
    goal = Goal(cluster, Objective.ENERGY)
    name = cluster.devices[0].name
    assert goal.joules(10.0, {name: 4.0}) == pytest.approx(4 * 300 + 6 * 60)
    kept = tuple(dataclasses.replace(p, idle_w=30.0) for p in profiles)
    goal = Goal(dataclasses.replace(cluster, profiles=kept), Objective.ENERGY)
    assert goal.joules(10.0, {name: 4.0}) == pytest.approx(4 * 300 + 6 * 30)
    assert goal.usd(10.0, {name: 4.0}) is None
