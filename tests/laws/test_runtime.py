"""Moves between meshes, the sample map, and what is compiled once."""

import random
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from hexijax.plan.plan import Plan, Replica, Stage
from hexijax.runtime.batches import sample_keys, sample_map
from hexijax.runtime.layout import Layout
from hexijax.runtime.lowering import Work
from hexijax.runtime.move import move
from hexijax.runtime.segments import Compiler
from tests.laws.cases import _traced, chain, model
from tests.laws.law_models import Shape

MESHES = [(1, 1), (2, 1), (1, 2), (2, 2), (4, 1), (1, 4), (2, 4)]
SPECS = [
    (),
    ("data",),
    ("model",),
    (None, "data"),
    ("model", "data"),
    ("data", "model"),
]


def draw_sharding(rng: random.Random) -> NamedSharding:
    rows, columns = rng.choice(MESHES)
    devices = rng.sample(jax.devices(), rows * columns)
    mesh = Mesh(np.array(devices).reshape(rows, columns), ("data", "model"))
    return NamedSharding(mesh, PartitionSpec(*rng.choice(SPECS)))


@pytest.mark.parametrize("seed", range(40))
def test_a_move_keeps_the_values_and_lands_where_it_should(seed: int):
    rng = random.Random(seed)
    values = [np.arange(8 * 16, dtype=np.float32).reshape(8, 16) + i for i in range(3)]
    arrays = [jax.device_put(v, draw_sharding(rng)) for v in values]
    targets = [draw_sharding(rng) for _ in values]
    for value, target, got in zip(values, targets, move(arrays, targets), strict=True):
        assert got.sharding == target
        np.testing.assert_array_equal(got, value)
        for shard in got.addressable_shards:
            np.testing.assert_array_equal(shard.data, value[shard.index])


@given(data=st.data())
def test_every_sample_is_in_exactly_one_microbatch(data: st.DataObject):
    replicas = []
    for _ in range(data.draw(st.integers(1, 3))):
        count, size = data.draw(st.integers(1, 5)), data.draw(st.integers(1, 6))
        samples = data.draw(st.integers(1, count * size))
        stage = Stage(devices=("a/0",), layers=(0, 1))
        replicas.append(
            Replica(
                stages=(stage,),
                microbatches=count,
                microbatch_size=size,
                samples=samples,
            )
        )
    total = sum(r.samples for r in replicas)
    rows = sample_map(Plan(replicas=tuple(replicas), batch_size=total))
    real = np.concatenate([r.index[r.mask > 0] for r in rows.values()])
    assert sorted(real) == list(range(total))
    assert all((r.index >= 0).all() and (r.index < total).all() for r in rows.values())


def test_keys_follow_from_seed_step_and_row_alone():
    keys = sample_keys(0, 5, 8)
    np.testing.assert_array_equal(keys[:4], sample_keys(0, 5, 4))
    assert not np.array_equal(keys, sample_keys(0, 6, 8))
    assert not np.array_equal(keys, sample_keys(1, 5, 8))
    assert len({tuple(k) for k in keys}) == 8


def _compiler(places: Sequence[str], work: Work, progress: Any = None) -> Compiler:
    """One that was asked for a stage of one layer on each of some devices."""
    shape = Shape(tied=False)
    names = [f"{n}/{i}" for n in ("fast", "slow") for i in range(4)]
    devices: Any = dict(zip(names, jax.devices(), strict=True))
    stages = tuple(
        Stage(devices=(d,), layers=(i + 1, i + 2)) for i, d in enumerate(places)
    )
    replica = Replica(stages=stages, microbatches=1, microbatch_size=2, samples=2)
    layout = Layout(Plan(replicas=(replica,), batch_size=2), chain(shape), devices)
    compiler = Compiler(layout, progress)
    for place, stage in layout.plan.stages():
        traced = _traced(model(shape)[0], 2, False, frozenset())
        segment = traced.segment(*stage.layers, stage.remat)
        dtypes = ["float32"] * len(segment.leaves)
        compiler.add(place, place, segment, dtypes, work)
    return compiler


@pytest.mark.parametrize(
    ("places", "programs"), [(("fast/0", "fast/0"), 1), (("fast/0", "slow/0"), 2)]
)
def test_equal_stages_compile_once_and_two_named_kinds_apart(
    places: tuple[str, str], programs: int
):
    compiler = _compiler(places, Work.EVALUATE)
    assert len(compiler.compile()) == 2
    assert compiler.num_distinct == programs


def test_the_last_program_of_each_segment_is_awaited_by_whoever_calls_it():
    told: list[int] = []
    compiler = _compiler(
        ["fast/0", "slow/0"], Work.TRAIN, lambda _, done, total: told.append(done)
    )
    begun = compiler.begin()
    assert told == [0, 1, 2], "the forwards are there: the backwards read their results"
    for compiled in begun.values():
        assert compiled.backward.memory_analysis().temp_size_in_bytes >= 0
    assert told == [0, 1, 2]
    for _ in range(2):
        compiler.wait()
        assert told == [0, 1, 2, 3, 4]
