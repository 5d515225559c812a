"""What layer times rest on: said where measured ones are stretched.

    Judged -> grounds -> a line for each kind with measurements that do not answer all
    Cluster -> measurements -> what was measured of it, and on what

A kind that was never measured goes by its data sheet throughout, and needs no line.
"""

import collections
from collections.abc import Iterator

from hexijax.cluster import Cluster
from hexijax.costs.compute import fused_attention
from hexijax.costs.measured import Basis, basis
from hexijax.report.judged import Judged
from hexijax.report.words import listed

HOST_FIELDS = {
    "host_link_bytes_per_s": "host link",
    "host_out_bytes_per_s": "way back to the host",
    "host_update_params_per_s": "host updates",
    "host_return_bytes_per_s": "their way back",
}
"""Of nodes, and what they are called."""

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


def measurements(cluster: Cluster) -> Iterator[str]:
    """What of a cluster was measured, and on what: lines for people, none where no
    layer was."""
    measured = [p for p in cluster.profiles if p.layer_times]
    for profile in measured:
        layers = [row for row in profile.layer_times if "forward_s" in row]
        yield f"{profile.kind}: {len(layers)} times of layers; {profile.source}"
    if not measured:
        return
    by_what: dict[str, list[str]] = {}
    for node in cluster.nodes:
        what = [words for f, words in HOST_FIELDS.items() if getattr(node, f)]
        if node.link is not None and node.link.measured:
            what = ["link", *what]
        if what:
            by_what.setdefault(listed(what), []).append(node.name)
    for what, nodes in by_what.items():
        some = listed(nodes) if len(nodes) <= 4 else f"{len(nodes)} nodes"
        yield f"measured of {some}: {what}"
    pairs = (*cluster.links.device_pairs, *cluster.links.node_pairs)
    if count := sum(bool(pair.link.measured) for pair in pairs):
        yield f"measured links between {count} pairs"


def _of(sizes: set[int], its: Basis) -> str:
    """Which microbatches were not measured."""
    if its not in (Basis.INTERPOLATED, Basis.EXTRAPOLATED):
        return ""
    return f" (of {listed([str(size) for size in sorted(sizes)])})"
