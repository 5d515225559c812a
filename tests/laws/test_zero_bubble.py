"""Split backwards at work: law 1, and no more bytes than the plan promised.

Three stages of one pipeline: lanes, two segments and every remat policy, under dropout,
with more microbatches than stages.
"""

from collections import Counter
from typing import Any

import jax
import pytest

from hexijax.costs.activations import (
    Within,
    handed_microbatches,
    live_microbatches,
    stage_activations,
)
from hexijax.layers.chain import Remat
from hexijax.layers.segment import Segment
from hexijax.layers.split import Split
from hexijax.plan.plan import Replica, Schedule, Stage
from hexijax.program.program import Backward, Kind, Part
from hexijax.program.text import by_stage
from hexijax.runtime.executor import Executor
from tests.laws.cases import BATCH_SIZE, Case, chain, check, cluster, run
from tests.laws.law_models import Shape
from tests.laws.test_exactness import by_hand

SHAPE = Shape(dropout=0.3)
COUNTED = {Kind.ACT, Kind.COT, Kind.RES, Kind.BATCH}


def split_case() -> Case:
    """Its second stage is split whole, its last fused with the forward."""
    stages = (
        Stage(devices=("fast/0",), layers=(0, 1)),
        Stage(
            devices=("fast/1", "fast/2"),
            layers=(1, 4),
            lanes=2,
            segments=(2, 1),
            remat=(Remat.FULL, Remat.NONE, Remat.DOTS),
        ),
        Stage(devices=("slow/0",), layers=(4, 6)),
    )
    assert stages[-1].layers[1] == len(chain(SHAPE).layers)
    replica = Replica(
        stages=stages, microbatches=6, microbatch_size=2, samples=BATCH_SIZE
    )
    return by_hand(SHAPE, replica, schedule=Schedule.ZERO_BUBBLE)


def held_bytes(executor: Executor) -> Counter[str]:
    """On the first device of each place: microbatches' arrays, each counted once."""
    found: dict[str, dict[int, int]] = {}
    for buffer in executor.live():
        if buffer.kind in COUNTED:
            arrays = found.setdefault(buffer.place, {})
            for array in jax.tree.leaves(executor.get(buffer)):
                arrays[id(array)] = array.addressable_shards[0].data.nbytes
    return Counter({place: sum(arrays.values()) for place, arrays in found.items()})


def test_parts_give_the_plain_numbers_within_the_promise(monkeypatch: Any):
    peaks: Counter[str] = Counter()

    def watched(executor: Executor, actions: Any) -> None:
        def watch(action: Any) -> Any:
            def watched_action(slots: Any) -> None:
                action(slots)
                for place, num_bytes in held_bytes(executor).items():
                    peaks[place] = max(peaks[place], num_bytes)

            return watched_action

        unwatched(executor, [watch(action) for action in actions])

    unwatched = Executor._run
    monkeypatch.setattr(Executor, "_run", watched)
    case = split_case()
    outcome = run(case, monkeypatch)
    check(case, outcome)

    program = outcome.engine.program
    assert by_stage(program).splitlines()[2] == (
        "r0.s2 | F0 b0 F1 b1 F2 b2 w0 F3 b3 w1 F4 b4 w2 F5 b5 w3 w4 w5"
    )
    parts = Counter(i.part for i in program.body if isinstance(i, Backward))
    assert parts == {Part.BOTH: 6, Part.INPUT: 18, Part.WEIGHT: 18}
    (replica,), layers = case.plan.replicas, chain(SHAPE)
    live = live_microbatches(case.plan.schedule, replica)
    handed = handed_microbatches(case.plan.schedule, replica)
    for (place, stage), now, late in zip(case.plan.stages(), live, handed, strict=True):
        samples = replica.microbatch_size // stage.lanes
        within = Within(
            profile=cluster().device(stage.devices[0]).profile,
            layers=layers.layers,
            joined=stage is replica.stages[-1],
        )
        kept = stage_activations(layers, within, stage, samples, now, late).kept
        assert 0.4 * kept <= peaks[place] <= kept, place


def zeros_of(arrays: Any) -> Any:
    """Shapes and integers as they are."""

    def zero(x: Any) -> Any:
        return x * 0 if isinstance(x, jax.Array) and x.dtype == "float32" else x

    return jax.tree.map(zero, arrays)


@pytest.mark.mutants
@pytest.mark.parametrize("lost", ["handed on", "weight part"])
def test_a_part_that_is_lost_is_seen(lost: str, monkeypatch: Any):
    hand_on, weight = Split.hand_on, Segment.backward_weight
    if lost == "handed on":
        monkeypatch.setattr(Split, "hand_on", lambda *args: zeros_of(hand_on(*args)))
    else:
        monkeypatch.setattr(
            Segment, "backward_weight", lambda *args: zeros_of(weight(*args))
        )
    case = split_case()
    with pytest.raises(AssertionError):
        check(case, run(case, monkeypatch))
