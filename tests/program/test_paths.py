"""What goes by a collective and what by pieces: chosen when a Program is made."""

import dataclasses
import math
from collections.abc import Sequence

import pytest

from hexijax.cluster import Cluster
from hexijax.costs import PlanCosts
from hexijax.costs.collectives import Collective
from hexijax.layers.chain import Chain
from hexijax.plan.plan import Place, Plan, Reductions, StateShare
from hexijax.program.check import check
from hexijax.program.lower import StepRules, lower
from hexijax.program.parse import parse
from hexijax.program.program import PIECES, Gather, Program, ProgramError, Reduce
from hexijax.program.text import render
from hexijax.simulator import simulate
from tests.program.examples import make_chain, make_plan, make_stages
from tests.simulator.test_simulator import cluster

H100S = Cluster.from_toml("experiments/clusters/h100_x4.toml")
FAST = {"reductions": Reductions.FAST}
HALF_A_GIB = make_chain(1, sizes=[2**22])
"""In bfloat16."""


def replicas(
    *shares: float, node: str = "h100", freed: bool = False, **fields: object
) -> Plan:
    """One card each; ``shares`` of the state."""
    (stage,) = make_stages([1], freed=freed)
    stages = [
        dataclasses.replace(stage, devices=(f"{node}/{i}",), dtype="bfloat16")
        for i in range(len(shares))
    ]
    given = {Place(f"r{i}.s0"): share for i, share in enumerate(shares)}
    state = (StateShare(groups=("*",), shares=given),)
    return make_plan(*(((one,), 2) for one in stages), state=state, **fields)


def lowered(
    plan: Plan,
    chain: Chain = HALF_A_GIB,
    machines: Cluster = H100S,
    *,
    clip: bool = False,
) -> Program:
    """Under the costs of the plan."""
    costs = PlanCosts(plan, chain, machines)
    return lower(plan, chain, rules=StepRules(clip=clip), costs=costs)


def made(program: Program, kind: type[Gather | Reduce]) -> Sequence[Gather | Reduce]:
    """Of a body."""
    return [i for i in program.body if isinstance(i, kind)]


def collective(plan: Plan, chain: Chain = HALF_A_GIB) -> Collective:
    """Of the first bucket."""
    found = PlanCosts(plan, chain, H100S).collective("l0")
    assert found
    return found


def test_four_cards_take_what_was_measured_on_four_cards():
    plan = replicas(1, 1, 1, 1)
    quarter = HALF_A_GIB.num_params // 4
    assert collective(plan).ring(quarter, 2).seconds == pytest.approx(1.9e-3, rel=0.1)
    (gather,) = made(lowered(plan), Gather)
    assert gather.path == pytest.approx(quarter, rel=1e-3)
    assert gather.places == tuple(f"r{i}.s0" for i in range(4))


def test_equal_parts_go_together_and_what_one_has_beyond_them_by_pieces():
    num_params = HALF_A_GIB.num_params
    found = collective(replicas(1, 1, 1, 3))
    assert found.gather_path(alone=True) == pytest.approx(
        num_params / 2, rel=1e-3
    )  # padded
    # In fp32 so much padding is more than was promised.
    assert found.reduce_path() == pytest.approx(num_params / 6, rel=1e-3)
    for shares in ((1, 1, 1, 1.2), (1, 2, 3, 10), (0, 1, 1, 1)):
        found = collective(replicas(*shares))
        paths = {found.reduce_path(), found.gather_path(alone=True)}
        held = [num_params * share / sum(shares) for share in shares]
        for path in paths - {PIECES}:
            assert any(path == pytest.approx(x, rel=1e-3) for x in held)


def test_what_has_compute_behind_it_goes_by_pieces():
    chain = make_chain(2, sizes=[2**18, 2**18])
    stage = dataclasses.replace(
        make_stages([2], segments=[[1, 1]])[0], dtype="bfloat16"
    )
    each = [dataclasses.replace(stage, devices=(f"h100/{i}",)) for i in range(4)]
    plan = make_plan(*(((one,), 1) for one in each), **FAST)
    paths = {i.group: i.path for i in made(lowered(plan, chain), Reduce)}
    assert paths["l1"] == PIECES  # the first layer's backward is still to come
    assert paths["l0"] > 0
    gathers = {i.group: i.path for i in made(lowered(plan, chain), Gather)}
    assert gathers["l1"] == PIECES
    assert gathers["l0"] > 0


