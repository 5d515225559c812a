"""What a choice takes of device and host memory.

    Profile, Choice -> Room: what lies there all step, and what each pass adds to it

Gradients are counted by how many bytes of them may be alive at once. Where a step has
several microbatches that is all of them; else each lives from its backward to its
update, and the fewer may wait, the sooner updates must follow.
"""

import dataclasses
import functools
import itertools

from hexijax.planner.offload.choice import (
    GRAD_BYTES,
    RESIDUAL_SLOTS,
    WEIGHT_SLOTS,
    Choice,
    Kept,
    Profile,
    State,
    Weights,
)


@dataclasses.dataclass(frozen=True)
class Room:
    """Bytes of a choice."""

    profile: Profile
    choice: Choice

    @functools.cached_property
    def resting_bytes(self) -> int:
        """On the device all step: parameters, state, and the pools of what passes."""
        pairs = [*zip(self.profile.layers, self.choice, strict=True)]
        kept = sum(x.weights_bytes for x, c in pairs if c.weights is Weights.KEPT)
        passing = max(
            (x.weights_bytes for x, c in pairs if c.weights is Weights.STREAMED),
            default=0,
        )
        returning = max(
            (
                x.weights_bytes
                for x, c in pairs
                if c.state is State.HOST and c.weights is Weights.KEPT and x.trains
            ),
            default=0,
        )
        state = sum(x.state_bytes for x, c in pairs if c.state is State.DEVICE)
        leaving = [x.kept_bytes[c.kept.remat] for x, c in pairs if c.kept is Kept.HOST]
        return (
            self.profile.fixed_bytes
            + kept
            + WEIGHT_SLOTS * passing
            + returning
            + state
            + self.chunks_bytes
            + RESIDUAL_SLOTS * max(leaving, default=0)
        )

    @functools.cached_property
    def chunks_bytes(self) -> int:
        """The pool of streamed state."""
        pairs = zip(self.profile.layers, self.choice, strict=True)
        streamed = (x for x, c in pairs if c.state is State.STREAMED and x.trains)
        largest = max((x.chunk_bytes for x in streamed), default=0)
        return self.profile.chunks * largest

    @functools.cached_property
    def depths_bytes(self) -> tuple[int, ...]:
        """At each layer, what is kept of it and of those before it, and its working
        memory."""
        kept = [
            0 if chosen.kept is Kept.HOST else own.kept_bytes[chosen.kept.remat]
            for own, chosen in zip(self.profile.layers, self.choice, strict=True)
        ]
        working = [
            own.working_bytes[chosen.kept.remat]
            for own, chosen in zip(self.profile.layers, self.choice, strict=True)
        ]
        return tuple(
            a + b for a, b in zip(itertools.accumulate(kept), working, strict=True)
        )

    @property
    def _all_stay(self) -> bool:
        return self.profile.grads_stay or self.profile.microbatches > 1

    @functools.cached_property
    def waiting_bytes(self) -> tuple[int, ...]:
        """At each layer's passes, gradients that may be alive if none need hurry."""
        layers = self.profile.layers
        grads = [own.grads_bytes if own.trains else 0 for own in layers]
        if self._all_stay:
            return (sum(grads),) * len(layers)
        by_last = [0] * len(layers)
        for i, size in enumerate(grads):
            by_last[max(i, layers[i].last_user or 0)] += size
        sums = [*itertools.accumulate(reversed(by_last))]
        return tuple(reversed(sums))

    @functools.cached_property
    def least_limit_bytes(self) -> int:
        """Fewest bytes of gradients with which a step can run: the largest one, beside
        those that later layers share with earlier ones."""
        grads = [x.grads_bytes for x in self.profile.layers if x.trains]
        if self._all_stay:
            return sum(grads)
        tied = sum(
            x.grads_bytes
            for x in self.profile.layers
            if x.trains and x.last_user is not None
        )
        return tied + max(grads, default=0)

    def peak_bytes(self, limit_bytes: float) -> int:
        """The most on the device with at most so many bytes of gradients alive."""
        return self.resting_bytes + max(
            int(depth + min(limit_bytes, waiting))
            for depth, waiting in zip(
                self.depths_bytes, self.waiting_bytes, strict=True
            )
        )

    @functools.cached_property
    def host_bytes(self) -> int:
        """Of host memory: what rests there, and what passes through it."""
        layers, total = self.profile.layers, 0
        largest = 0
        for own, chosen in zip(layers, self.choice, strict=True):
            if chosen.weights is Weights.STREAMED:
                total += own.weights_bytes
            if chosen.state is not State.DEVICE and own.trains:
                total += own.state_bytes
            if chosen.state is State.HOST and own.trains:
                grads = own.homed_params * GRAD_BYTES
                total += grads
                # What an update makes lies beside what it reads.
                largest = max(largest, own.state_bytes + own.weights_bytes)
            if chosen.kept is Kept.HOST:
                total += own.kept_bytes[chosen.kept.remat]
        return total + largest + self.chunks_bytes
