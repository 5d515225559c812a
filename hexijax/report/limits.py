"""What limits a step, found by trying: speed one thing up, simulate again.

    Judged -> limits -> (Limit, ...), the one that helps most first

A kind of device, the links in nodes, the links between nodes: each is made 10% faster
in a cluster of its own. Idle shares alone mislead: a device may be busy all the time
and still not be what the others wait for. Costs one simulation a candidate.
"""

import dataclasses
import enum
from collections.abc import Iterator

from hexijax.cluster import Cluster, DeviceProfile, LinkProfile, Links, NamedLink
from hexijax.layers.chain import Remat
from hexijax.plan.plan import Plan
from hexijax.report.judged import Judged, judge

FASTER = 1.1
"""Times the speed of what is tried."""


class What(enum.StrEnum):
    """Kinds of limits."""

    DEVICE = "device"
    """A kind of device computes all the time that matters."""
    LINK = "link"
    """Bytes on their way."""
    DISPATCH = "dispatch"
    """The host cannot dispatch calls faster."""
    MEMORY = "memory"
    """What does not fit is computed twice."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Limit:
    """One thing that a shorter step could come from."""

    what: What
    """Its kind."""

    name: str
    """The kind of device, ``in nodes``, ``between nodes``, or a host."""

    saves: float
    """Part of the step that ``FASTER`` saves; of memory, what recomputing takes."""


def limits(judged: Judged) -> tuple[Limit, ...]:
    """What limits the step, the largest first; the first is the bottleneck.

    Memory comes last: no factor of it is like a speed.
    """
    host, host_s = max(judged.timeline.host_s.items(), key=lambda item: item[1])
    if host_s >= judged.step_s * 0.999:
        found = [Limit(what=What.DISPATCH, name=host, saves=1 - 1 / FASTER)]
    else:
        found = [
            Limit(what=what, name=name, saves=_saves(judged, cluster))
            for what, name, cluster in _candidates(judged)
        ]
    found.sort(key=lambda limit: -limit.saves)
    return (*found, *_memory(judged))


def _saves(judged: Judged, cluster: Cluster) -> float:
    again = judge("", judged.plan, judged.problem.on(cluster))
    return 1 - again.step_s / judged.step_s


def _candidates(judged: Judged) -> Iterator[tuple[What, str, Cluster]]:
    cluster = judged.problem.cluster
    used = [cluster.device(name) for name in judged.used]
    for kind in dict.fromkeys(device.kind for device in used):
        yield What.DEVICE, kind, faster_kind(cluster, kind)
    if len({device.node for device in used}) < len(used):
        yield What.LINK, "in nodes", faster_links(cluster, between=False)
    if len({device.node for device in used}) > 1:
        yield What.LINK, "between nodes", faster_links(cluster, between=True)


def faster_kind(cluster: Cluster, kind: str, factor: float = FASTER) -> Cluster:
    """The cluster with every device of a kind that much faster."""
    return dataclasses.replace(
        cluster,
        profiles=tuple(
            _faster(profile, factor) if profile.kind == kind else profile
            for profile in cluster.profiles
        ),
    )


def _faster(profile: DeviceProfile, factor: float) -> DeviceProfile:
    peaks = {d: peak * factor for d, peak in profile.dense_flops_per_s.items()}
    times = tuple(
        {k: v / factor if k.endswith("_s") and isinstance(v, float) else v
         for k, v in row.items()}
        for row in profile.layer_times
    )  # fmt: skip
    return dataclasses.replace(
        profile,
        dense_flops_per_s=peaks,
        memory_bytes_per_s=profile.memory_bytes_per_s * factor,
        layer_times=times,
    )


def faster_links(cluster: Cluster, *, between: bool, factor: float = FASTER) -> Cluster:
    """The cluster with its links in nodes, or those between nodes, that much faster."""
    links = cluster.links

    def fast(link: LinkProfile | None, crosses: bool) -> LinkProfile | None:
        return _quick(link, factor) if link and crosses == between else link

    def named(pairs: tuple[NamedLink, ...], *, devices: bool) -> tuple[NamedLink, ...]:
        return tuple(
            dataclasses.replace(pair, link=_quick(pair.link, factor))
            if _crosses(cluster, pair, devices) == between
            else pair
            for pair in pairs
        )

    return dataclasses.replace(
        cluster,
        nodes=tuple(
            dataclasses.replace(
                node, link=fast(node.link, False), nic=fast(node.nic, True)
            )
            for node in cluster.nodes
        ),
        links=Links(
            in_node=fast(links.in_node, False),
            between_nodes=fast(links.between_nodes, True),
            device_pairs=named(links.device_pairs, devices=True),
            node_pairs=named(links.node_pairs, devices=False),
            site_pairs=named(links.site_pairs, devices=False),
        ),
    )


def _crosses(cluster: Cluster, pair: NamedLink, devices: bool) -> bool:
    if not devices:
        return True
    return len({cluster.device(name).node for name in pair.between}) > 1


def _quick(link: LinkProfile, factor: float) -> LinkProfile:
    return LinkProfile(
        latency_s=link.latency_s / factor,
        bytes_per_s=link.bytes_per_s * factor,
        measured=tuple((size, time_s / factor) for size, time_s in link.measured),
    )


def _memory(judged: Judged) -> Iterator[Limit]:
    """What the step would save with room for every activation.

    Writing what is kept takes time too, so keeping less may be as fast or faster.
    """
    plan = judged.plan
    if all(p is Remat.NONE for _, stage in plan.stages() for p in stage.remat):
        return
    keeping = (Remat.NONE, Remat.DOTS)
    roomy = [judge("", _all(plan, policy), judged.problem) for policy in keeping]
    saves = 1 - min(other.step_s for other in roomy) / judged.step_s
    yield Limit(what=What.MEMORY, name="recomputation", saves=max(0.0, saves))


def _all(plan: Plan, policy: Remat) -> Plan:
    """The plan with one policy for all layers."""
    return dataclasses.replace(
        plan,
        replicas=tuple(
            dataclasses.replace(
                replica,
                stages=tuple(
                    dataclasses.replace(stage, remat=(policy,) * stage.num_layers)
                    for stage in replica.stages
                ),
            )
            for replica in plan.replicas
        ),
    )
