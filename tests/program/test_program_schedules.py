"""Schedules, by eye and by law."""

import pytest
from hypothesis import given
from hypothesis import strategies as st

from hexijax.plan.plan import Schedule
from hexijax.program.schedules import SCHEDULES, Stream, Way
from hexijax.program.schedules.interleaved import interleaved
from hexijax.program.schedules.one_f_one_b import one_f_one_b


def rows(streams: tuple[Stream, ...]) -> list[str]:
    """Streams as text; the letter of a shared set's stage leads: ``b.F0``."""
    several = any(len({t.stage for t in stream}) > 1 for stream in streams)
    return [
        " ".join(f"{'abcdef'[t.stage]}.{t}" if several else str(t) for t in stream)
        for stream in streams
    ]


def ticks(streams: tuple[Stream, ...], num_stages: int) -> int:
    """Plays streams with forwards of 1 and backwards of 2; fails on a deadlock."""
    ends: dict[tuple[Way, int, int], int] = {}
    at, clock = [0] * len(streams), [0] * len(streams)
    moved = True
    while moved:
        moved = False
        for i, stream in enumerate(streams):
            while at[i] < len(stream):
                turn = stream[at[i]]
                waits = []
                if turn.way is Way.FORWARD and turn.stage > 0:
                    waits = [(Way.FORWARD, turn.stage - 1, turn.microbatch)]
                if turn.way is Way.BACKWARD:
                    waits = [(Way.FORWARD, turn.stage, turn.microbatch)]
                    if turn.stage < num_stages - 1:
                        waits += [(Way.BACKWARD, turn.stage + 1, turn.microbatch)]
                if not all(wait in ends for wait in waits):
                    break
                start = max([clock[i], *(ends[wait] for wait in waits)])
                clock[i] = start + (1 if turn.way is Way.FORWARD else 2)
                ends[turn.way, turn.stage, turn.microbatch] = clock[i]
                at[i] += 1
                moved = True
    assert at == [len(stream) for stream in streams], "deadlock"
    return max(clock)


def test_1f1b_warms_up_alternates_and_drains():
    assert rows(one_f_one_b([0, 1, 2], 4)) == [
        "F0 F1 F2 B0 F3 B1 B2 B3",
        "F0 F1 B0 F2 B1 F3 B2 B3",
        "F0 B0 F1 B1 F2 B2 F3 B3",
    ]


def test_gpipe_goes_forward_then_back():
    assert rows(SCHEDULES[Schedule.GPIPE]([0, 1], 3)) == ["F0 F1 F2 B0 B1 B2"] * 2


def test_interleaved_passes_groups_through_both_stages_of_a_set():
    assert rows(interleaved([0, 1, 0, 1], 2)) == [
        "a.F0 a.F1 c.F0 c.F1 c.B0 c.B1 a.B0 a.B1",
        "b.F0 b.F1 d.F0 d.B0 d.F1 d.B1 b.B0 b.B1",
    ]


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
