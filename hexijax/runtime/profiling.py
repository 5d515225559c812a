"""Measures what the cost model would otherwise reckon: layers and updates.

    Engine on one device -> instruction_times -> layer_rows, update_row -> DeviceProfile

The programs that are timed are those of training. Each instruction is waited for, so a
time holds nothing of its neighbours; what waiting itself costs is measured, too, and
taken off.
"""

import statistics
import time
from collections.abc import Mapping, Sequence
from typing import Any

import jax

from hexijax.layers.chain import Chain, Layer, Remat
from hexijax.program.program import Backward, Forward, Instruction, Update
from hexijax.runtime.engine import Engine
from hexijax.runtime.stopwatch import waiting_s

Times = Sequence[tuple[Instruction, float]]
"""Each instruction of a step with its seconds, in the order of dispatch."""

FORWARD_SHARE = 1 / 3
"""Of a segment whose forward and backward are one program: two products to one."""


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


def segment_s(times: Times) -> dict[int, tuple[float, float]]:
    """Median seconds of each segment's forward and backward for a microbatch."""
    found: dict[int, tuple[list[float], list[float]]] = {}
    for instruction, seconds in times:
        if isinstance(instruction, Forward | Backward):
            both = found.setdefault(instruction.segment, ([], []))
            both[isinstance(instruction, Backward)].append(seconds)
    return {
        segment: (statistics.median(forward), statistics.median(backward))
        for segment, (forward, backward) in found.items()
    }


def layer_rows(
    layers: Sequence[Layer],
    segments: Sequence[int],
    apart: Times,
    whole: Times,
    *,
    dtype: str,
    samples: int,
    remat: Remat = Remat.NONE,
) -> list[dict[str, Any]]:
    """Rows of a kind's ``layer_times``: one for each layer that is unlike.

    Args:
      layers: the chain's, as the kind runs them: with fused attention or without.
      segments: how ``apart`` was cut, by ``even_segments``.
      apart: of a step whose segments run forward and backward in programs of their own;
        the last is one program, whatever the plan.
      whole: of a step that has all layers in one program.
      dtype: compute dtype of both.
      samples: of their microbatches.
      remat: of all layers but the last.
    """
    each = segment_s(apart)
    last = len(segments) - 1
    head_s = sum(each[last])
    before_s = sum(sum(each[segment]) for segment in range(last))
    joined = (sum(segment_s(whole)[0]) - head_s) / before_s
    found: dict[str, dict[str, Any]] = {}
    start = 0
    for segment, count in enumerate(segments):
        forward_s, backward_s = (seconds / count for seconds in each[segment])
        row = {
            "signature": layers[start].signature,
            "dtype": dtype,
            "samples": samples,
            "remat": remat.value,
            "forward_s": forward_s * joined,
            "backward_s": backward_s * joined,
            "apart_forward_s": forward_s,
            "apart_backward_s": backward_s,
        }
        if segment == last:
            row["forward_s"] = row["apart_forward_s"] = head_s * FORWARD_SHARE
            row["backward_s"] = row["apart_backward_s"] = head_s * (1 - FORWARD_SHARE)
            row["remat"] = Remat.NONE.value
        # Of segments of the same layer the first, which is a full one.
        found.setdefault(row["signature"], row)
        start += count
    return list(found.values())


def update_row(chain: Chain, times: Times) -> dict[str, Any]:
    """The row of the optimizer, from a step on one device that holds all state."""
    return {
        "update_params": sum(g.size for g in chain.groups if g.trainable),
        "update_s": sum(s for i, s in times if isinstance(i, Update)),
    }
