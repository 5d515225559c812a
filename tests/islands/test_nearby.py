"""A plan over islands gives what it gives in one process, bit by bit."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from hexijax.cluster import Cluster
from hexijax.layers.names import flatten
from hexijax.plan.plan import Plan, Reductions, Replica, Stage
from hexijax.runtime import tracing
from hexijax.runtime.devices import assign
from hexijax.runtime.engine import Engine
from tests.islands.nearby import all_at_once, carriers
from tests.laws.cases import (
    BATCH_SIZE,
    Case,
    _shared_trace,
    chain,
    cluster,
    draw,
    experiment,
)
from tests.laws.law_models import Shape, tokens


@functools.cache
def apart() -> Cluster:
    """The same cluster, whose nodes are islands."""
    nodes = tuple(dataclasses.replace(n, island=n.name) for n in cluster().nodes)
    return dataclasses.replace(cluster(), nodes=nodes)


def engine(case: Case, carrier: Any = None) -> Engine:
    job = experiment(case.shape, case.clipped)
    devices = assign(cluster())
    extra = {} if carrier is None else {"carrier": carrier}
    return Engine(job, case.plan, chain(case.shape), apart(), devices, **extra)


def outcome(made: Engine, seed: int) -> tuple[Any, ...]:
    """Two steps, an evaluation in between, and what is left."""
    made.init()
    first = made.step(tokens(BATCH_SIZE, seed), 0).fetch()
    seen = made.evaluate(tokens(BATCH_SIZE, seed + 1), 0)
    second = made.step(tokens(BATCH_SIZE, seed + 2), 1).fetch()
    return first, seen, second, flatten(made.params()), made.moments_like("grads")


def check(seed: int, monkeypatch: Any) -> None:
    monkeypatch.setattr("hexijax.program.boxes.MIN_CUT_SIZE", 64)
    monkeypatch.setattr(tracing, "trace_model", _shared_trace)
    case = draw(seed)
    want = outcome(engine(case), seed)
    joined = carriers(apart(), assign(cluster()))
    engines = [engine(case, carrier) for carrier in joined.values()]
    found = all_at_once([lambda e=e: outcome(e, seed) for e in engines])
    for (name, carrier), made, got in zip(joined.items(), engines, found, strict=True):
        assert got[:3] == want[:3], name
        for mine, theirs in zip(got[3:], want[3:], strict=True):
            for leaf, x in theirs.items():
                np.testing.assert_array_equal(mine[leaf], x, err_msg=f"{name} {leaf}")
        for buffer in made.live_buffers():
            for x in jax.tree.leaves(made._executor.get(buffer)):
                assert all(map(carrier.here, x.sharding.device_set)), (name, buffer)


def test_islands_of_one_process_give_the_bits_of_one_process(monkeypatch: Any):
    check(0, monkeypatch)


@pytest.mark.laws
@pytest.mark.parametrize("seed", range(1, 30))
def test_and_so_do_they_under_any_plan(seed: int, monkeypatch: Any):
    check(seed, monkeypatch)


@pytest.mark.laws
def test_what_an_island_has_to_say_crosses_once(monkeypatch: Any):
    """Gradients of an island's replicas are added before they leave, where reductions
    are fast, and new parameters are spread inside."""
    monkeypatch.setattr("hexijax.program.boxes.MIN_CUT_SIZE", 64)
    monkeypatch.setattr(tracing, "trace_model", _shared_trace)
    shape = Shape(tied=False)
    layers = len(chain(shape).layers)
    replicas = tuple(
        Replica(
            stages=(Stage(devices=(name,), layers=(0, layers)),),
            microbatches=1,
            microbatch_size=3,
            samples=3,
        )
        for name in ("fast/0", "fast/1", "slow/0", "slow/1")
    )
    plan = Plan(replicas=replicas, batch_size=BATCH_SIZE)
    found, offered = {}, {}
    for reductions in Reductions:
        case = Case(0, shape, False, dataclasses.replace(plan, reductions=reductions))
        joined = carriers(apart(), assign(cluster()))
        engines = [engine(case, carrier) for carrier in joined.values()]
        first, second = all_at_once([lambda e=e: outcome(e, 0) for e in engines])
        assert first[:3] == second[:3]
        found[reductions] = first
        channels: list[Any] = [carrier.channel for carrier in joined.values()]
        offered[reductions] = sum(c.offered_bytes for c in channels)
    exact, fast = found[Reductions.EXACT], found[Reductions.FAST]
    for mine, theirs in zip(fast[:3], exact[:3], strict=True):
        assert mine == pytest.approx(theirs, rel=1e-5)
    for leaf, want in exact[4].items():
        np.testing.assert_allclose(fast[4][leaf], want, rtol=1e-4, atol=1e-6)
    # In two steps two islands each leave out one replica's float32 gradients, halved.
    params = sum(x.size for x in exact[3].values())
    saved = offered[Reductions.EXACT] - offered[Reductions.FAST]
    assert saved == 2 * 4 * params