def test_exact_sums_freed_parameters_unlike_kinds_and_clients_go_by_pieces():
    (reduce,) = made(lowered(replicas(1, 1, 1, 1)), Reduce)
    assert reduce.path == PIECES
    (reduce,) = made(lowered(replicas(1, 1, 1, 1, **FAST)), Reduce)
    assert reduce.path > 0
    gathers = made(lowered(replicas(1, 1, 1, 1, freed=True)), Gather)
    assert {i.path for i in gathers} == {PIECES}
    program = lower(
        replicas(1, 1, 1, 1, **FAST), HALF_A_GIB, rules=StepRules(), costs=None
    )
    assert {i.path for i in (*made(program, Gather), *made(program, Reduce))} == {
        PIECES
    }
    apart = cluster(("a", 1), ("b", 1))
    stages = [make_stages([1], prefix=node) for node in "ab"]
    plan = make_plan(*((each, 1) for each in stages), **FAST)
    assert PlanCosts(plan, make_chain(1), apart).collective("l0") is None
    kinds = Cluster.from_toml("experiments/clusters/cephalo.toml")
    for nodes, joins in ((("l4/0", "l4/1"), True), (("mixed/0", "mixed/1"), False)):
        stages = [
            dataclasses.replace(make_stages([1])[0], devices=(name,)) for name in nodes
        ]
        plan = make_plan(*(((each,), 1) for each in stages))
        found = PlanCosts(plan, make_chain(1), kinds).collective("l0")
        assert (found is not None) is joins


def test_a_home_that_computes_with_nothing_sends_all_by_pieces():
    plan = replicas(1, 1, 1)
    store = StateShare(
        groups=("*",), shares={**plan.state[0].shares, Place("h100/3"): 1.0}
    )
    plan = dataclasses.replace(plan, state=(store,), **FAST)
    costs = PlanCosts(plan, HALF_A_GIB, H100S)
    exchange = costs.exchange("l0")
    quarter = HALF_A_GIB.num_params // 4
    assert exchange.rest(Place("h100/3"), quarter) == exchange.held[Place("h100/3")]
    assert exchange.rest(Place("r0.s0"), 2 * quarter) == 0


def test_padding_ends_where_its_memory_was_not_promised():
    plan = replicas(0, 0, 0, 1)
    assert collective(plan).gather_path(alone=True) == PIECES
    assert collective(plan).reduce_path() == PIECES


@pytest.mark.parametrize("shares", [(1, 1), (1, 1, 1, 1), (1, 1, 1, 1.2), (2, 1, 0)])
def test_the_simulator_plays_the_path_in_the_program(shares: tuple[float, ...]):
    plan = replicas(*shares, **FAST)
    costs = PlanCosts(plan, HALF_A_GIB, H100S)
    program = lowered(plan)
    assert parse(render(program)) == program
    timeline = simulate(program, plan, HALF_A_GIB, H100S, costs=costs)
    for kind in (Gather, Reduce):
        for i in made(program, kind):
            events = [e for e in timeline.events if e.instruction is i]
            everywhere = [e for e in events if len(e.devices) == len(shares)]
            assert len(everywhere) == (i.path > 0)
            for event in everywhere:
                seconds = event.end_s - event.start_s
                assert seconds == pytest.approx(costs.ring(i).seconds)
    assert math.isfinite(timeline.step_s)


def test_the_checker_knows_what_a_collective_may_do():
    plan = replicas(1, 1, 1, 1, **FAST)
    program = lowered(plan)
    exact = dataclasses.replace(plan, reductions=Reductions.EXACT)
    with pytest.raises(ProgramError, match="The plan's reductions are exact"):
        check(program, exact, HALF_A_GIB)
    (gather,) = made(program, Gather)
    for changed, said in (
        (dataclasses.replace(gather, path=PIECES), "By pieces each user has a Gather"),
        (
            dataclasses.replace(gather, places=gather.places[:2]),
            "A collective runs over all users of group l0",
        ),
    ):
        body = tuple(changed if i is gather else i for i in program.body)
        with pytest.raises(ProgramError, match=said):
            check(dataclasses.replace(program, body=body), plan, HALF_A_GIB)
