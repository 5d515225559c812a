"""Plans for one card, drawn at random: models, segments, remat, schedule, microbatches.

    seed, card -> draw_plans -> (Draw, ...) -> make_chain, make_plan

A plan is kept if its promise fills a fair part of the card and still fits.
"""

import dataclasses
import random
from collections.abc import Sequence
from typing import Any

from hexijax.cluster import Cluster, DeviceGroup, Node
from hexijax.costs.memory import plan_memory
from hexijax.layers.chain import Chain, Remat
from hexijax.layers.known import llama
from hexijax.plan.plan import Plan, Replica, Schedule, Stage

Draw = dict[str, Any]
"""A plan in numbers: the JSON a child process is given."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Family:
    """What plans are drawn from."""

    widths: tuple[int, ...]
    depths: tuple[int, ...]
    lengths: tuple[int, ...]
    microbatch_sizes: tuple[int, ...]
    head: int
    """Features of an attention head."""

    vocab_size: int
    dtype: str
    promised: tuple[float, float]
    """Plans that promise less, or more, of the card's usable memory are not run."""


LARGE = Family(
    widths=(1024, 2048, 3072, 4096),
    depths=(4, 6, 8, 12),
    lengths=(1024, 2048, 4096),
    microbatch_sizes=(1, 2, 4, 8, 16),
    head=128,
    vocab_size=32_000,
    dtype="bfloat16",
    promised=(0.15, 0.97),
)
SMALL = Family(
    widths=(32, 64),
    depths=(2, 4),
    lengths=(32, 64),
    microbatch_sizes=(1, 2),
    head=16,
    vocab_size=128,
    dtype="float32",
    promised=(0, 1),
)


def card_cluster(kind: str) -> Cluster:
    """One card of the catalog, alone in a host."""
    node = Node(
        name="host",
        devices=(DeviceGroup(kind=kind, count=1),),
        host_memory_bytes=2**37,
        host_cores=16,
    )
    return Cluster(name=kind, nodes=(node,))


def draw(rng: random.Random, family: Family) -> Draw:
    """Sizes and a plan for one device, all free choices drawn."""
    depth = rng.choice(family.depths)
    segments = rng.choice([1, 1, 2, 3])
    layers = depth + 2
    cuts = sorted(rng.sample(range(1, layers), segments - 1))
    changed = rng.randint(0, layers)
    first, later = rng.choice(list(Remat)), rng.choice(list(Remat))
    return {
        "width": rng.choice(family.widths),
        "depth": depth,
        "length": rng.choice(family.lengths),
        "microbatch_size": rng.choice(family.microbatch_sizes),
        "microbatches": rng.choice([1, 2, 3]),
        "schedule": rng.choice([Schedule.ONE_F_ONE_B, Schedule.GPIPE]).value,
        "segments": [b - a for a, b in zip([0, *cuts], [*cuts, layers], strict=True)],
        "remat": [first.value] * changed + [later.value] * (layers - changed),
    }


def draw_plans(
    seed: int, count: int, family: Family, cluster: Cluster
) -> Sequence[Draw]:
    """Plans that promise to fit, and enough to be worth measuring."""
    rng, found = random.Random(seed), list[Draw]()
    device = cluster.devices[0]
    low, high = (device.usable_memory_bytes * share for share in family.promised)
    while len(found) < count:
        drawn = draw(rng, family)
        plan, chain = make_plan(drawn, family, cluster), make_chain(drawn, family)
        if low <= plan_memory(plan, chain, cluster)[device.name].total_bytes <= high:
            found.append(drawn)
    return found


def make_chain(drawn: Draw, family: Family) -> Chain:
    """The model by formula: planning traces nothing."""
    return llama(
        depth=drawn["depth"],
        width=drawn["width"],
        num_heads=drawn["width"] // family.head,
        length=drawn["length"],
        ff_width=ff_width(drawn["width"]),
        vocab_size=family.vocab_size,
        dtype=family.dtype,
    )


def ff_width(width: int) -> int:
    """Two thirds of four widths, in whole tiles."""
    return -(-8 * width // 3 // 64) * 64


def make_plan(drawn: Draw, family: Family, cluster: Cluster) -> Plan:
    """The drawn plan on the cluster's first device."""
    stage = Stage(
        devices=(cluster.devices[0].name,),
        layers=(0, drawn["depth"] + 2),
        dtype=family.dtype,
        segments=tuple(drawn["segments"]),
        remat=tuple(map(Remat, drawn["remat"])),
    )
    samples = drawn["microbatches"] * drawn["microbatch_size"]
    replica = Replica(
        stages=(stage,),
        microbatches=drawn["microbatches"],
        microbatch_size=drawn["microbatch_size"],
        samples=samples,
    )
    return Plan(
        replicas=(replica,), batch_size=samples, schedule=Schedule(drawn["schedule"])
    )


def describe(drawn: Draw) -> str:
    """A plan, for people."""
    remat = drawn["remat"]
    return (
        f"{drawn['depth']:2} x {drawn['width']} length {drawn['length']} "
        f"{drawn['microbatches']} x {drawn['microbatch_size']} {drawn['schedule']} "
        f"{'+'.join(map(str, drawn['segments']))} "
        f"{remat[0]} x{remat.count(remat[0])} ..{remat[-1]}"
    )
