"""Plans that were measured, and plans that other planners chose.

    measured_plans.json, published_plans.json -> Case: Plan, Cluster, Chain, figures

Replica j of a stage talks to replica j of the next, so replica j of every stage makes
replica j of the Plan; tensor degrees differ where the record's do. Each replica of a
measured stage is a node of its own. The source keeps whole optimizer states on every
replica (ZeRO 0); a Plan divides them, which moves the same bytes: a ring all-reduce is
a reduce-scatter and an all-gather.
"""

import collections
import dataclasses
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from hexijax.cluster import Cluster, DeviceGroup, Links, NamedLink, Node
from hexijax.errors import UserError
from hexijax.layers.chain import Chain
from hexijax.plan.plan import Plan, Replica, Stage
from hexijax.published.files import PublishedDataError, read
from hexijax.published.sailor.chain import model_chain
from hexijax.published.sailor.links import between_nodes, in_node
from hexijax.published.sailor.profile import DTYPE, profile

HOST_MEMORY_BYTES = 256 * 2**30
HOST_CORES = 32
"""Of each node; not published, and nothing here depends on them."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Case:
    """One record, in this project's terms."""

    name: str
    """Its id."""

    plan: Plan
    """What ran, or would."""

    cluster: Cluster
    """On what."""

    chain: Chain
    """Of which model."""

    record: Mapping[str, Any]
    """All that the source says, its doubts included."""

    notes: tuple[str, ...] = ()
    """Where the plan departs from the record."""


def measured_cases(folder: Path) -> tuple[Case, ...]:
    """Every record of ``measured_plans.json``, suspect ones too."""
    data = read(folder, "sailor", "measured_plans")
    return tuple(_named(_measured, folder, record) for record in data["records"])


def published_cases(folder: Path) -> tuple[Case, ...]:
    """Every record of ``published_plans.json``: other planners' plans, not measured."""
    data = read(folder, "sailor", "published_plans")
    return tuple(_named(_published, folder, record) for record in data["records"])


def _named(
    make: Callable[[Path, Mapping[str, Any]], Case],
    folder: Path,
    record: Mapping[str, Any],
) -> Case:
    """The record's case, or an error that names the record."""
    try:
        return make(folder, record)
    except UserError as error:
        raise PublishedDataError(f"{record['id']}: {error}") from None


def _measured(folder: Path, record: Mapping[str, Any]) -> Case:
    nodes: dict[str, tuple[str, int]] = {}
    columns: list[list[Stage]] = [[] for _ in range(record["stages"][0]["dp"])]
    for s, stage in enumerate(record["stages"]):
        start = stage["first_layer"]
        for j, one in enumerate(stage["replicas"]):
            node = f"s{s}-{j}"
            nodes[node] = one["gpu"], one["num_gpus"]
            columns[j].append(
                Stage(
                    devices=tuple(f"{node}/{i}" for i in range(one["num_gpus"])),
                    layers=(start, start + stage["num_layers"]),
                    lanes=one["num_gpus"] // one["tp"],
                    tensor=one["tp"],
                    dtype=DTYPE,
                )
            )
    num_samples = record["global_batch"] // record["dp"]
    replicas = [
        _replica(stages, record["mbs"], num_samples=num_samples) for stages in columns
    ]
    return _case(folder, record, nodes, replicas)


