"""Random plans: any that the text and the JSON can hold, valid for a model or not.

Made from a seed inside the test: the type checks of our dataclasses draw random numbers
of their own, which hypothesis forbids in its strategies.
"""

import random

from hexijax.layers.chain import Remat
from hexijax.plan.plan import (
    CHUNK_SIZE,
    Memory,
    Params,
    Place,
    Plan,
    Prediction,
    Reductions,
    Replica,
    Schedule,
    Stage,
    StateShare,
    UpdateOrder,
)

LETTERS = 'ab/0-9 ,=#"*\\\té☃\ud800.'


def random_plan(seed: int) -> Plan:
    """A plan whose parts need not fit each other; equal seeds give equal plans."""
    rng = random.Random(seed)
    return Plan(
        replicas=tuple(_replica(rng) for _ in range(rng.randint(1, 3))),
        batch_size=_count(rng),
        schedule=rng.choice(list(Schedule)),
        reductions=rng.choice(list(Reductions)),
        order=rng.choice(list(UpdateOrder)),
        chunk=rng.choice([CHUNK_SIZE, _count(rng)]),
        state=tuple(_share(rng) for _ in range(rng.randint(1, 3))),
        objective=rng.choice(["step_time", "price", "my goal"]),
        chain=rng.choice(["", "0123456789ab"]),
        cluster=rng.choice(["", "ba9876543210"]),
        prediction=rng.choice([None, _prediction(rng)]),
    )


def _count(rng: random.Random) -> int:
    return rng.choice([0, 1, 2, rng.randrange(10**6)])


def _part(rng: random.Random) -> float:
    return rng.choice(
        [0.0, 0.5, 1.0, rng.random(), rng.random() * 10 ** rng.randint(-30, 30)]
    )


def _name(rng: random.Random) -> str:
    if rng.random() < 0.7:
        return f"{rng.choice(['fast', 'a-b', 'x/y'])}/{rng.randint(0, 12)}"
    return "".join(rng.choices(LETTERS, k=rng.randint(0, 6)))


def _names(rng: random.Random) -> tuple[str, ...]:
    if rng.random() < 0.5:
        first = rng.randint(0, 10)
        return tuple(f"fast/{i}" for i in range(first, first + rng.randint(1, 6)))
    return tuple(_name(rng) for _ in range(rng.randint(1, 6)))


def _replica(rng: random.Random) -> Replica:
    return Replica(
        stages=tuple(_stage(rng) for _ in range(rng.randint(1, 3))),
        microbatches=_count(rng),
        microbatch_size=_count(rng),
        samples=_count(rng),
    )


def _stage(rng: random.Random) -> Stage:
    start, num_layers = rng.randint(0, 40), rng.randint(1, 5)
    any_remat = tuple(rng.choices(list(Remat), k=rng.randint(1, 5)))
    return Stage(
        devices=_names(rng),
        layers=(start, start + num_layers),
        lanes=_count(rng),
        tensor=_count(rng),
        dtype=rng.choice(["float32", "bfloat16", "odd dtype"]),
        segments=tuple(_count(rng) for _ in range(rng.randint(0, 3))),
        remat=rng.choice([(), any_remat, (rng.choice(list(Remat)),) * num_layers]),
        params=tuple(rng.choices(list(Params), k=rng.randint(0, 3))),
        waits=tuple(rng.choices(list(Memory), k=rng.randint(0, 3))),
        residuals=tuple(rng.choices(list(Memory), k=rng.randint(0, 3))),
        grads=rng.choice([0, 0, 1, 5]),
    )


def _share(rng: random.Random) -> StateShare:
    places = [Place(_name(rng)) for _ in range(rng.randint(0, 3))]
    return StateShare(
        groups=rng.choice([("*",), _names(rng)]),
        shares={place: _part(rng) for place in places},
        memory=rng.choice(list(Memory)),
        update=rng.choice(list(Memory)),
    )


def _prediction(rng: random.Random) -> Prediction:
    return Prediction(
        step_s=_part(rng),
        memory_bytes={_name(rng): _count(rng) for _ in range(rng.randint(0, 4))},
    )
