"""What an island is told, and what it makes of it."""

import dataclasses

import pytest

from hexijax.errors import UserError
from hexijax.islands.world import World


def world(**changes: object) -> World:
    given: dict[str, object] = {
        "name": "a",
        "islands": ("a", "b"),
        "run": "r",
        "generation": 0,
        "key": bytes(16),
        "peers": {"b": "127.0.0.1:1"},
    }
    return World(**(given | changes))


def test_ids_agree_on_both_sides_and_differ_in_everything_else():
    a = world()
    b = world(name="b", peers={"a": "127.0.0.1:2"})
    assert a.transfer_id(3, "body", 1) == b.transfer_id(3, "body", 1) < 2**63
    others = [
        a.transfer_id(3, "body", 2),
        a.transfer_id(31, "body", ""),
        dataclasses.replace(a, generation=1).transfer_id(3, "body", 1),
        dataclasses.replace(a, run="s").transfer_id(3, "body", 1),
        dataclasses.replace(a, key=bytes(15) + b"k").transfer_id(3, "body", 1),
    ]
    assert len({a.transfer_id(3, "body", 1), *others}) == 6
    assert a.session == b.session
    assert a.session != world(key=bytes(15) + b"k").session


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"name": "c"}, "Island 'c' is none of this run's: it has a, b."),
        ({"peers": {}}, "Island 'a' was told no transfer address of b"),
        ({"key": b"short"}, "The run's key has 5 bytes and needs at least 16"),
        ({"pull_s": 0.0}, "Waiting for another island was given 0.0 s"),
    ],
)
def test_what_does_not_hang_together_is_refused(changes: dict[str, object], said: str):
    with pytest.raises(UserError, match=said):
        world(**changes)


def test_the_key_is_not_printed():
    assert "key" not in repr(world())
