"""What an explanation says of layered accumulation, freed parameters and waiting."""

import dataclasses

from hexijax.costs.hosts import full_host
from hexijax.costs.parts import MemoryParts
from hexijax.plan.plan import Memory, Params, Plan, Replica, Schedule, Stage
from hexijax.report.judged import judge
from hexijax.report.passes import passing
from hexijax.report.problem import Problem
from tests.plan.examples import make_chain, make_cluster

CHAIN = make_chain(4, width=512, rows=512)
CLUSTER = make_cluster([[("fast", 1)], [("fast", 1)]])
PROBLEM = Problem(name="toy", chain=CHAIN, cluster=CLUSTER, batch_size=16)
NUM_LAYERS = len(CHAIN.layers)


def plan(params: tuple[Params, ...] = (), waits: tuple[Memory, ...] = ()) -> Plan:
    """Two replicas of one stage with four microbatches each."""
    stage = Stage(
        devices=("n0/0",),
        layers=(0, NUM_LAYERS),
        segments=(1,) * NUM_LAYERS,
        params=params,
        waits=waits,
    )
    replicas = tuple(
        Replica(
            stages=(dataclasses.replace(stage, devices=(f"n{r}/0",)),),
            microbatches=4,
            microbatch_size=2,
            samples=8,
        )
        for r in range(2)
    )
    return Plan(replicas=replicas, batch_size=16, schedule=Schedule.LAYERED)


def test_a_layered_plan_says_what_it_holds():
    (line,) = passing(judge("plan", plan(), PROBLEM))
    assert line == (
        "accumulation is layered: a segment runs all its microbatches (4) before the "
        "next, and its gradient leaves while that computes; gradients of two "
        "segments, 2 MiB, are held"
    )


def test_freed_parameters_are_told_with_what_they_save_and_cost():
    first = (Params.KEPT, *(Params.FREED,) * (NUM_LAYERS - 1))
    _, line = passing(judge("plan", plan(params=first), PROBLEM))
    assert line.startswith(
        "gathered for each pass, and freed after it: blocks/0 ... head (5 layers); "
        "that saves 3 MiB on n0/0 and costs "
    )
    assert line.endswith("% of the step")


def test_what_waits_is_told_by_node_beside_what_the_node_has():
    judged = judge("plan", plan(waits=(Memory.HOST,) * NUM_LAYERS), PROBLEM)
    *_, line = passing(judged)
    waiting = judged.memory["n0/0"].host_bytes
    has = CLUSTER.node("n0").host_memory_bytes / 2**30
    assert line == (
        f"in host memory: {waiting / 2**20:.3g} MiB of {has:.2f} GiB on n0,n1: "
        "borders of embed ... head (6 layers)"
    )


def test_a_host_with_too_little_memory_is_named_with_both_numbers():
    poor = tuple(
        dataclasses.replace(node, host_memory_bytes=2**24) for node in CLUSTER.nodes
    )
    cluster = dataclasses.replace(CLUSTER, nodes=poor)
    memory = {name: MemoryParts(host_bytes=2**25) for name in ("n0/0", "n1/0")}
    assert full_host(memory, cluster) == (
        "The plan has 33,554,432 bytes wait or rest in host memory on n0, which has "
        "16,777,216. Let less of it leave the device, or give its devices fewer "
        "samples."
    )
    assert not full_host(memory, CLUSTER)
    judged = judge("plan", plan(), PROBLEM)
    assert judged.fits
    problem = dataclasses.replace(PROBLEM, cluster=cluster)
    assert not dataclasses.replace(judged, memory=memory, problem=problem).fits