def _published(folder: Path, record: Mapping[str, Any]) -> Case:
    used: collections.Counter[str] = collections.Counter()
    columns = _columns(record)
    shares = _even_samples(record["global_batch"], len(columns))
    replicas: list[Replica] = []
    for column, num_samples in zip(columns, shares, strict=True):
        stages: list[Stage] = []
        start = 0
        for layers, entries in column:
            devices: list[str] = []
            for entry in entries:
                node, first = entry["node"], used[entry["node"]]
                used[node] += entry["tp"]
                devices += [f"{node}/{first + i}" for i in range(entry["tp"])]
            stages.append(
                Stage(
                    devices=tuple(devices),
                    layers=(start, start + layers),
                    lanes=len(entries),
                    tensor=entries[0]["tp"],
                    dtype=DTYPE,
                )
            )
            start += layers
        replicas.append(_replica(stages, record["mbs"], num_samples=num_samples))
    per_node = record["gpus_per_node"]
    nodes = {
        f"{gpu[0].lower()}{i}": (gpu, per_node)
        for gpu, count in record["cluster"].items()
        for i in range(count // per_node)
    }
    return _case(folder, record, nodes, replicas, _departures(record, columns))


_Column = list[tuple[int, list[Mapping[str, Any]]]]
"""Of a replica: for each stage its layers and its entries, one a lane."""


def _columns(record: Mapping[str, Any]) -> list[_Column]:
    """Records list stages of entries, or whole pipelines of stages of their own.

    A stage with twice the entries of another gives each replica two lanes.
    """
    if "pipelines" in record:
        return [
            list(zip(p["layers_per_stage"], p["stages"], strict=True))
            for p in record["pipelines"]
        ]
    stages = record["stages"]
    count = min(len(entries) for entries in stages)
    assert all(len(entries) % count == 0 for entries in stages), record["id"]
    return [
        [
            (layers, entries[j * len(entries) // count :][: len(entries) // count])
            for layers, entries in zip(record["layers_per_stage"], stages, strict=True)
        ]
        for j in range(count)
    ]


def _departures(
    record: Mapping[str, Any], columns: Sequence[_Column]
) -> tuple[str, ...]:
    """Where the plan is not the record, for people."""
    notes: list[str] = []
    batch_size, step = record["global_batch"], record["mbs"] * len(columns)
    rounded = -(-batch_size // step) * step
    if rounded != batch_size:
        notes.append(
            f"the source rounds the batch of {batch_size} up to {rounded} sequences; "
            "here it is exact, and the last microbatches are padded"
        )
    if any(len(entries) > 1 for column in columns for _, entries in column):
        notes.append(
            "stages have unlike numbers of replicas; here the larger ones are lanes, "
            "which divide each microbatch"
        )
    return tuple(notes)


def _even_samples(batch_size: int, num_replicas: int) -> list[int]:
    """As even as whole samples can be; the first take the rest."""
    each, rest = divmod(batch_size, num_replicas)
    return [each + (j < rest) for j in range(num_replicas)]


def _replica(stages: Sequence[Stage], size: int, *, num_samples: int) -> Replica:
    return Replica(
        stages=tuple(stages),
        microbatches=-(-num_samples // size),
        microbatch_size=size * min(stage.lanes for stage in stages),
        samples=num_samples,
    )


def _case(
    folder: Path,
    record: Mapping[str, Any],
    nodes: Mapping[str, tuple[str, int]],
    replicas: Sequence[Replica],
    notes: tuple[str, ...] = (),
) -> Case:
    chain = model_chain(folder, record["model"])
    cluster = _cluster(folder, re.sub(r"[^\w.-]", "-", record["id"]), nodes)
    plan = Plan(
        replicas=tuple(replicas),
        batch_size=record["global_batch"],
        chain=chain.fingerprint(),
        cluster=cluster.fingerprint(),
    )
    return Case(
        name=record["id"],
        plan=plan,
        cluster=cluster,
        chain=chain,
        record=record,
        notes=notes,
    )


def _cluster(folder: Path, name: str, nodes: Mapping[str, tuple[str, int]]) -> Cluster:
    """Nodes by name, each with a kind and a count; a site for each unlike node."""
    made = [
        Node(
            name=node,
            devices=(DeviceGroup(kind=gpu, count=count),),
            host_memory_bytes=HOST_MEMORY_BYTES,
            host_cores=HOST_CORES,
            link=in_node(folder, gpu, count) if count > 1 else None,
            site=_site(gpu, count),
        )
        for node, (gpu, count) in nodes.items()
    ]
    return Cluster(
        name=name,
        nodes=tuple(made),
        links=Links(site_pairs=tuple(_site_pairs(folder, nodes.values()))),
        profiles=tuple(profile(folder, g) for g in dict(nodes.values())),
    )


def _site(gpu: str, count: int) -> str:
    return f"{gpu}x{count}"


def _site_pairs(folder: Path, nodes: Iterable[tuple[str, int]]) -> list[NamedLink]:
    """Of all unlike nodes that meet, and of like ones where there are two."""
    counts = collections.Counter(nodes)
    kinds = sorted(counts)
    return [
        NamedLink(
            between=(_site(*a), _site(*b)),
            link=between_nodes(folder, a[0], b[0], min(a[1], b[1])),
        )
        for i, a in enumerate(kinds)
        for b in kinds[i:]
        if a != b or counts[a] > 1
    ]
