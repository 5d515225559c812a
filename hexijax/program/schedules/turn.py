"""What schedules are made of."""

import enum
from collections.abc import Sequence
from typing import NamedTuple


class Way(enum.StrEnum):
    """Forward, backward, or one part of a backward."""

    FORWARD = "F"
    BACKWARD = "B"
    INPUT = "b"
    WEIGHT = "w"


class Turn(NamedTuple):
    """One microbatch's pass through one stage of a replica, or one of its segments."""

    way: Way
    stage: int
    microbatch: int
    segment: int | None = None
    """None: all segments of the stage, in their order."""

    def __str__(self) -> str:
        segment = "" if self.segment is None else f".{self.segment}"
        return f"{self.way}{self.microbatch}{segment}"


Stream = tuple[Turn, ...]
"""Turns in the order in which one stage, or one set of devices, takes them."""


def forwards(stage: int, microbatches: Sequence[int]) -> list[Turn]:
    """A stage's forwards, in the order given."""
    return [Turn(Way.FORWARD, stage, m) for m in microbatches]


def backwards(stage: int, microbatches: Sequence[int]) -> list[Turn]:
    """A stage's backwards, in the order given."""
    return [Turn(Way.BACKWARD, stage, m) for m in microbatches]


def one_by_one(first: Sequence[Turn], second: Sequence[Turn], lead: int) -> Stream:
    """``lead`` of the first, then one of each in turn, then what is left."""
    turns = list(first[:lead])
    for i, turn in enumerate(second):
        turns += first[lead + i : lead + i + 1]
        turns.append(turn)
    return tuple(turns)
