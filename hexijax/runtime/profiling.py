"""How long each instruction of a step takes, with nothing beside it.

    Engine, batch -> instruction_times -> (instruction, seconds), ...

Each instruction is waited for, so a time holds nothing of its neighbours; what waiting
itself costs is measured, too, and taken off.
"""

import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from hexijax.layers.chain import Chain
from hexijax.program.program import Instruction
from hexijax.runtime.engine import Engine
from hexijax.runtime.stopwatch import waiting_s

Times = Sequence[tuple[Instruction, float]]
"""Each instruction of a step with its seconds, in the order of dispatch."""


def instruction_times(engine: Engine, batch: Mapping[str, Any], step: int) -> Times:
    """One training step in which each instruction waits for the one before."""
    device = next(iter(engine.devices.values()))
    asking_s = waiting_s(device)
    found: list[tuple[Instruction, float]] = []
    began = time.perf_counter()

    def then(instruction: Instruction, written: Sequence[Any]) -> None:
        nonlocal began
        jax.block_until_ready(written)
        spent_s = time.perf_counter() - began - asking_s
        found.append((instruction, max(0.0, spent_s)))
        began = time.perf_counter()

    engine.watched_step(batch, step, then)
    return found


def even_segments(chain: Chain, most: int) -> tuple[int, ...]:
    """Segments of at most ``most`` layers that are all alike; the last layer, which
    ends in the loss, is one of its own."""
    found: list[int] = []
    before = None
    for layer in chain.layers:
        alike = before == layer.signature and layer is not chain.layers[-1]
        if alike and found[-1] < most:
            found[-1] += 1
        else:
            found.append(1)
        before = layer.signature
    return tuple(found)
