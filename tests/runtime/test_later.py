"""What the host's processor computes, and what only hands it on, holds up nothing."""

import threading

from hexijax.runtime.later import Later, later, once_there, value


def test_what_hands_on_a_result_to_come_is_left_to_the_worker():
    gate = threading.Event()
    (made,) = later(lambda: (gate.wait(60) and 3,), 1)
    doubled, other = once_there(lambda x, y: (2 * x, y), [made, 5], 2)
    (again,) = once_there(lambda x: (x + 1,), [doubled], 1)
    assert isinstance(again, Later)  # and nobody has waited
    gate.set()
    assert (value(again), value(other)) == (7, 5)


def test_an_update_does_not_wait_for_what_hands_on_the_one_before():
    gate = threading.Event()
    (first,) = later(lambda: (3,), 1)
    (handed,) = once_there(lambda x: (gate.wait(60) and x,), [first], 1)
    (second,) = later(lambda: (4,), 1)
    assert value(second) == 4
    gate.set()
    assert value(handed) == 3


def test_what_is_there_is_handed_on_at_once():
    assert once_there(lambda x: (2 * x,), [3], 1) == (6,)
