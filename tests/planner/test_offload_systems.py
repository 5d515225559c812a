"""Plans of systems that offload: they fit, read back, and rest what papers say."""

import pytest

from hexijax.layers.known import gpt
from hexijax.plan import text
from hexijax.plan.checks import check
from hexijax.plan.plan import Memory, Plan, UpdateOrder
from hexijax.planner import PlanOptions
from hexijax.planner.baselines.offload import (
    LADDERS,
    offload_baselines,
    offload_plans,
    rests_on_host,
)
from hexijax.planner.judge import Judge
from tests.planner.offload_boxes import MIB, machine

DEEP = gpt(depth=5, width=1024, num_heads=16, length=64, vocab_size=1024)
ROOMY, TIGHT = 60_000, 1000
SYSTEMS = ("zero-offload-like", "patrickstar-like", "stronghold-like")


def streamed(plan: Plan) -> list[bool]:
    (stage,) = plan.replicas[0].stages
    return [stage.streams(g) for g in range(len(stage.segments))]


def hosted(plan: Plan) -> int:
    """Layers whose state the host holds and updates."""
    shares = [share for share in plan.state if share.memory is Memory.HOST]
    assert all(share.update is Memory.HOST for share in shares)
    return sum(len(share.groups) for share in shares)


@pytest.mark.parametrize(("cards", "usable_mib"), [(1, TIGHT), (2, 750)])
def test_plans_of_systems_run_as_they_say(cards: int, usable_mib: int):
    cluster = machine(*(usable_mib,) * cards)
    judge = Judge(DEEP, cluster, PlanOptions())
    plans = offload_plans(DEEP, cluster, batch_size=4)
    assert plans.pop("all-on-device") is None
    for name, plan in plans.items():
        assert plan is not None, name
        check(plan, DEEP, cluster)
        assert judge.fits(plan)
        assert plan.prediction
        assert plan.prediction.step_s == judge.step_s(plan)
        assert text.parse(text.render(plan)) == plan
        assert plan.order is UpdateOrder.FIFO
        assert rests_on_host(plan)
        assert len(plan.replicas[0].stages[0].devices) == cards
    zero, patrick, strong = (plans[name] for name in SYSTEMS)
    assert zero
    assert patrick
    assert strong
    groups = len(DEEP.groups)
    assert (hosted(zero), streamed(zero).count(True)) == (groups, 0)
    assert hosted(patrick) < groups or any(streamed(patrick))
    window = streamed(strong)
    assert window == sorted(window), "the first layers stay"
    assert hosted(strong) <= window.count(True) + 1


def test_with_room_nothing_leaves_the_device():
    plans = offload_plans(DEEP, machine(ROOMY), batch_size=4)
    for name in ("patrickstar-like", "stronghold-like", "all-on-device"):
        plan = plans[name]
        assert plan is not None, name
        assert not rests_on_host(plan)


def test_a_ladder_frees_no_memory_on_its_way_up():
    cluster = machine(TIGHT)
    judge = Judge(DEEP, cluster, PlanOptions())
    plan = offload_plans(DEEP, cluster, batch_size=4)["stronghold-like"]
    assert plan
    assert judge.memory_bytes(plan)["box/0"] > 0.7 * TIGHT * MIB


def test_every_system_has_a_name():
    assert [*offload_baselines()] == [*LADDERS] == [*SYSTEMS, "all-on-device"]
