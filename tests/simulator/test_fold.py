"""What is played once stands for all of it."""

import dataclasses
import random

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexijax.cluster import Cluster
from hexijax.layers.chain import Chain
from hexijax.plan.plan import Plan, Schedule
from hexijax.simulator import Timeline, predict
from tests.program.examples import make_chain, make_plan, make_stages
from tests.program.random_plans import random_cut
from tests.simulator.test_simulator import cluster


def heavy(chain: Chain, rng: random.Random) -> Chain:
    """Layers of unlike work that a host easily keeps up with."""
    layers = []
    for layer in chain.layers:
        flops = rng.choice([1e11, 2e11, 3e11])
        layers.append(
            dataclasses.replace(
                layer,
                forward_flops=flops,
                backward_flops=2 * flops,
                border_bytes=layer.border_bytes * rng.choice([1, 10_000]),
            )
        )
    return dataclasses.replace(chain, layers=tuple(layers))


def repeating(seed: int) -> tuple[Plan, Chain, Cluster]:
    """Several classes of equal replicas, each replica on a node of its own."""
    rng = random.Random(seed)
    num_layers = rng.randint(2, 8)
    sizes = [rng.choice([64, 1024, 4096])] * num_layers
    chain = heavy(make_chain(num_layers, sizes=sizes), rng)
    schedule = rng.choice(list(Schedule))
    replicas, nodes = [], []
    for _ in range(rng.randint(1, 2)):
        num_stages = rng.randint(1, min(4, num_layers))
        splits = random_cut(rng, num_layers, num_stages)
        num_sets = None
        if schedule is Schedule.INTERLEAVED:
            num_sets = rng.choice([n for n in (1, 2, 3) if num_stages % n == 0])
        microbatches = rng.randint(1, 40)
        lanes = rng.choice([1, 2])
        for _ in range(rng.randint(1, 4)):
            nodes.append(f"n{len(nodes)}")
            stages = make_stages(
                splits, prefix=nodes[-1], lanes=lanes, num_sets=num_sets
            )
            replicas.append((stages, microbatches))
    plan = make_plan(*replicas, schedule=schedule)
    return plan, chain, cluster(*((node, 8) for node in nodes), gb_per_s=1)


def close(one: Timeline, other: Timeline, rel: float) -> None:
    """The same figures of the same devices and ways."""
    assert one.step_s == pytest.approx(other.step_s, rel=rel)
    assert set(one.busy_s) == set(other.busy_s)
    assert set(one.link_bytes) == set(other.link_bytes)
    for device in one.busy_s:
        busy, idle = one.busy_s[device], one.idle_s[device]
        total = sum(busy.values()) + sum(idle.values())
        assert total == pytest.approx(one.step_s, rel=1e-3)
        assert one.utilisation(device) == pytest.approx(
            other.utilisation(device), rel=0.05
        )
    assert sum(one.link_bytes.values()) == pytest.approx(
        sum(other.link_bytes.values()), rel=0.02
    )


@settings(max_examples=25)
@given(st.integers(0, 10_000))
def test_what_repeats_is_played_once_and_counts_in_full(seed: int):
    plan, chain, machines = repeating(seed)
    folded = predict(plan, chain, machines)
    full = predict(plan, chain, machines, folded=False)
    close(folded, full, rel=1e-3)


def test_a_thousand_replicas_cost_what_a_few_do():
    chain = heavy(make_chain(8, sizes=[2048] * 8), random.Random(0))
    counts = []
    for replicas in (2, 1000):
        nodes = [f"n{i}" for i in range(replicas)]
        plan = make_plan(*((make_stages([2] * 4, prefix=n), 64) for n in nodes))
        machines = cluster(*((n, 4) for n in nodes))
        timeline = predict(plan, chain, machines)
        assert len(timeline.busy_s) == 4 * replicas
        counts.append(len(timeline.events))
    assert counts[1] <= 3 * counts[0]


def test_an_odd_replica_is_played_itself():
    chain = heavy(make_chain(4), random.Random(0))
    plain = make_plan(*((make_stages([2, 2], prefix=n), 8) for n in "abc"))
    slower = dataclasses.replace(plain.replicas[2], microbatches=9, samples=9)
    odd = dataclasses.replace(
        plain, replicas=(*plain.replicas[:2], slower), batch_size=plain.batch_size + 1
    )
    machines = cluster(("a", 2), ("b", 2), ("c", 2))
    assert predict(odd, chain, machines).step_s > predict(plain, chain, machines).step_s
    close(
        predict(odd, chain, machines),
        predict(odd, chain, machines, folded=False),
        rel=1e-3,
    )
