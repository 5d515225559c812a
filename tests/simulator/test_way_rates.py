"""No way carries more than its rate allows, over any interval."""

import dataclasses
import itertools
import random

from hypothesis import given, settings
from hypothesis import strategies as st

from hexijax.cluster import Cluster, LinkProfile
from hexijax.simulator import predict
from tests.program.random_plans import random_plan
from tests.simulator.test_simulator import cluster


def random_links(rng: random.Random) -> Cluster:
    """Nodes with and without a card that all their devices share; unlike rates."""
    made = cluster(("a", 64), ("b", 64), ("c", 64), ("store", 1))

    def link() -> LinkProfile:
        return LinkProfile(
            latency_s=rng.choice([0.0, 1e-5]), bytes_per_s=rng.choice([1e7, 1e9])
        )

    nodes = tuple(
        dataclasses.replace(node, nic=rng.choice([None, link()])) for node in made.nodes
    )
    links = dataclasses.replace(made.links, in_node=link(), between_nodes=link())
    return dataclasses.replace(made, nodes=nodes, links=links)


def rate(machines: Cluster, way: str) -> float:
    """Bytes a second that a way is given."""
    links = machines.links
    assert links.in_node
    assert links.between_nodes
    if " host " in way:
        return machines.device(way.split(" ", 1)[0]).profile.host_link_bytes_per_s
    if "/" in way:
        return links.in_node.bytes_per_s
    owner, end = way.split(" ", 1)
    nic = machines.node(owner).nic
    if end in ("out", "in") and nic:
        return nic.bytes_per_s
    return links.between_nodes.bytes_per_s


@settings(max_examples=30)
@given(st.integers(0, 100_000))
def test_no_way_carries_more_than_its_rate_allows_over_any_interval(seed: int):
    plan, chain, rules = random_plan(seed, max_layers=10, max_microbatches=4)
    machines = random_links(random.Random(seed))
    timeline = predict(plan, chain, machines, rules=rules, folded=False)
    uses: dict[str, list[tuple[float, float, int]]] = {}
    for event in timeline.events:
        for queue, start_s, end_s, num_bytes in event.queues:
            for more_s in (0.0, timeline.step_s) if num_bytes else ():
                use = (start_s + more_s, end_s + more_s, num_bytes)
                uses.setdefault(queue, []).append(use)
    for way, found in uses.items():
        bytes_per_s, found = rate(machines, way), sorted(found)
        # The fullest interval runs from some start to some end.
        carried = [0, *itertools.accumulate(size for *_, size in found)]
        for first, (start_s, _, _) in enumerate(found):
            for last, (_, end_s, _) in enumerate(found[first:], first):
                moved = carried[last + 1] - carried[first]
                room = bytes_per_s * (end_s - start_s) * (1 + 1e-6)
                assert moved <= room + (last - first + 1), (way, start_s, end_s)
    total = {way: sum(size for *_, size in found) / 2 for way, found in uses.items()}
    assert total == {way: size for way, size in timeline.link_bytes.items() if size}
