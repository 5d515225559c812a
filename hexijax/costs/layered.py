"""Gradients that a place holds where its segments run all microbatches one by one.

    Plan, Chain, buckets -> LayeredGrads -> place -> what stays, leaves, and grows

A segment's accumulators are born in its backward pass and die when their sum has left,
before the pass after the next begins (``program.window``). A sum is at its home until
the update, which may wait for all others'; or, where the stage says of how many passes
there is room, until so many passes later.
"""

import collections
import itertools
from collections.abc import Mapping, Sequence
from typing import NamedTuple

from hexijax.layers.chain import Chain, Group
from hexijax.plan.plan import Place, Plan
from hexijax.program.buckets import layer_segments, user_segments
from hexijax.program.window import PASSES


class Sizes(NamedTuple):
    """Of one place; in numbers of parameters on a device."""

    stays: int
    """All step, or of the few passes there is room for."""

    leaving: int
    """Accumulators that are leaving for a sum elsewhere."""

    grows: tuple[int, ...]
    """Sums that each segment's backward leaves, until the update."""


class LayeredGrads:
    """Of one plan; in numbers of parameters on a device."""

    def __init__(self, plan: Plan, chain: Chain) -> None:
        self._segments_L = layer_segments(plan, len(chain.layers))
        self._stages = dict(plan.stages())
        self._one_pass: dict[str, Mapping[Place, int]] = {}
        self._stays: dict[Place, int] = {}
        self._leaving, self._windowed, self._grows = (
            {p: [0] * len(stage.segments) for p, stage in self._stages.items()}
            for _ in range(3)
        )

    def add(
        self, group: Group, place: Place, shard: int, size: int, *, alone: bool
    ) -> None:
        """A bucket at one of its users.

        Args:
          group: the bucket.
          place: the user.
          shard: parameters that it computes with.
          size: those whose sum is at home here.
          alone: the accumulator is the sum.
        """
        segment, stays = self._passes(group).get(place), 0
        if segment is not None and not alone:
            self._leaving[place][segment] += shard
        elif not alone:
            stays += shard
        here = shard if alone else size
        if segment is None:
            stays += here
        elif self._stages[place].grads:
            self._windowed[place][segment] += here
        else:
            self._grows[place][segment] += here
        self._stays[place] = self._stays.get(place, 0) + stays

    def ends(self, group: Group, place: Place) -> bool:
        """Whether a bucket's sum ends some passes after its own at a user."""
        return bool(self._stages[place].grads) and place in self._passes(group)

    def _passes(self, group: Group) -> Mapping[Place, int]:
        """The segment of each place, where each replica uses the bucket in one."""
        if group.name not in self._one_pass:
            users = user_segments(self._segments_L, group)
            replicas = {place.split(".")[0] for place, _ in users}
            once = len(replicas) == len(users)
            self._one_pass[group.name] = dict(users) if once else {}
        return self._one_pass[group.name]

    def sizes(self) -> dict[Place, Sizes]:
        """Of each place that uses some."""
        shared = collections.Counter(s.devices for s in self._stages.values())
        found: dict[Place, Sizes] = {}
        for place, stays in self._stays.items():
            sizes = self._leaving[place]
            most = max(map(sum, itertools.pairwise([0, *sizes])))
            if shared[self._stages[place].devices] > 1:  # the last was another stage's
                most = PASSES * max(sizes)
            most_sums = _most_together(self._windowed[place], self._stages[place].grads)
            found[place] = Sizes(stays + most_sums, most, tuple(self._grows[place]))
        return found


def _most_together(sizes: Sequence[int], passes: int) -> int:
    """Of so many that follow each other."""
    starts = range(max(1, len(sizes) - passes + 1))
    return max(sum(sizes[at : at + passes]) for at in starts)
