"""Schedules, by eye and by law."""

import math
from collections.abc import Callable, Mapping, Sequence

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from hexijax.plan.plan import Schedule
from hexijax.planner.pace import pipeline_s
from hexijax.program.schedules import SCHEDULES, Stream, Turn, Way
from hexijax.program.schedules.eager import eager
from hexijax.program.schedules.interleaved import interleaved
from hexijax.program.schedules.layered import layered
from hexijax.program.schedules.one_f_one_b import one_f_one_b
from hexijax.program.schedules.zero_bubble import zero_bubble


def rows(streams: tuple[Stream, ...]) -> list[str]:
    """Streams as text; the letter of a shared set's stage leads: ``b.F0``."""
    several = any(len({t.stage for t in stream}) > 1 for stream in streams)
    return [
        " ".join(f"{'abcdef'[t.stage]}.{t}" if several else str(t) for t in stream)
        for stream in streams
    ]


Event = tuple[Way, int, int]


def event(turn: Turn) -> Event:
    """What the others wait for: an input part hands back what a backward does."""
    way = Way.BACKWARD if turn.way is Way.INPUT else turn.way
    return way, turn.stage, turn.microbatch


def waits(turn: Turn, num_stages: int) -> tuple[list[Event], list[Event]]:
    """What a turn waits for on its own stage, and on a neighbour."""
    stage, m = turn.stage, turn.microbatch
    match turn.way:
        case Way.FORWARD:
            return [], [(Way.FORWARD, stage - 1, m)] if stage else []
        case Way.WEIGHT:
            return [(Way.BACKWARD, stage, m)], []
        case _:
            later = [(Way.BACKWARD, stage + 1, m)] if stage < num_stages - 1 else []
            return [(Way.FORWARD, stage, m)], later


UNIT = {Way.FORWARD: 1.0, Way.BACKWARD: 2.0, Way.INPUT: 1.0, Way.WEIGHT: 1.0}
"""Seconds of a stage's turns."""


def ticks(streams: tuple[Stream, ...], num_stages: int) -> float:
    """When the last turn of alike stages ends."""
    return played(streams, [UNIT] * num_stages)[0]


def played(
    streams: tuple[Stream, ...],
    seconds: Sequence[Mapping[Way, float]],
    move_s: float = 0.0,
) -> tuple[float, dict[Event, float]]:
    """Plays streams: when all and each of their turns end; fails on a deadlock."""
    num_stages = len(seconds)
    ends: dict[tuple[Way, int, int], float] = {}
    at, clock = [0] * len(streams), [0.0] * len(streams)
    moved = True
    while moved:
        moved = False
        for i, stream in enumerate(streams):
            while at[i] < len(stream):
                turn = stream[at[i]]
                own, others = waits(turn, num_stages)
                if not all(wait in ends for wait in own + others):
                    break
                arrived = [ends[wait] + move_s for wait in others]
                start = max([clock[i], *(ends[wait] for wait in own), *arrived])
                clock[i] = start + seconds[turn.stage][turn.way]
                ends[event(turn)] = clock[i]
                at[i] += 1
                moved = True
    assert at == [len(stream) for stream in streams], "deadlock"
    return max(clock), ends


