"""Pictures are drawn for any number of devices, and show all that is there."""

import pytest

from hexijax.report.judged import with_events
from hexijax.report.pictures import compared, draw
from hexijax.report.pictures.curves import at, draw_curves
from hexijax.report.pictures.machines import node_boxes
from hexijax.report.pictures.memory import PARTS
from hexijax.report.pictures.style import BUSY, BUSY_WORDS, IDLE, IDLE_WORDS
from hexijax.report.rows import rows, uses_by_queue
from hexijax.report.words import gib
from hexijax.simulator import Cause
from hexijax.simulator.uses import What
from tests.report.problems import make_judged, make_problem

PNG = b"\x89PNG\r\n\x1a\n"


def test_everything_that_happens_has_a_colour_and_a_word():
    assert BUSY.keys() == BUSY_WORDS.keys() == {*What}
    assert IDLE.keys() == IDLE_WORDS.keys() == {*Cause}
    assert len({*BUSY.values(), *IDLE.values()}) == len(What) + len(Cause)
    assert len({colour for _, colour in PARTS.values()}) == len(PARTS)


@pytest.mark.parametrize("nodes", [1, 16])
def test_pictures_are_files_and_repeat(nodes: int):
    judged = make_judged(make_problem([[("fast", 2)]] * nodes))
    drawn = draw(judged)
    assert drawn.keys() == {"plan", "timeline", "memory", "held"}
    assert all(png.startswith(PNG) for png in drawn.values())
    assert compared([judged] * 4).startswith(PNG)
    if nodes == 1:
        assert draw(judged) == drawn


def test_a_strip_shows_what_is_held_and_never_more_than_promised():
    judged = with_events(make_judged(), memory=True)
    made = draw_curves(judged)
    shown = [text.get_text() for axes in made.axes for text in axes.texts]
    assert shown
    for axes in made.axes:
        promised, usable = (line.get_ydata()[0] for line in axes.lines)
        tops = [
            path.vertices[:, 1].max()
            for area in axes.collections
            for path in area.get_paths()
        ]
        assert max(tops) <= promised <= usable
    for name, curve in judged.timeline.memory.items():
        assert at(curve, 0.0) == curve.num_bytes[0]
        assert at(curve, judged.step_s) == curve.num_bytes[-1]
        assert max(at(curve, time_s) for time_s in curve.times_s) == curve.peak_bytes
        held, promised = curve.peak_bytes, judged.memory[name].total_bytes
        line = f"at most {gib(held)} held, {gib(promised)} promised"
        assert any(line in text for text in shown)


def test_every_device_is_in_a_row_of_its_kind():
    judged = with_events(
        make_judged(make_problem([[("fast", 2)]] * 8 + [[("slow", 2)]] * 8))
    )
    found = rows(judged, uses_by_queue(judged), most=40)
    assert sorted(d for row in found for d in row.devices) == sorted(judged.used)
    cluster = judged.problem.cluster
    assert all(len({cluster.device(d).kind for d in r.devices}) == 1 for r in found)
    assert len(rows(judged, uses_by_queue(judged), most=1)) == 1


def test_copies_of_a_replica_share_a_row():
    judged = with_events(make_judged(make_problem([[("fast", 1)]] * 4)))
    shown = rows(judged, uses_by_queue(judged), most=40)
    assert [row.label for row in shown] == ["n0/0 and 3 more"]


def test_equal_nodes_are_drawn_once_and_unused_devices_have_no_role():
    judged = make_judged(
        make_problem([[("fast", 2)]] * 3 + [[("slow", 1)]], gb_per_s=1e-4)
    )
    boxes = node_boxes(judged.plan, judged.problem.cluster)
    roles = {box.title: [role for _, role in box.tiles] for box in boxes}
    unused = {name.split("/")[0] for name in judged.unused}
    assert unused
    assert "n3" in unused
    for title, its in roles.items():
        assert all(bool(role) != (title.split(" ")[0] in unused) for role in its)
