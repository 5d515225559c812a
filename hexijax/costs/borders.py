"""What one microbatch's activations or cotangents cost across a border.

    split and cast on the source -> copies, lane to lane -> merge and cast on the target

As the runtime moves them: in the narrower dtype of the two stages, a copy to every
device of a lane, from a device of the lane that has the samples. With equal lanes and
dtypes both programs fall away, and between stages on the same devices the copies too.
``Carriage`` describes systems that do it otherwise.
"""

import dataclasses
import math

from hexijax.cluster import LinkProfile
from hexijax.costs.compute import border_bytes_in
from hexijax.costs.links import gather_s
from hexijax.costs.rates import CALL_S
from hexijax.costs.ways import Load, Ways, load
from hexijax.layers.chain import ITEM_BYTES, Chain
from hexijax.plan.plan import Stage


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Border:
    """One message."""

    load: Load
    """Its copies; no ways where nothing leaves its device."""

    split_s: float
    """Of the program on the source; 0: there is none."""

    merge_s: float
    """Of the program on the target; 0: there is none."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Carriage:
    """How a system brings a message to the devices of a lane."""

    in_parts: bool = False
    """Each device gets its part, and the lane gathers them; else each gets all."""

    message_s: float = 0.0
    """What the target's devices wait for beside, with each message."""


OURS = Carriage()
"""This project's runtime."""


def border(
    chain: Chain,
    layer: int,
    source: Stage,
    target: Stage,
    samples: int,
    ways: Ways,
    memory_bytes_per_s: tuple[float, float],
    *,
    cotangent: bool,
    link: LinkProfile | None = None,
    carriage: Carriage = OURS,
) -> Border:
    """What crosses the border before ``layer``.

    Args:
      chain: the model.
      layer: the one that reads the activations.
      source: where the message starts.
      target: where it ends.
      samples: of the microbatch, over all lanes.
      ways: of the cluster.
      memory_bytes_per_s: of a device of the source, and of the target.
      cotangent: integers and keys stay, they have none.
      link: the slowest inside the target; None: it is a single device.
      carriage: of the system that runs the plan.
    """
    left = chain.layers[layer - 1]
    whole = left.border_whole_bytes
    fixed = 0 if cotangent else whole * samples
    floats = (left.border_bytes - whole) * samples

    def size(dtype: str) -> int:
        return fixed + border_bytes_in(chain, floats, dtype)

    wire = min(source.dtype, target.dtype, key=lambda dtype: ITEM_BYTES[dtype])
    pieces = math.lcm(source.lanes, target.lanes)
    num_out, num_in = pieces // source.lanes, pieces // target.lanes
    pairs = (
        (
            source.devices[piece // num_out * source.tensor + m % source.tensor],
            target.devices[piece // num_in * target.tensor + m],
        )
        for piece in range(pieces)
        for m in range(target.tensor)
    )

    def program_s(stage: Stage, end: int) -> float:
        """Read and written once by each device of a lane."""
        moved = (size(stage.dtype) + size(wire)) / stage.lanes
        return CALL_S + moved / memory_bytes_per_s[end]

    parts = target.tensor if carriage.in_parts else 1
    moved = load([(ways.counted(pairs), size(wire) / pieces / parts, 1)])
    merge_s = program_s(target, 1) if num_in > 1 or target.dtype != wire else 0.0
    if moved.ways:
        merge_s += carriage.message_s
        if parts > 1 and link:
            merge_s += gather_s(link, parts, size(wire) // target.lanes)
    return Border(
        load=moved,
        split_s=program_s(source, 0) if num_out > 1 or source.dtype != wire else 0.0,
        merge_s=merge_s,
    )
