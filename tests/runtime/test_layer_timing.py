"""Layers are timed in the runtime's programs, and costs read the times back."""

import dataclasses

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexijax.cluster import Cluster
from hexijax.costs import MeshShape, layer_times
from hexijax.job.intake import trace_chain
from hexijax.layers.chain import Remat
from hexijax.program.program import Site
from hexijax.runtime.layer_timing import layer_rows, runs
from hexijax.runtime.links import profile
from hexijax.runtime.stopwatch import filled
from hexijax.runtime.update_timing import update
from tests.cli import tiny
from tests.plan.examples import make_chain

CLUSTER = Cluster.from_toml("""\
format = 1
name = "one"
[kinds.cpu]
vendor = "cpu"
memory_gib = 2
peak_tflops = { float32 = 0.05 }
memory_gb_per_s = 10
host_link_gb_per_s = 10
[[nodes]]
name = "a"
devices = [{ kind = "cpu", count = 2 }]
host_memory_gib = 4
host_cores = 2
link = { latency_us = 100, bandwidth_gb_per_s = 4 }
""")


def devices() -> dict[str, jax.Device]:
    return dict(zip(("a/0", "a/1"), jax.devices(), strict=False))


@given(st.integers(1, 30), st.integers(1, 6))
def test_runs_hold_alike_layers_in_equal_numbers(depth: int, most: int):
    chain = make_chain(depth)
    cut = runs(chain, most)
    assert sum(cut) == len(chain.layers)
    assert max(cut) <= most
    assert cut[-1] == 1, "the last ends in the loss"
    stops = [sum(cut[: i + 1]) for i in range(len(cut))]
    lengths: dict[str, set[int]] = {}
    for count, stop in zip(cut[:-1], stops, strict=False):
        alike = {layer.signature for layer in chain.layers[stop - count : stop]}
        assert len(alike) == 1
        lengths.setdefault(alike.pop(), set()).add(count)
    assert all(len(found) == 1 for found in lengths.values()), "one program each"


@pytest.mark.parametrize("tensor", [1, 2])
def test_what_was_measured_is_what_costs_say(tensor: int):
    experiment = tiny.experiment()
    chain = trace_chain(experiment)
    names = ["a/0", "a/1"][:tensor]
    rows = [
        row
        for remat in (Remat.NONE, Remat.FULL)
        for row in layer_rows(
            experiment,
            chain,
            CLUSTER,
            devices(),
            names,
            dtype="float32",
            samples=2,
            remat=remat,
        )
    ]
    assert {row["tensor"] for row in rows} == {tensor}
    kind = dataclasses.replace(CLUSTER.profiles[0], layer_times=tuple(rows))
    link = CLUSTER.link("a/0", "a/1") if tensor > 1 else None
    mesh = MeshShape(profile=kind, dtype="float32", tensor=tensor, link=link)
    times = layer_times(chain, mesh, 2)
    by_layer = {(r["signature"], r["remat"]): r for r in rows}
    for layer, found in zip(chain.layers, times, strict=True):
        row = by_layer[layer.signature, "none"]
        assert found.forward(Remat.NONE, joined=True) == row["forward_s"]
        apart_s = found.forward(Remat.NONE, joined=False)
        assert apart_s == pytest.approx(row["apart_forward_s"])
        apart_s = found.backward(Remat.NONE, joined=False)
        assert apart_s == pytest.approx(row["apart_backward_s"])
        again = by_layer[layer.signature, "full"]
        least_s = again["forward_s"] + again["backward_s"]
        assert found.total_s(Remat.FULL) >= least_s or (
            found.total_s(Remat.FULL) == pytest.approx(least_s)
        )


def test_layers_that_do_not_train_have_no_backward():
    experiment = dataclasses.replace(tiny.experiment(), trainable="head/*")
    chain = trace_chain(experiment)
    rows = layer_rows(
        experiment,
        chain,
        CLUSTER,
        devices(),
        ["a/0"],
        dtype="float32",
        samples=1,
    )
    by_layer = {row["signature"]: row for row in rows}
    first, last = (by_layer[chain.layers[at].signature] for at in (0, -1))
    assert first["forward_s"] > 0 == first["backward_s"]
    assert last["backward_s"] > 0


@pytest.mark.parametrize("site", list(Site))
def test_an_update_is_timed_at_every_site(site: Site):
    experiment = tiny.experiment()
    chain = trace_chain(experiment)
    found = update(experiment, chain, devices(), "a/0", dtype="float32", site=site)
    assert found.params in {group.size for group in chain.groups} | {
        sum(group.size for group in chain.groups[1:3])
    }
    assert found.params_per_s > 0


@given(st.lists(st.floats(1e-6, 1), min_size=2, max_size=8).map(sorted))
def test_a_curve_is_a_link_and_its_points_are_kept(times: list[float]):
    points = [(2**n, time_s) for n, time_s in enumerate(times, 12)]
    found = profile(points)
    for size, time_s in points:
        assert found.transfer_s(size) == pytest.approx(time_s)
    assert found.transfer_s(2 * points[-1][0]) > points[-1][1]


def test_arrays_lie_where_they_are_asked_for_and_are_unlike():
    here = jax.sharding.SingleDeviceSharding(jax.devices()[1])
    struct = jax.ShapeDtypeStruct((64, 64), "bfloat16", sharding=here)
    pinned = here.with_memory_kind("pinned_host")
    made, there = filled((struct, struct.update(sharding=pinned)))
    assert made.sharding.device_set == {jax.devices()[1]}
    assert there.sharding.memory_kind == "pinned_host"
    assert len(set(made.ravel().tolist())) > 100
    assert abs(float(made.astype("float32").mean())) < 1e-3
