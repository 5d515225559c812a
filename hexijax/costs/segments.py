"""The bytes of a segment's programs: what goes in and out, and what is alive within.

    chain, stage, segment, samples -> segment_programs -> {"forward": ProgramBytes, ...}

Forward, backward and, where the loss's segment runs both at once, "fused": the programs
that the runtime compiles, so that a promise can be held against XLA's own figures.
"""

import dataclasses

from hexijax.costs.activations import (
    Within,
    batch_bytes,
    enter_bytes,
    forward_bytes,
    held_bytes,
    segment_kept_bytes,
    transient_bytes,
)
from hexijax.layers.chain import Chain, Remat
from hexijax.plan.plan import Stage


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class ProgramBytes:
    """One compiled program on one device."""

    arguments_bytes: int
    """What it is given."""

    outputs_bytes: int
    """What it returns."""

    aliases_bytes: int
    """Of the outputs, what overwrites an argument."""

    temp_bytes: int
    """Alive while it runs only; a promise is an upper bound."""

    @property
    def held_bytes(self) -> int:
        """Arguments and outputs, each once."""
        return self.arguments_bytes + self.outputs_bytes - self.aliases_bytes


def segment_programs(
    chain: Chain, within: Within, stage: Stage, segment: int, samples: int
) -> dict[str, ProgramBytes]:
    """The programs of one segment for a microbatch of ``samples`` a lane."""
    layers = within.layers
    joined = within.joined and segment == len(stage.segments) - 1
    start, stop = stage.segment_layers(segment)
    params, _, grads = held_bytes(chain, (start, stop), stage.tensor, stage.dtype)
    batch = batch_bytes(chain, start, stop, samples)
    act, out = (enter_bytes(chain, i, stage.dtype, samples) for i in (start, stop))
    given = params + act + batch
    if joined:
        fused = ProgramBytes(
            arguments_bytes=given + grads,
            outputs_bytes=grads + act,
            aliases_bytes=grads,
            temp_bytes=transient_bytes(chain, within, stage, samples, segment),
        )
        return {"fused": fused}
    kept = segment_kept_bytes(chain, layers, start, stop, stage, samples)
    forward = ProgramBytes(
        arguments_bytes=given,
        outputs_bytes=out + kept,
        aliases_bytes=0,
        temp_bytes=forward_bytes(chain, within, stage, samples, segment),
    )
    # The first layer passes nothing back: its weights are read to recompute only.
    first = layers[start]
    again = stage.remat[start - stage.layers[0]] is not Remat.NONE
    unread = start == 0 and not (again and first.activation_bytes[Remat.NONE])
    if stop <= chain.first_trained:
        return {"forward": forward}
    rest = (start + unread, stop)
    read = held_bytes(chain, rest, stage.tensor, stage.dtype).handed
    act *= start > chain.first_trained or not start
    backward = ProgramBytes(
        arguments_bytes=given - params + read + kept + out + grads,
        outputs_bytes=grads + act,
        aliases_bytes=grads,
        temp_bytes=transient_bytes(chain, within, stage, samples, segment),
    )
    return {"forward": forward, "backward": backward}
