"""What the emulated cluster's benchmark reckons with: profiles, overlaps, its plans."""

import dataclasses

import pytest

from experiments.emulated import plans
from experiments.emulated.cards import LARGE, SMALL
from experiments.emulated.overlap import both, length, merged, of_events
from hexijax.costs import layer_times
from hexijax.costs.compute import MeshShape
from hexijax.costs.measured import update_s_per_param
from hexijax.layers.chain import Remat
from hexijax.plan.checks import check
from hexijax.plan.plan import Schedule
from hexijax.program.program import Backward, Forward, Update
from hexijax.runtime.profiling import (
    even_segments,
    layer_rows,
    segment_s,
    update_row,
)
from tests.plan.examples import make_chain

CHAIN = make_chain(8)


def times(segments, *, joined_s=None):
    """As a step of two microbatches would be timed: 1 ms a layer, 2 ms back."""
    found = []
    for mb in ((0, 1), (1, 2)):
        for g, count in enumerate(segments):
            last = g == len(segments) - 1
            forward_s = joined_s or count * (3e-3 if last else 1e-3)
            backward_s = 0.0 if last else count * 2e-3
            place = "r0.s0"
            for kind, seconds in ((Forward, forward_s), (Backward, backward_s)):
                i = kind(place=place, segment=g, microbatches=mb)
                found.append((i, seconds))
    return [*found, (Update(home="r0.s0", group="a"), 0.5)]


def test_segments_hold_layers_that_are_alike_and_the_loss_stands_alone():
    segments = even_segments(CHAIN, 4)
    assert sum(segments) == len(CHAIN.layers)
    assert segments == (1, 4, 4, 1)


def test_rows_tell_one_program_from_two():
    segments = even_segments(CHAIN, 4)
    apart = times(segments)
    assert segment_s(apart)[1] == pytest.approx((4e-3, 8e-3))
    # All in one program takes nine tenths of what the segments before the last take.
    whole_s = 0.9 * 9 * 3e-3 + 3e-3
    rows = layer_rows(
        CHAIN.layers,
        segments,
        apart,
        times((len(CHAIN.layers),), joined_s=whole_s),
        dtype="bfloat16",
        samples=4,
    )
    block = next(r for r in rows if r["signature"] == CHAIN.layers[1].signature)
    assert block["apart_forward_s"] == pytest.approx(1e-3)
    assert block["forward_s"] == pytest.approx(0.9e-3)
    # The head keeps what it computes, whatever the rest does.
    again = layer_rows(
        CHAIN.layers,
        segments,
        apart,
        apart,
        dtype="bfloat16",
        samples=4,
        remat=Remat.FULL,
    )
    assert [row["remat"] for row in again] == ["full", "full", "none"]
    kind = dataclasses.replace(
        LARGE.cluster().profiles[0], layer_times=(*rows, update_row(CHAIN, apart))
    )
    found = layer_times(CHAIN, MeshShape(profile=kind, dtype="bfloat16"), 4)
    assert sum(t.total_s() for t in found) == pytest.approx(whole_s)
    assert found[1].forward(Remat.NONE, joined=False) == pytest.approx(1e-3)
    assert update_s_per_param(kind) == pytest.approx(
        0.5 / sum(group.size for group in CHAIN.groups)
    )


def test_what_overlaps_is_where_both_are():
    compute, copies = merged([(0, 2), (1, 3), (5, 6)]), merged([(2, 5.5)])
    assert list(compute) == [(0, 3), (5, 6)]
    assert list(both(compute, copies)) == [(2, 3), (5, 5.5)]
    assert length(both(copies, compute)) == 1.5


def test_a_profile_is_read_by_card_and_stream():
    names = [
        {
            "ph": "M",
            "name": "process_name",
            "pid": 1,
            "args": {"name": "/device:GPU:0"},
        },
        {
            "ph": "M",
            "name": "thread_name",
            "pid": 1,
            "tid": 7,
            "args": {"name": "Stream #7(Compute)"},
        },
        {
            "ph": "M",
            "name": "thread_name",
            "pid": 1,
            "tid": 8,
            "args": {"name": "Steps"},
        },
    ]
    spans = [("gemm", 7, 0, 4), ("MemcpyP2P", 7, 3, 2), ("1", 8, 0, 100)]
    events = [
        {"ph": "X", "name": n, "pid": 1, "tid": t, "ts": ts * 1e6, "dur": dur * 1e6}
        for n, t, ts, dur in spans
    ]
    assert of_events([*names, *events]) == {
        "GPU:0": {
            "compute": 4.0,
            "peer": 2.0,
            "peer beside compute": 1.0,
            "all": 5.0,
            "span": 5.0,
        }
    }


@pytest.mark.parametrize("setting", [LARGE, SMALL], ids=["large", "small"])
def test_its_plans_are_whole_and_use_every_card(setting):
    cluster = setting.cluster()
    chain = make_chain(4)
    even = plans.even_batch(setting, chain)
    layered = plans.layered(chain, even)
    off = plans.plain_order(chain, even)
    assert (layered.schedule, off.schedule) == (
        Schedule.LAYERED,
        Schedule.ONE_F_ONE_B,
    )
    for plan in (even, layered, off):
        check(plan, chain, cluster)
        used = {name for _, stage in plan.stages() for name in stage.devices}
        assert used == set(setting.devices)
        assert sum(r.samples for r in plan.replicas) == setting.batch_size
