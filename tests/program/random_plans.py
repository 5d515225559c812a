"""Random plans that fit their chain: cuts, segments, ties, schedules, shares.

Made from a seed inside the test: the type checks of our dataclasses draw random numbers
of their own, which hypothesis forbids in its strategies.
"""

import dataclasses
import random

from hexijax.layers.chain import Chain
from hexijax.plan.plan import (
    Memory,
    Params,
    Place,
    Plan,
    Schedule,
    Stage,
    StateShare,
    UpdateOrder,
    stage_place,
)
from hexijax.program.lower import StepRules
from tests.program.examples import make_chain, make_plan, make_stages


def random_plan(
    seed: int, *, max_layers: int = 64, max_microbatches: int = 12
) -> tuple[Plan, Chain, StepRules]:
    """One to three replicas over a chain; equal seeds give equal plans."""
    rng = random.Random(seed)
    chain = _chain(rng, max_layers)
    more = random.Random(f"layered, freed {seed}")  # so that named seeds stay theirs
    schedule = rng.choice([s for s in Schedule if s is not Schedule.LAYERED])
    if more.random() < 0.25:
        schedule = Schedule.LAYERED
    replicas = [
        (
            _stages(rng, more, len(chain.layers), prefix, schedule),
            rng.randint(1, max_microbatches),
        )
        for prefix in "abc"[: rng.randint(1, 3)]
    ]
    plan = make_plan(*replicas, schedule=schedule, state=_state(rng, chain, replicas))
    plan = _offloaded(random.Random(f"offload {seed}"), plan)
    clip, dynamic = rng.random() < 0.5, rng.random() < 0.3
    if schedule is Schedule.LAYERED and not (clip or dynamic):
        plan = _with_few_grads(random.Random(f"grads {seed}"), plan)
    return plan, chain, StepRules(clip=clip, dynamic_scale=dynamic)


def _with_few_grads(rng: random.Random, plan: Plan) -> Plan:
    """Some stages with room for the gradients of a few passes."""
    replicas = tuple(
        dataclasses.replace(
            r,
            stages=tuple(
                dataclasses.replace(s, grads=rng.choice([0, 1, 2, 3])) for s in r.stages
            ),
        )
        for r in plan.replicas
    )
    return dataclasses.replace(plan, replicas=replicas)


def _offloaded(rng: random.Random, plan: Plan) -> Plan:
    """Half of the plans with some parameters and residuals in host memory."""
    if rng.random() < 0.5:
        return plan

    def stage(old: Stage) -> Stage:
        kept = old.params or (Params.KEPT,) * len(old.segments)
        return dataclasses.replace(
            old,
            params=tuple(rng.choice([each, Params.STREAMED]) for each in kept),
            residuals=tuple(rng.choice(list(Memory)) for _ in old.segments),
        )

    replicas = tuple(
        dataclasses.replace(r, stages=tuple(map(stage, r.stages)))
        for r in plan.replicas
    )
    state = tuple(
        dataclasses.replace(
            share,
            memory=(memory := rng.choice(list(Memory))),
            update=rng.choice([Memory.DEVICE, memory]),
        )
        for share in plan.state
    )
    order = rng.choice(list(UpdateOrder))
    return dataclasses.replace(plan, replicas=replicas, state=state, order=order)


def frozen_plan(seed: int) -> tuple[Plan, Chain, StepRules]:
    """A random plan over a chain of which some parameters, not all, train."""
    plan, chain, rules = random_plan(seed, max_layers=16, max_microbatches=6)
    rng = random.Random(seed)
    every = [leaf.name for leaf in chain.leaves()]
    trained = rng.sample(every, rng.randint(1, len(every)))
    if rng.random() < 0.5:  # nothing before some layer
        first = rng.randrange(len(chain.layers))
        late = [
            leaf.name for g in chain.groups if g.layers[0] >= first for leaf in g.leaves
        ]
        trained = [name for name in trained if name in late] or late[-1:] or trained
    sizes = [chain.group(f"l{i}").leaves[0].shape[0] for i in range(len(chain.layers))]
    tied = {g.name: g.layers for g in chain.groups if g.name.startswith("tied")}
    frozen = set(every) - set(trained)
    return plan, make_chain(len(sizes), tied=tied, sizes=sizes, frozen=frozen), rules


def _chain(rng: random.Random, max_layers: int) -> Chain:
    num_layers = rng.randint(1, max_layers)
    tied = {
        f"tied{i}": rng.sample(range(num_layers), rng.randint(1, min(4, num_layers)))
        for i in range(rng.randint(0, 2))
    }
    rows = [rng.choice([3, 64, 256, 300]) for _ in range(num_layers)]
    return make_chain(num_layers, tied=tied, sizes=rows)


def _stages(
    rng: random.Random,
    more: random.Random,
    num_layers: int,
    prefix: str,
    schedule: Schedule,
) -> tuple[Stage, ...]:
    """Stages of one replica; interleaved ones share device sets, mostly evenly."""
    num_stages = rng.randint(1, min(8, num_layers))
    splits = random_cut(rng, num_layers, num_stages)
    num_sets = None
    if schedule in (Schedule.INTERLEAVED, Schedule.LAYERED):
        num_sets = rng.choice([n for n in range(1, 9) if num_stages % n == 0] + [3])
    return make_stages(
        splits,
        prefix=prefix,
        tensor=rng.choice([1, 2]),
        lanes=rng.choice([1, 2]),
        segments=[random_cut(rng, n, rng.randint(1, min(3, n))) for n in splits],
        num_sets=num_sets,
        freed=more.random() < 0.3,
        waits=more.random() < 0.3,
    )


def random_cut(rng: random.Random, total: int, parts: int) -> list[int]:
    """``total`` in ``parts`` whole numbers above 0."""
    bounds = [0, *sorted(rng.sample(range(1, total), parts - 1)), total]
    return [bounds[i + 1] - bounds[i] for i in range(parts)]


def _state(
    rng: random.Random, chain: Chain, replicas: list[tuple[tuple[Stage, ...], int]]
) -> tuple[StateShare, ...]:
    """Even, or of every other group by shares over stages, a device and a store."""
    even = StateShare(groups=("*",), shares={})
    places = [
        stage_place(r, k)
        for r, (stages, _) in enumerate(replicas)
        for k in range(len(stages))
    ]
    places += [Place("store/0"), Place("a/0")]
    chosen = rng.sample(places, rng.randint(1, min(4, len(places))))
    shares = {place: float(rng.randint(0, 5)) for place in chosen}
    if rng.random() < 0.5 or not any(shares.values()):
        return (even,)
    groups = tuple(group.name for group in chain.groups[::2])
    return even, StateShare(groups=groups, shares=shares)
