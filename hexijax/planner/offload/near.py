"""Counts as choices, and choices one count away.

ways of keeping residuals, streamed layers, where state goes -> counted -> Choice
Choice -> near -> Choices
"""

import dataclasses
from collections.abc import Iterator, Sequence

from hexijax.planner.offload.choice import (
    Choice,
    Kept,
    LayerChoice,
    State,
    Weights,
)

STEPS = (1, -1, 3, -3)
"""By which a count is varied."""

LIGHTEST_FIRST = (Kept.HOST, Kept.FULL, Kept.DOTS, Kept.NONE)
"""Ways of keeping residuals along a chain."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Allowed:
    """What a choice may use."""

    weights: tuple[Weights, ...] = tuple(Weights)
    state: tuple[State, ...] = tuple(State)
    kept: tuple[Kept, ...] = tuple(Kept)

    @property
    def ways(self) -> list[Kept]:
        """Of keeping residuals, in the order of a chain."""
        return [kept for kept in LIGHTEST_FIRST if kept in self.kept]

    def splits(self, depth: int) -> list[tuple[int, int]]:
        """(first layer with state on the host, first that the host updates)."""
        return [
            (s, u)
            for s in range(depth + 1)
            for u in range(s, depth + 1)
            if (s == 0 or State.DEVICE in self.state)
            and (u == s or State.STREAMED in self.state)
            and (u == depth or State.HOST in self.state)
        ]

    def streams(self, depth: int) -> Iterator[tuple[bool, ...]]:
        """Layers whose parameters are streamed: none, the last ones, or as many spread
        evenly."""
        kept = Weights.KEPT in self.weights
        if kept:
            yield (False,) * depth
        if Weights.STREAMED not in self.weights:
            return
        for count in range(1 if kept else depth, depth + 1):
            last = tuple(i >= depth - count for i in range(depth))
            even = tuple(
                (i + 1) * count // depth > i * count // depth for i in range(depth)
            )
            yield from dict.fromkeys((last, even))


def counted(
    kept: Sequence[Kept],
    streamed: Sequence[bool],
    split: tuple[int, int],
    stays: Sequence[bool],
) -> Choice:
    """The choice that counts stand for.

    Args:
      kept: of each layer.
      streamed: whether its parameters are.
      split: first layer with state on the host, first that the host updates.
      stays: layers whose state is never streamed.
    """
    s, u = split

    def state(i: int) -> State:
        if i >= u:
            return State.HOST
        return State.DEVICE if i < s or stays[i] else State.STREAMED

    return tuple(
        LayerChoice(
            weights=Weights.STREAMED if streamed[i] else Weights.KEPT,
            state=state(i),
            kept=kept[i],
        )
        for i in range(len(kept))
    )


def near(
    choice: Choice, allowed: Allowed, stays: Sequence[bool] | None = None
) -> Iterator[Choice]:
    """Choices one count away.

    Args:
      choice: of counts.
      allowed: what they may use.
      stays: layers whose state is never streamed; None: as the choice has it.
    """
    depth = len(choice)
    states = [c.state for c in choice]
    u = depth - states.count(State.HOST)
    s = next((i for i in range(u) if states[i] is State.STREAMED), u)
    if stays is None:
        stays = [s < i < u and states[i] is State.DEVICE for i in range(depth)]
    kept = tuple(c.kept for c in choice)
    on = tuple(c.weights is Weights.STREAMED for c in choice)
    edges = [i for i in range(1, depth) if kept[i] is not kept[i - 1]]
    splits = set(allowed.splits(depth))
    for step in STEPS:
        for moved in ((s + step, max(u, s + step)), (s, u + step)):
            if moved in splits:
                yield counted(kept, on, moved, stays)
        for edge in edges:
            to = min(max(0, edge + step), depth)
            side = kept[edge] if step < 0 else kept[edge - 1]
            low, high = sorted((edge, to))
            other = (*kept[:low], *(side,) * (high - low), *kept[high:])
            yield counted(other, on, (s, u), stays)
        for way in allowed.ways:  # a few at either end kept otherwise
            few = min(abs(step), depth)
            first, last = (way,) * few, kept[few:]
            if step < 0:
                first, last = kept[: depth - few], (way,) * few
            yield counted((*first, *last), on, (s, u), stays)
    for stream in allowed.streams(depth):
        if 0 < abs(sum(stream) - sum(on)) <= max(STEPS):
            yield counted(kept, stream, (s, u), stays)
