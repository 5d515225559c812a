"""Plans whose compute and state are shared out apart, drawn at random.

Some stages have the parameters of a segment for a pass only, or borders that wait in
host memory; some devices store nothing of the state, some only store; batches and boxes
are uneven.
"""

import dataclasses
import functools
import random

from hexijax.plan.checks import check_stage_parts, check_state
from hexijax.plan.meshes import check_meshes
from hexijax.plan.plan import (
    Memory,
    Params,
    Place,
    Plan,
    Schedule,
    Stage,
    StateShare,
    stage_place,
)
from tests.laws.cases import BATCH_SIZE, Case, chain, cluster
from tests.laws.drawing import NODES, SCHEDULES, compose, draw_plan
from tests.laws.law_models import Shape


@functools.cache
def draw_shared(seed: int) -> Case:
    """A random case; the same one for the same seed."""
    rng = random.Random(seed)
    shape = Shape(
        api=rng.choice(["nnx", "linen"]),
        tied=rng.random() < 0.5,
        scanned=rng.random() < 0.3,
    )
    schedule = Schedule.LAYERED if rng.random() < 0.6 else rng.choice(SCHEDULES)
    layers = chain(shape)
    plan = draw_plan(rng, layers, batch_size=BATCH_SIZE, schedule=schedule)
    replicas = tuple(
        dataclasses.replace(r, stages=tuple(_freed(rng, stage) for stage in r.stages))
        for r in plan.replicas
    )
    plan = dataclasses.replace(plan, replicas=replicas)
    shares = {**_computing(rng, plan), **_storing(rng, plan)}
    if not any(shares.values()):
        shares[next(iter(shares))] = 1.0
    state = (StateShare(groups=("*",), shares=shares),)
    plan = dataclasses.replace(plan, state=state, cluster=cluster().fingerprint())
    for rule in (check_meshes, check_stage_parts, check_state):
        rule(plan, layers, cluster())
    return Case(seed, shape, rng.random() < 0.3, plan)


def _freed(rng: random.Random, stage: Stage) -> Stage:
    """Cut finer, with some segments' parameters for a pass only."""
    count = stage.num_layers
    segments = tuple(compose(rng, count, rng.randint(1, min(3, count))))
    some = tuple(rng.choice([Params.KEPT, Params.FREED]) for _ in segments)
    params = some if rng.random() < 0.3 else (Params.FREED,) * len(segments)
    waits = tuple(rng.choice(list(Memory)) for _ in segments)
    return dataclasses.replace(stage, segments=segments, params=params, waits=waits)


def _computing(rng: random.Random, plan: Plan) -> dict[Place, float]:
    """Shares of the stages: often none."""
    share = functools.partial(rng.choice, [0.0, 0.0, 1.0, 2.0, 5.0])
    return {
        stage_place(r, s): share()
        for r, replica in enumerate(plan.replicas)
        for s in range(len(replica.stages))
    }


def _storing(rng: random.Random, plan: Plan) -> dict[Place, float]:
    """Shares of one or two devices: some compute as well, most do nothing else."""
    if rng.random() < 0.3:
        return {}
    used = {device for _, stage in plan.stages() for device in stage.devices}
    every = [device for node in NODES.values() for device in node]
    idle = [device for device in every if device not in used]
    chosen = rng.sample(idle or every, min(2, len(idle or every)))
    return {Place(device): rng.choice([1.0, 3.0]) for device in chosen}


def stores_nothing(plan: Plan) -> bool:
    """Whether some computing device holds no state."""
    stages = dict(plan.stages())
    holding = {
        device
        for place, share in plan.state[0].shares.items()
        if share
        for device in (stages[place].devices if place in stages else (place,))
    }
    return any(set(stage.devices) - holding for stage in stages.values())


def computes_nothing(plan: Plan) -> bool:
    """Whether some device holds state and is in no stage."""
    used = {device for _, stage in plan.stages() for device in stage.devices}
    places = {place for place, _ in plan.stages()}
    return any(
        share and place not in places and place not in used
        for place, share in plan.state[0].shares.items()
    )
