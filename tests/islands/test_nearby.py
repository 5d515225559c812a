"""A plan over islands gives what it gives in one process, bit by bit."""

import dataclasses
import functools
from typing import Any

import jax
import numpy as np
import pytest

from hexijax.cluster import Cluster
from hexijax.layers.names import flatten
from hexijax.runtime import engine as engine_module
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
from tests.laws.law_models import tokens


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
    monkeypatch.setattr(engine_module, "trace_model", _shared_trace)
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
