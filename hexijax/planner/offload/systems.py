"""What published systems would choose, under our costs, beside ours.

    Profile -> SYSTEMS["zero-offload-like"] -> Scored, or None: nothing of its form fits

Written from what their papers say and tuned fairly: what a system can set is swept, and
each step is played as ours is. They keep gradients in float32, as our runtime does.
"""

import dataclasses
import math
from collections.abc import Callable, Iterable, Mapping

from hexijax.planner.offload.choice import (
    Choice,
    Kept,
    LayerChoice,
    Profile,
    State,
    Weights,
)
from hexijax.planner.offload.counts import best_counts
from hexijax.planner.offload.near import Allowed
from hexijax.planner.offload.order import Rule
from hexijax.planner.offload.score import Rules, Scored, scored

System = Callable[[Profile, float], Scored | None]
"""Its best choice that takes fewer seconds than asked."""

CHECKPOINTS = (Kept.NONE, Kept.FULL)
"""What PyTorch's systems can do with activations: the same for all blocks."""


def ours(profile: Profile, below_s: float = math.inf) -> Scored | None:
    """Everything is chosen, by counts."""
    best = best_counts(profile, below_s=below_s)
    return best.scored if best else None


def resident(profile: Profile, below_s: float = math.inf) -> Scored | None:
    """All on the device; what is kept for backwards is chosen."""
    allowed = Allowed(
        weights=(Weights.KEPT,),
        state=(State.DEVICE,),
        kept=(Kept.NONE, Kept.DOTS, Kept.FULL),
    )
    best = best_counts(profile, allowed, below_s=below_s)
    return best.scored if best else None


def zero_offload(profile: Profile, below_s: float = math.inf) -> Scored | None:
    """ZeRO-Offload (arXiv 2101.06840): all state on the host and updated there.

    Gradients leave as they are made; the host begins when it has all of them, and the
    next step when all new parameters have come.
    """
    placed = LayerChoice(state=State.HOST)
    return _best(
        dataclasses.replace(profile, early_updates=False),
        Rules(rule=Rule.FIFO, barrier=True),
        _under_checkpoints((placed,) * len(profile.layers)),
        below_s,
    )


def patrickstar(profile: Profile, below_s: float = math.inf) -> Scored | None:
    """PatrickStar (arXiv 2108.05818): chunks, where there is room by a warm-up's count.

    What the warm-up leaves over is parameters' first, then state's; chunks that are not
    there are fetched when they are needed. Updates come after the backward, each where
    its state is.
    """
    depth = len(profile.layers)

    def placed() -> Iterable[Choice]:
        for kept in range(depth + 1):
            yield tuple(
                LayerChoice(
                    weights=Weights.KEPT if i < kept else Weights.STREAMED,
                    state=State.HOST,
                )
                for i in range(depth)
            )
        for stored in range(1, depth + 1):
            yield tuple(
                LayerChoice(state=State.DEVICE if i < stored else State.HOST)
                for i in range(depth)
            )

    return _best(
        dataclasses.replace(profile, early_updates=False),
        Rules(rule=Rule.FIFO, barrier=True, on_demand=True),
        (x for choice in placed() for x in _under_checkpoints(choice)),
        below_s,
    )


def stronghold(profile: Profile, below_s: float = math.inf) -> Scored | None:
    """StrongHold (SC 2022): a window of layers stays on the device, the others come and
    go; the host updates theirs as gradients arrive, in that order."""
    depth = len(profile.layers)
    windows = (
        tuple(
            LayerChoice()
            if i < window
            else LayerChoice(weights=Weights.STREAMED, state=State.HOST)
            for i in range(depth)
        )
        for window in range(depth)
    )
    return _best(
        profile,
        Rules(rule=Rule.FIFO),
        (x for choice in windows for x in _under_checkpoints(choice)),
        below_s,
    )


SYSTEMS: Mapping[str, System] = {
    "ours": ours,
    "zero-offload-like": zero_offload,
    "patrickstar-like": patrickstar,
    "stronghold-like": stronghold,
    "resident": resident,
}
"""By the name under which tables print them."""


def _under_checkpoints(choice: Choice) -> Iterable[Choice]:
    """The choice with activations kept, or recomputed but for the last layer's."""
    for kept in CHECKPOINTS:
        yield tuple(dataclasses.replace(layer, kept=kept) for layer in choice)


def _best(
    profile: Profile, rules: Rules, choices: Iterable[Choice], below_s: float
) -> Scored | None:
    """The fastest that fits."""
    best: Scored | None = None
    for choice in choices:
        found = scored(profile, choice, rules, quick=True, below_s=below_s)
        if found and found.step_s < below_s:
            best, below_s = found, found.step_s
    return best
