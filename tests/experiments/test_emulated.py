"""What the emulated cluster's benchmark reckons with: profiles, overlaps, its plans."""

import pytest

from experiments.emulated import plans
from experiments.emulated.cards import LARGE, SMALL
from experiments.emulated.overlap import both, length, merged, of_events
from hexijax.plan.checks import check
from hexijax.plan.plan import Schedule
from hexijax.runtime.profiling import even_segments
from tests.plan.examples import make_chain

CHAIN = make_chain(8)


def test_segments_hold_layers_that_are_alike_and_the_loss_stands_alone():
    segments = even_segments(CHAIN, 4)
    assert sum(segments) == len(CHAIN.layers)
    assert segments == (1, 4, 4, 1)


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
