"""Where equations come from: lines of the user's source, for messages."""

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import flax
import jax
import optax

import hexijax


def place_of(eqn: Any, eqns: Sequence[Any]) -> str:
    """The user's line an equation comes from: ``model.py:12 (function)``.

    What JAX compiles by itself keeps no line of the user's; then it is the nearest of
    the equations before it.
    """
    if line := _source_line(eqn):
        return line
    at = next((i for i, other in enumerate(eqns) if other is eqn), len(eqns))
    before = (line for other in reversed(eqns[:at]) if (line := _source_line(other)))
    return next((f"or after {line}" for line in before), "an unknown line")


def _source_line(eqn: Any) -> str | None:
    traceback = eqn.source_info.traceback
    for frame in traceback.frames if traceback is not None else ():
        if not frame.file_name.startswith(("<", *_LIBRARIES)):
            return f"{frame.file_name}:{frame.line_num} ({frame.function_name})"
    return None


_LIBRARIES = tuple(
    str(Path(module.__file__).parent)
    for module in (jax, flax, optax, hexijax)
    if module.__file__ is not None
)
