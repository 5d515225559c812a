"""Plans drawn at random over the eight devices of the quickstart cluster.

A stage's mesh lies within one node, replicas share no device, and layers, lanes, tensor
degrees, microbatches, padding and state shares all vary on their own.
"""

import random
from collections.abc import Sequence

from hexijax.layers.chain import Chain, Remat
from hexijax.plan.plan import (
    Place,
    Plan,
    Replica,
    Schedule,
    Stage,
    StateShare,
    stage_place,
)

NODES = {
    "fast": tuple(f"fast/{i}" for i in range(4)),
    "slow": tuple(f"slow/{i}" for i in range(4)),
}
SCHEDULES = tuple(s for s in Schedule if s is not Schedule.LAYERED)
"""Of these plans; ``shares`` draws layered ones, with what they are for."""
MESHES = [(1, 1), (1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4)]


def compose(rng: random.Random, total: int, parts: int) -> list[int]:
    """``parts`` positive integers that sum to ``total``."""
    cuts = sorted(rng.sample(range(1, total), parts - 1))
    return [b - a for a, b in zip([0, *cuts], [*cuts, total], strict=True)]


def draw_meshes(
    rng: random.Random, most: int
) -> list[tuple[tuple[str, ...], int, int]]:
    """Disjoint (devices, lanes, tensor), each within one node."""
    free = {name: list(devices) for name, devices in NODES.items()}
    meshes = []
    for _ in range(rng.randint(1, most)):
        node = rng.choice(list(free))
        fitting = [m for m in MESHES if m[0] * m[1] <= len(free[node])]
        if not fitting:
            continue
        lanes, tensor = rng.choice(fitting)
        devices = tuple(free[node].pop(0) for _ in range(lanes * tensor))
        meshes.append((devices, lanes, tensor))
    rng.shuffle(meshes)
    return meshes


def draw_stages(
    rng: random.Random,
    chain: Chain,
    meshes: Sequence[tuple[tuple[str, ...], int, int]],
    rounds: int,
) -> tuple[Stage, ...]:
    """Stages over the meshes, ``rounds`` times around for an interleaved schedule."""
    num_layers = len(chain.layers)
    where = list(meshes) * rounds
    stages, start = [], 0
    for (devices, lanes, tensor), count in zip(
        where, compose(rng, num_layers, len(where)), strict=True
    ):
        segments = tuple(compose(rng, count, rng.randint(1, min(2, count))))
        remat = tuple(rng.choice(list(Remat)) for _ in range(count))
        stages.append(
            Stage(
                devices=devices,
                layers=(start, start + count),
                lanes=lanes,
                tensor=tensor,
                segments=segments,
                remat=remat if rng.random() < 0.3 else (),
            )
        )
        start += count
    return tuple(stages)


def draw_plan(
    rng: random.Random,
    chain: Chain,
    *,
    batch_size: int,
    schedule: Schedule | None = None,
) -> Plan:
    """One plan; every choice follows from ``rng``."""
    schedule = schedule or rng.choice(SCHEDULES)
    num_layers = len(chain.layers)
    meshes = draw_meshes(rng, most=5)
    num_replicas = rng.randint(1, min(3, len(meshes)))
    piles: list[list] = [[] for _ in range(num_replicas)]
    for i, mesh in enumerate(meshes):
        piles[i if i < num_replicas else rng.randrange(num_replicas)].append(mesh)
    samples = (
        compose(rng, batch_size, num_replicas) if num_replicas > 1 else [batch_size]
    )
    replicas = []
    for pile, count in zip(piles, samples, strict=True):
        pile = pile[:num_layers]
        several = schedule in (Schedule.INTERLEAVED, Schedule.LAYERED)
        rounds = 2 if several and len(pile) * 2 <= num_layers else 1
        lanes = max(lanes for _, lanes, _ in pile)
        microbatches = rng.randint(1, min(4, count))
        a_lane = -(-count // (microbatches * lanes))
        replicas.append(
            Replica(
                stages=draw_stages(rng, chain, pile, rounds),
                microbatches=microbatches,
                microbatch_size=a_lane * lanes,
                samples=count,
            )
        )
    state = [StateShare(groups=("*",), shares={})]
    places = [
        stage_place(r, s) for r, x in enumerate(replicas) for s in range(len(x.stages))
    ]
    for group in rng.sample(chain.groups, min(2, len(chain.groups))):
        if rng.random() < 0.5:
            chosen = rng.sample(places, rng.randint(1, min(3, len(places))))
            shares: dict[Place, float] = {
                p: rng.choice([1.0, 2.0, 3.0]) for p in chosen
            }
            state.append(StateShare(groups=(group.name,), shares=shares))
    return Plan(
        replicas=tuple(replicas),
        batch_size=batch_size,
        schedule=schedule,
        state=tuple(state),
        chain=chain.fingerprint(),
    )
