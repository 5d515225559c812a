"""The largest Llama that one card trains, by its memory and its host's.

Run:     python -m experiments.largest_table [--card h100-80g-sxm] [--caps 12 24 40 80]
         [--hosts 64 128 256 512]
Needs:   no device; some minutes
Expect:  docs/offload.md, "The largest model"; the figures are predictions

Blocks are those of the Llama of 5.1 B. Of a depth the plan that asks least of the card
is tried: all parameters and state in host memory and streamed, everything recomputed,
activations between blocks in host memory, one sequence a microbatch, gradients of two
passes.
"""

import argparse
import itertools
from collections.abc import Iterator

from hexijax.cluster import Cluster, DeviceGroup, Node, catalog
from hexijax.cluster.profile import usable_by_rule_bytes
from hexijax.layers.chain import Chain
from hexijax.layers.known import llama
from hexijax.plan.plan import (
    Memory,
    Plan,
    Replica,
    Schedule,
    Stage,
    UpdateOrder,
    stage_place,
)
from hexijax.planner.judge import Judge
from hexijax.planner.offload.choice import Kept, LayerChoice, State, Weights
from hexijax.planner.offload.emit import placed_plan
from hexijax.planner.options import PlanOptions

LENGTH, BATCH, MOST = 2048, 8, 512
"""Tokens of a sequence, sequences of a step, and blocks that are tried."""

LIGHTEST = LayerChoice(weights=Weights.STREAMED, state=State.STREAMED, kept=Kept.FULL)
"""What asks least of a card."""

GRADS = 2
"""Passes whose gradients have room."""


def chain(depth: int) -> Chain:
    """Blocks of width 4096."""
    return llama(
        depth=depth,
        width=4096,
        ff_width=11008,
        num_heads=32,
        length=LENGTH,
        vocab_size=32000,
    )


def machine(card: str, cap_gib: float, host_gib: float) -> Cluster:
    """One card, of which a part is used, and its host."""
    whole = catalog.get(card)
    num_bytes = int(cap_gib * 2**30)
    usable = min(
        usable_by_rule_bytes(num_bytes, whole.vendor), whole.usable_memory_bytes
    )
    return Cluster(
        name="largest",
        nodes=(
            Node(
                name="host",
                devices=(DeviceGroup(kind=card, count=1, usable_memory_bytes=usable),),
                host_memory_bytes=int(host_gib * 2**30),
                host_cores=16,
            ),
        ),
    )


def lightest(model: Chain, cluster: Cluster, order: UpdateOrder) -> Plan:
    """The plan that asks least of the card."""
    depth = len(model.layers)
    stage = Stage(
        devices=(cluster.devices[0].name,),
        layers=(0, depth),
        dtype="bfloat16",
        waits=(Memory.HOST,),
    )
    replica = Replica(
        stages=(stage,), microbatches=BATCH, microbatch_size=1, samples=BATCH
    )
    plan = Plan(replicas=(replica,), batch_size=BATCH, schedule=Schedule.LAYERED)
    choices = {stage_place(0, 0): (LIGHTEST,) * depth}
    return placed_plan(plan, model, choices, order=order, grads=GRADS)


def largest(cluster: Cluster) -> tuple[int, float, float]:
    """Depth, parameters, and tokens a second; zeros where no block fits."""

    def judged(depth: int) -> tuple[Judge, list[Plan]]:
        model = chain(depth)
        judge = Judge(model, cluster, PlanOptions())
        return judge, [lightest(model, cluster, order) for order in UpdateOrder]

    def fits(depth: int) -> bool:
        judge, plans = judged(depth)
        return all(map(judge.fits, plans))

    low, high = 0, MOST
    while low < high:
        middle = (low + high + 1) // 2
        low, high = (middle, high) if fits(middle) else (low, middle - 1)
    if not low:
        return 0, 0.0, 0.0
    judge, plans = judged(low)
    params = sum(group.size for group in judge.chain.groups)
    return low, params, BATCH * LENGTH / min(map(judge.step_s, plans))


def lines(card: str, caps: list[float], hosts: list[float]) -> Iterator[str]:
    """A table for people."""
    yield "| card, GiB | host, GiB | blocks | billion parameters | tokens/s |"
    yield "|---|---|---|---|---|"
    for cap, host in itertools.product(caps, hosts):
        depth, params, rate = largest(machine(card, cap, host))
        yield f"| {cap:g} | {host:g} | {depth} | {params / 1e9:.1f} | {rate:,.0f} |"


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("--card", default="h100-80g-sxm")
    parser.add_argument("--caps", nargs="+", type=float, default=[12, 24, 40, 80])
    parser.add_argument("--hosts", nargs="+", type=float, default=[64, 128, 256, 512])
    args = parser.parse_args()
    for line in lines(args.card, args.caps, args.hosts):
        print(line, flush=True)


if __name__ == "__main__":
    main()