def test_1f1b_warms_up_alternates_and_drains():
    assert rows(one_f_one_b([0, 1, 2], 4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_eager_1f1b_warms_up_with_two_more_microbatches_a_stage():
    assert rows(eager([0, 1, 2], 6)) == [
        "F0 F1 F2 F3 F4 B0 F5 B1 B2 B3 B4 B5",
        "F0 F1 F2 B0 F3 B1 F4 B2 F5 B3 B4 B5",
        "F0 B0 F1 B1 F2 B2 F3 B3 F4 B4 F5 B5",
    ]


def test_gpipe_goes_forward_then_back():
    assert rows(SCHEDULES[Schedule.GPIPE]([0, 1], 3)) == ["F0 F1 F2 B0 B1 B2"] * 2


def test_interleaved_passes_groups_through_both_stages_of_a_set():
    assert rows(interleaved([0, 1, 0, 1], 2)) == [
        "a.F0 a.F1 c.F0 c.F1 c.B0 c.B1 a.B0 a.B1",
        "b.F0 b.F1 d.F0 d.B0 d.F1 d.B1 b.B0 b.B1",
    ]


def test_zero_bubble_runs_weight_parts_as_many_microbatches_late_as_stages_before():
    assert rows(zero_bubble([0, 1, 2], 5)) == [
        "F0 F1 F2 B0 F3 B1 F4 B2 B3 B4",
        "F0 F1 b0 F2 b1 w0 F3 b2 w1 F4 b3 w2 b4 w3 w4",
        "F0 b0 F1 b1 F2 b2 w0 F3 b3 w1 F4 b4 w2 w3 w4",
    ]


def test_layered_runs_all_microbatches_of_a_segment_before_the_next():
    assert rows(layered([0], 3, [3])) == [
        "F0.0 F1.0 F2.0 F0.1 F1.1 F2.1 "
        "F0.2 B0.2 F1.2 B1.2 F2.2 B2.2 "
        "B0.1 B1.1 B2.1 B0.0 B1.0 B2.0"
    ]


def test_layered_takes_the_short_stages_of_a_set_one_after_another():
    assert rows(layered([0, 1, 0, 1], 2, [1, 1, 1, 1])) == [
        "a.F0.0 a.F1.0 c.F0.0 c.F1.0 c.B0.0 c.B1.0 a.B0.0 a.B1.0",
        "b.F0.0 b.F1.0 d.F0.0 d.B0.0 d.F1.0 d.B1.0 b.B0.0 b.B1.0",
    ]


@given(data=st.data())
def test_layered_never_waits_for_ever_whatever_sets_stages_share(data: st.DataObject):
    num_sets = data.draw(st.integers(1, 4))
    sets = data.draw(st.lists(st.integers(0, num_sets - 1), min_size=1, max_size=9))
    numbers = {device_set: i for i, device_set in enumerate(dict.fromkeys(sets))}
    streams = layered(
        [numbers[s] for s in sets], data.draw(st.integers(1, 6)), [1] * len(sets)
    )
    ticks(streams, len(sets))


@given(num_stages=st.integers(1, 9), num_microbatches=st.integers(1, 16))
def test_zero_bubble_holds_few_and_leaves_a_third_of_the_bubble(
    num_stages: int, num_microbatches: int
):
    streams = zero_bubble(range(num_stages), num_microbatches)
    for k, stream in enumerate(streams):
        done = {turn: i for i, turn in enumerate(stream)}
        assert len(done) == len(stream) == (2 if k == 0 else 3) * num_microbatches
        held, late = [0], [0]
        for turn in stream:
            held.append(held[-1] + (turn.way is Way.FORWARD))
            held[-1] -= turn.way in (Way.BACKWARD, Way.INPUT)
            late.append(late[-1] + (turn.way is Way.INPUT))
            late[-1] -= turn.way is Way.WEIGHT
        assert max(held) == min(num_stages - k, num_microbatches)
        assert max(late) == (min(k + 1, num_microbatches) if k else 0)
        assert max(map(sum, zip(held, late, strict=True))) <= num_stages
    plain = one_f_one_b(range(num_stages), num_microbatches)
    took = ticks(streams, num_stages)
    assert took <= ticks(plain, num_stages)
    if num_microbatches >= num_stages:
        assert took == 3 * num_microbatches + num_stages - 1


@given(data=st.data())
def test_zero_bubble_hands_back_no_later_than_1f1b_whatever_stages_take(
    data: st.DataObject,
):
    num_stages, count = data.draw(st.integers(2, 7)), data.draw(st.integers(1, 10))
    some = st.integers(0, 9).map(float)
    seconds: list[Mapping[Way, float]] = []
    for _ in range(num_stages):
        forward_s, input_s, weight_s = (data.draw(some) for _ in range(3))
        whole_s = input_s + weight_s
        seconds.append(
            dict(zip(Way, (forward_s, whole_s, input_s, weight_s), strict=True))
        )
    move_s = data.draw(some)
    _, plain = played(one_f_one_b(range(num_stages), count), seconds, move_s)
    _, split = played(zero_bubble(range(num_stages), count), seconds, move_s)
    assert all(split[turn] <= end for turn, end in plain.items())


@pytest.mark.parametrize("device_sets", [[0, 1, 0], [0, 1, 1, 0], [0, 0, 1, 1]])
def test_interleaved_falls_back_where_sets_do_not_take_turns(device_sets: list[int]):
    assert interleaved(device_sets, 3) == one_f_one_b(device_sets, 3)


@given(num_stages=st.integers(1, 8), num_microbatches=st.integers(1, 12))
def test_1f1b_holds_few_and_takes_the_ideal_time(
    num_stages: int, num_microbatches: int
):
    streams = one_f_one_b(range(num_stages), num_microbatches)
    for k, stream in enumerate(streams):
        held = [0]
        for turn in stream:
            held.append(held[-1] + (1 if turn.way is Way.FORWARD else -1))
        assert max(held) == min(num_stages - k, num_microbatches)
    assert ticks(streams, num_stages) == 3 * (num_microbatches + num_stages - 1)


@given(
    num_stages=st.integers(1, 7),
    num_microbatches=st.integers(1, 16),
    forward_s=st.integers(1, 9),
    backward_s=st.integers(1, 18),
    move_s=st.integers(0, 12),
)
def test_eager_1f1b_is_never_slower_where_stages_are_alike(
    num_stages: int, num_microbatches: int, forward_s: int, backward_s: int, move_s: int
):
    seconds = [{Way.FORWARD: forward_s, Way.BACKWARD: backward_s}] * num_stages
    early, plain = (
        played(schedule(range(num_stages), num_microbatches), seconds, move_s)[0]
        for schedule in (eager, one_f_one_b)
    )
    assert early <= plain
    if move_s == 0:
        assert early == plain
    for k, stream in enumerate(eager(range(num_stages), num_microbatches)):
        held = [0]
        for turn in stream:
            held.append(held[-1] + (1 if turn.way is Way.FORWARD else -1))
        assert max(held) == min(2 * (num_stages - k) - 1, num_microbatches)


@settings(max_examples=60)
@given(data=st.data())
@pytest.mark.parametrize(("schedule", "ahead"), [(one_f_one_b, 1), (eager, 2)])
def test_the_pace_is_that_of_a_long_pipeline(
    schedule: Callable[[Sequence[int], int], tuple[Stream, ...]],
    ahead: int,
    data: st.DataObject,
):
    num_stages = data.draw(st.integers(1, 4))
    some = st.integers(1, 9).map(float)
    seconds = [
        {Way.FORWARD: data.draw(some), Way.BACKWARD: data.draw(some)}
        for _ in range(num_stages)
    ]
    stage_s = [each[Way.FORWARD] + each[Way.BACKWARD] for each in seconds]
    # Moves pass each other in these plays, so that none may set the pace.
    move_s = float(data.draw(st.integers(0, int(max(stage_s)))))
    cycle = math.lcm(*(ahead * n + 1 for n in range(num_stages)))
    short_s, long_s = (
        played(schedule(range(num_stages), count), seconds, move_s)[0]
        for count in (50, 50 + cycle)
    )
    _, pace_s = pipeline_s(
        stage_s, [move_s] * (num_stages - 1), num_stages, ahead=ahead
    )
    assert (long_s - short_s) / cycle == pytest.approx(pace_s)


@given(
    num_sets=st.integers(1, 6),
    num_rounds=st.integers(1, 4),
    num_microbatches=st.integers(1, 20),
)
def test_interleaved_never_deadlocks_and_beats_1f1b_on_whole_groups(
    num_sets: int, num_rounds: int, num_microbatches: int
):
    num_stages = num_sets * num_rounds
    streams = interleaved([k % num_sets for k in range(num_stages)], num_microbatches)
    assert sum(map(len, streams)) == 2 * num_stages * num_microbatches
    assert len({t for stream in streams for t in stream}) == sum(map(len, streams))
    took = ticks(streams, num_stages)
    if num_microbatches % num_sets == 0:  # the bubble is that of one round
        assert took == 3 * (num_rounds * num_microbatches + num_sets - 1)
