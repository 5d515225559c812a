"""From a cold start: what is timed, and a watched step beside its prediction."""

import json

from experiments.bench_cold import measured_on
from experiments.cold import table
from experiments.timeline_picture import picture, tracks
from hexijax.simulator.trace import Slice, write_slices

FOUND = {"profile_s": 90.0, "first": {"first_step_s": 50.0}, "second": None}


def test_only_what_was_timed_is_held_against_its_aim():
    profile, first = table.figures(FOUND)
    assert profile.name == "cold start, profile: seconds"
    assert (profile.measured, profile.bound, profile.at_most) == (90.0, 300, True)
    assert (first.measured, first.bound) == (50.0, 45)


def test_a_launch_that_never_made_a_step_has_no_figure():
    failed = {"first": {"first_step_s": None, "whole_s": 3.0}}
    assert not [*table.figures(failed)]


def test_the_card_is_the_one_of_the_profile(tmp_path):
    file = tmp_path / "profile.toml"
    file.write_text(
        '[measured]\ncard-kind = { card = "NVIDIA H200", jax = "0.11.2" }\n'
    )
    assert measured_on(file) == {"card": "NVIDIA H200", "jax": "0.11.2"}


def traced(tmp_path):
    """Two devices, each with a forward as predicted and as measured; one copy."""
    file = tmp_path / "trace.json"
    slices = [
        Slice(device, f"1 computes: {when}", "F", "forward", 0.0, end_s)
        for device in ("box/0", "box/1")
        for when, end_s in (("as predicted", 1.0), ("measured", 1.5))
    ]
    slices.append(Slice("box/0", "2 moves: measured", "S", "move", 1.0, 2.0))
    write_slices(file, slices)
    return json.loads(file.read_text())["traceEvents"]


def test_predicted_and_measured_rows_of_a_device_stand_together(tmp_path):
    rows = tracks(traced(tmp_path))
    assert [(row.device, row.queue, row.when, row.end_s) for row in rows] == [
        ("box/0", "computes", "predicted", 1.0),
        ("box/0", "computes", "measured", 1.5),
        ("box/0", "moves", "measured", 2.0),
        ("box/1", "computes", "predicted", 1.0),
        ("box/1", "computes", "measured", 1.5),
    ]


def test_equal_traces_are_equal_pictures(tmp_path):
    events = traced(tmp_path)
    made = picture(events, "A step")
    assert made.startswith(b"\x89PNG")
    assert made == picture(events, "A step")
    assert made != picture(events, "Another step")
