"""What layer times rest on: said where measured ones are stretched.

    Judged -> grounds -> a line for each kind with measurements that do not answer all

A kind that was never measured goes by its data sheet throughout, and needs no line.
"""

import collections
from collections.abc import Iterator

from hexijax.costs.compute import fused_attention
from hexijax.costs.measured import Basis, basis
from hexijax.report.judged import Judged
from hexijax.report.words import listed

WORDS = {
    Basis.MEASURED: "measured",
    Basis.INTERPOLATED: "by a line between measured microbatches",
    Basis.EXTRAPOLATED: "by a line beyond measured microbatches",
    Basis.ROOFLINE: "by the data sheet",
}


def grounds(judged: Judged) -> Iterator[str]:
    """Lines for people; layers count once a stage."""
    chain, cluster = judged.problem.chain, judged.problem.cluster
    layers: dict[str, collections.Counter[Basis]] = {}
    sizes: dict[tuple[str, Basis], set[int]] = {}
    for replica in judged.plan.replicas:
        for stage in replica.stages:
            profile = cluster.device(stage.devices[0]).profile
            if not profile.layer_times:
                continue
            samples = replica.microbatch_size // stage.lanes
            fused = fused_attention(profile, stage.dtype)
            own = chain.layers_under(fused_attention=fused)[slice(*stage.layers)]
            for layer in own:
                its = basis(
                    profile, layer.signature, stage.dtype, stage.tensor, samples
                )
                layers.setdefault(profile.kind, collections.Counter())[its] += 1
                sizes.setdefault((profile.kind, its), set()).add(samples)
    for kind, counts in layers.items():
        if counts.keys() != {Basis.MEASURED}:
            parts = [
                f"{counts[its]} {words}{_of(sizes[kind, its], its)}"
                for its, words in WORDS.items()
                if counts[its]
            ]
            yield f"times of {kind}: layers {listed(parts)}"


def _of(sizes: set[int], its: Basis) -> str:
    """Which microbatches were not measured."""
    if its not in (Basis.INTERPOLATED, Basis.EXTRAPOLATED):
        return ""
    return f" (of {listed([str(size) for size in sorted(sizes)])})"
