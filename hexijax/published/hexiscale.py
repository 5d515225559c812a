"""Clusters of the cases that HexiScale (FlashFlex, arXiv 2409.01143) published.

    cases.json -> cases -> HexiscaleCase: mixed cluster, even cluster, figures

Peaks are the nominal figures of the source's device table, so that utilisation means
what it means there. Bandwidth between machines is the caller's to choose: the source
has one figure from notes (0.7 GB/s) and one setting of a script (0.5 GB/s), and
measured neither. Models are named only; their chains are made elsewhere.
"""

import dataclasses
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import Any

from hexijax.cluster import (
    Cluster,
    DeviceGroup,
    DeviceProfile,
    LinkProfile,
    Links,
    Node,
    catalog,
)
from hexijax.published.files import read

DTYPE = "bfloat16"
"""Mixed precision on tensor cores, which the nominal peaks are for."""

BETWEEN_BYTES_PER_S = 0.7e9
"""The figure from notes, approximate."""

IN_NODE_LATENCY_S, BETWEEN_LATENCY_S = 10e-6, 50e-6
"""Assumed: PCIe or NVLink with NCCL, and TCP over Ethernet."""

HOST_MEMORY_BYTES, HOST_CORES = 512 * 2**30, 64
"""Of each machine; not published."""

CARDS = {
    "3080Ti": "rtx3080ti-12g",
    "3090": "rtx3090-24g",
    "4090": "rtx4090-24g",
    "A100-PCIe": "a100-80g-pcie",
    "A100-NVLink": "a100-80g-sxm",
    "A800": "a800-80g-sxm",
}
"""The catalog's name of each card: memory bandwidth and host link come from there."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class HexiscaleCase:
    """One published comparison."""

    name: str
    """Its id."""

    model: str
    """``Llama-2-7B``, ..."""

    cluster: Cluster
    """Of unlike cards."""

    baseline: Cluster
    """What it is compared with; the case study: the same cluster."""

    record: Mapping[str, Any]
    """All that the source says."""

    @property
    def gap_mfu(self) -> float | None:
        """Utilisation lost to the even cluster, in fractions of peak; published."""
        return self.record.get("gap_mfu")


def cases(
    folder: Path | str, *, between_bytes_per_s: float = BETWEEN_BYTES_PER_S
) -> tuple[HexiscaleCase, ...]:
    """Every case, its machines joined at ``between_bytes_per_s``."""
    data = read(folder, "hexiscale", "cases")
    between = LinkProfile(latency_s=BETWEEN_LATENCY_S, bytes_per_s=between_bytes_per_s)
    rates = {
        row["gpu"]: row["intra_machine_gb_per_s"] * 1e9
        for row in data["planner_device_table"]
    }

    def cluster(name: str, devices: Sequence[Mapping[str, Any]]) -> Cluster:
        return _cluster(name.replace("/", "-"), devices, rates, between)

    return tuple(
        HexiscaleCase(
            name=record["id"],
            model=record["model"],
            cluster=cluster(record["id"], record["heterogeneous_devices"]),
            baseline=cluster(f"{record['id']}-even", record["baseline_devices"]),
            record=record,
        )
        for record in data["cases"]
    )


def _cluster(
    name: str,
    devices: Sequence[Mapping[str, Any]],
    rates: Mapping[str, float],
    between: LinkProfile,
) -> Cluster:
    nodes: list[Node] = []
    for row in devices:
        per_node = row["gpus_per_node"]
        link = LinkProfile(
            latency_s=IN_NODE_LATENCY_S, bytes_per_s=_in_node(rates, row)
        )
        nodes += [
            Node(
                name=f"{row['gpu'].lower()}-{len(nodes) + i}",
                devices=(DeviceGroup(kind=row["gpu"], count=per_node),),
                host_memory_bytes=HOST_MEMORY_BYTES,
                host_cores=HOST_CORES,
                link=link,
            )
            for i in range(row["num_nodes"])
        ]
    profiles = {row["gpu"]: _profile(row) for row in devices}
    return Cluster(
        name=name,
        nodes=tuple(nodes),
        links=Links(between_nodes=between),
        profiles=tuple(profiles.values()),
    )


def _in_node(rates: Mapping[str, float], row: Mapping[str, Any]) -> float:
    """The device table's; it knows some cards by the size of their machine too."""
    gpu, per_node = row["gpu"], row["gpus_per_node"]
    generic = "A100" if gpu.startswith(("A100", "A800")) else gpu
    return rates.get(f"{gpu}-{per_node}", rates[generic])


def _profile(row: Mapping[str, Any]) -> DeviceProfile:
    base = catalog.profiles()[CARDS[row["gpu"]]]
    peak = row["peak_flops_per_s"]
    return dataclasses.replace(
        base,
        kind=row["gpu"],
        nominal_memory_bytes=row["memory_gb"] * 2**30,
        usable_memory_bytes=0,
        dense_flops_per_s={DTYPE: peak, "float32": base.dense_flops_per_s["float32"]},
        native_dtypes=(DTYPE, "float32"),
        source="nominal peak of HexiScale's device table; the rest from the catalog",
    )
