"""What XLA says of a segment's compiled programs: bytes in, out, overwritten, within.

Compiled -> program_bytes -> {"forward": ProgramBytes, ...}
a plan's Compiled -> compiled_temps -> Temps, which promises read instead of their model
"""

from collections.abc import Mapping
from typing import Any

from hexijax.cluster import Cluster
from hexijax.costs.activations import segment_key
from hexijax.costs.memory import stage_within
from hexijax.costs.segments import ProgramBytes
from hexijax.costs.temp import TempKey, Temps
from hexijax.layers.chain import Chain
from hexijax.plan.plan import Place, Plan, stage_place
from hexijax.runtime.segments import Compiled

WAYS = ("forward", "backward", "fused")


def program_bytes(compiled: Compiled) -> dict[str, ProgramBytes]:
    """Of each program a training step runs, on one device."""
    made = {way: getattr(compiled, way) for way in WAYS}
    return {way: _bytes(program) for way, program in made.items() if program}


def compiled_temps(
    plan: Plan,
    chain: Chain,
    cluster: Cluster,
    segments: Mapping[tuple[Place, int], Compiled],
) -> Temps:
    """What each segment's backward has alive within; of split ones nothing is said."""
    rows: list[tuple[TempKey, int]] = []
    for r, replica in enumerate(plan.replicas):
        for s, stage in enumerate(replica.stages):
            within = stage_within(plan, chain, cluster, replica, s)
            samples = replica.microbatch_size // stage.lanes
            for g in range(len(stage.segments)):
                made = program_bytes(segments[stage_place(r, s), g])
                known = made.get("fused") or made.get("backward")
                if known is not None:
                    key = segment_key(within, stage, samples, g)
                    rows.append((key, known.temp_bytes))
    return Temps().with_rows(rows)


def _bytes(program: Any) -> ProgramBytes:
    found = program.memory_analysis()
    return ProgramBytes(
        arguments_bytes=found.argument_size_in_bytes,
        outputs_bytes=found.output_size_in_bytes,
        aliases_bytes=found.alias_size_in_bytes,
        temp_bytes=found.temp_size_in_bytes,
    )
