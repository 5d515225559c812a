"""Loss scales: what keeps float16's small gradients above zero.

    what an experiment asks for, compute dtypes of the stages -> loss_scale -> a scale

float16 has no number between 0 and 6e-8 and none above 65504, while gradients of a mean
loss are small: the loss is multiplied before the backward and gradients are divided
after it (Micikevicius et al., arXiv 1710.03740). A dynamic scale is searched for as
training goes: halved in a step that overflows, which is left out, and doubled after
many that did not. There is one scale for all devices: gradients of unlike stages are
added up and clipped together.
"""

from collections.abc import Iterable
from typing import Literal

DYNAMIC: Literal["dynamic"] = "dynamic"
"""A scale that is searched for."""

STATE_KEY = "loss_scale"
"""Of a dynamic scale among a run's stored arrays."""

FIRST_SCALE = 2.0**16
"""A dynamic scale begins here: as PyTorch's ``GradScaler`` and Flax's ``DynamicScale``.
Too large as a rule, which some skipped steps correct; too small would take thousands.
"""

GOOD_STEPS = 2000
"""Steps in a row without overflow, after which it doubles: as in both of these."""

LEAST_SCALE, MOST_SCALE = 1.0, 2.0**24
"""Bounds. Below 1 gradients vanish that float16 holds as they are: overflow then has
another cause. The upper one is that of NVIDIA's Apex."""


def loss_scale(
    asked: float | str | None, dtypes: Iterable[str]
) -> float | Literal["dynamic"]:
    """The scale asked for; None: dynamic where any stage computes in float16, else 1.

    Args:
        asked: ``Experiment.loss_scale``.
        dtypes: compute dtypes of the stages.
    """
    if asked is None:
        return DYNAMIC if "float16" in dtypes else 1.0
    return DYNAMIC if asked == DYNAMIC else float(asked)
