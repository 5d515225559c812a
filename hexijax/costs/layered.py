"""Gradients that a place holds where its segments run all microbatches one by one.

    Plan, Chain, buckets -> LayeredGrads -> place -> what stays, what leaves

A segment's accumulators are born in its backward pass and die when their sum has left,
before the pass after the next begins (``program.window``). A sum is at its home until
the update, which may wait for all others'.
"""

import collections
import itertools
from collections.abc import Mapping

from hexijax.layers.chain import Chain, Group
from hexijax.plan.plan import Place, Plan
from hexijax.program.buckets import layer_segments, user_segments
from hexijax.program.window import PASSES


class LayeredGrads:
    """Of one plan; in numbers of parameters on a device."""

    def __init__(self, plan: Plan, chain: Chain) -> None:
        self._segments_L = layer_segments(plan, len(chain.layers))
        self._stages = dict(plan.stages())
        self._one_pass: dict[str, Mapping[Place, int]] = {}
        self._stays: dict[Place, int] = {}
        self._leaving: dict[Place, list[int]] = {
            place: [0] * len(stage.segments) for place, stage in self._stages.items()
        }

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
        segment = None if alone else self._passes(group).get(place)
        stays = shard if alone else size
        if segment is not None:
            self._leaving[place][segment] += shard
        elif not alone:
            stays += shard
        self._stays[place] = self._stays.get(place, 0) + stays

    def _passes(self, group: Group) -> Mapping[Place, int]:
        """The segment of each place, where each replica uses the bucket in one."""
        if group.name not in self._one_pass:
            users = user_segments(self._segments_L, group)
            replicas = {place.split(".")[0] for place, _ in users}
            once = len(replicas) == len(users)
            self._one_pass[group.name] = dict(users) if once else {}
        return self._one_pass[group.name]

    def sizes(self) -> dict[Place, tuple[int, int]]:
        """Of each place that uses some."""
        shared = collections.Counter(s.devices for s in self._stages.values())
        found: dict[Place, tuple[int, int]] = {}
        for place, stays in self._stays.items():
            sizes = self._leaving[place]
            most = max(map(sum, itertools.pairwise([0, *sizes])))
            if shared[self._stages[place].devices] > 1:  # the last was another stage's
                most = PASSES * max(sizes)
            found[place] = stays, most
        return found
