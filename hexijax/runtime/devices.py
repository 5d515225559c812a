"""Which JAX device stands for which device of the cluster, and what this machine has.

The cluster file says what a card is. JAX's ``device_kind`` may repeat device 0's name
for every card of a mixed host, so kinds are matched by it first and by compute
capability where it does not help; where the two cannot be told apart the file wins.
"""

import os
from collections import Counter
from collections.abc import Mapping, Sequence

import jax

from hexijax.cluster import (
    Cluster,
    Device,
    DeviceGroup,
    DeviceProfile,
    LinkProfile,
    Node,
)
from hexijax.cluster.catalog import match_device_kind
from hexijax.errors import UserError

CPU = "cpu"
CPU_FLOPS_PER_S, CPU_BYTES_PER_S, CPU_MEMORY_BYTES = 5e10, 1e10, 2 * 2**30
"""One forced CPU device: about one core of a laptop, and the least memory that it is
taken to have. Declared, not measured."""

IN_NODE = LinkProfile(latency_s=20e-6, bytes_per_s=20e9)
"""Between cards of one host when nothing is known: PCIe 4 x16 with room to spare."""


def assign(
    cluster: Cluster, *, emulate: bool = False, island: str | None = None
) -> dict[str, jax.Device]:
    """Cluster device name -> JAX device of this process, in order of ids.

    Kinds whose vendor is ``cpu`` take CPU devices, all others accelerators.

    Args:
      cluster: whose devices.
      emulate: any device may stand for any other, which shows numbers, never speed.
      island: what this process drives; devices of other islands get ghosts, CPU devices
        that are left. None: all of the cluster.

    Raises:
      UserError: too few devices, or a device of another kind than the file says.
    """
    if island is not None:
        return _with_ghosts(cluster, island, emulate=emulate)
    if emulate:
        pools = {CPU: list(jax.local_devices())}
        wanted = {CPU: list(cluster.devices)}
    else:
        hosts = [d for d in cluster.devices if d.profile.vendor == CPU]
        cards = [d for d in cluster.devices if d.profile.vendor != CPU]
        wanted = {CPU: hosts, "accelerator": cards}
        pools = {
            CPU: list(jax.local_devices(backend=CPU)) if hosts else [],
            "accelerator": [d for d in jax.local_devices() if d.platform != CPU],
        }
    for name, devices in wanted.items():
        if len(pools[name]) < len(devices):
            raise UserError(
                f"Cluster {cluster.name!r} has {len(devices)} {name} devices; JAX sees "
                f"{len(pools[name])} of them here. Give a cluster file of what this "
                "machine has, or let forced CPU devices stand in: `run --emulate` "
                "or a Trainer's emulate=True."
            )
    chosen = {d.name: x for d, x in zip(wanted[CPU], pools[CPU], strict=False)}
    if not emulate:
        chosen |= _match(cluster, wanted["accelerator"], pools["accelerator"])
    return {device.name: chosen[device.name] for device in cluster.devices}


def _with_ghosts(
    cluster: Cluster, island: str, *, emulate: bool
) -> dict[str, jax.Device]:
    others = [d.name for d in cluster.devices if d.island != island]
    mine = cluster.without(*others) if others else cluster
    chosen = assign(mine, emulate=emulate)
    left = [d for d in jax.local_devices(backend=CPU) if d not in chosen.values()]
    if len(left) < len(others):
        raise UserError(
            f"Island {island!r} of cluster {cluster.name!r} needs {len(others)} CPU "
            f"devices that stand for those of other islands, and JAX has {len(left)} "
            "left here. Start it as an island (hexijax launch, or hexijax run "
            "--island), or set in the environment "
            f'XLA_FLAGS="--xla_force_host_platform_device_count='
            f'{len(cluster.devices)}" before JAX starts.'
        )
    # The first are the host's own, where its cards have it update.
    chosen |= dict(zip(others, left[len(left) - len(others) :], strict=True))
    return {device.name: chosen[device.name] for device in cluster.devices}


def _match(
    cluster: Cluster, wanted: Sequence[Device], free: list[jax.Device]
) -> dict[str, jax.Device]:
    """Cards by kind, then by compute capability, each pass in order of ids."""
    chosen: dict[str, jax.Device] = {}
    for fits in (_same_kind, _same_capability):
        for want in wanted:
            found = next((d for d in free if fits(want.profile, d)), None)
            if want.name not in chosen and found is not None:
                chosen[want.name] = found
                free.remove(found)
    for want in wanted:
        if want.name not in chosen:
            left = ", ".join(sorted(d.device_kind for d in free)) or "none"
            raise UserError(
                f"Device {want.name!r} of cluster {cluster.name!r} is a "
                f"{want.profile.kind!r}; the cards left here are: {left}. Correct the "
                "cluster file, or use --emulate to see numbers without its speed."
            )
    return chosen


def _same_kind(profile: DeviceProfile, device: jax.Device) -> bool:
    return match_device_kind(device.device_kind) == profile.kind


def _same_capability(profile: DeviceProfile, device: jax.Device) -> bool:
    """Whether a card may be what the file calls it: nothing JAX says speaks against it.

    A kind of the file's own, such as a card that is slowed down, has no other mark.
    """
    has = getattr(device, "compute_capability", None)
    return (
        None in (has, profile.compute_capability) or has == profile.compute_capability
    )


def local_cluster() -> Cluster:
    """This machine as a cluster: one node with the devices JAX sees.

    Raises:
      UserError: a device that the catalog does not know.
    """
    devices = jax.local_devices()
    host_bytes = os.sysconf("SC_PHYS_PAGES") * os.sysconf("SC_PAGE_SIZE")
    if devices[0].platform == CPU:
        kinds = Counter({CPU: len(devices)})
        share = host_bytes // (2 * len(devices)) // 2**30 * 2**30
        memory_bytes = max(CPU_MEMORY_BYTES, share)  # half is the host's own
        profiles = (
            DeviceProfile(
                kind=CPU,
                vendor=CPU,
                nominal_memory_bytes=memory_bytes,
                dense_flops_per_s={"float32": CPU_FLOPS_PER_S},
                memory_bytes_per_s=CPU_BYTES_PER_S,
                host_link_bytes_per_s=CPU_BYTES_PER_S,
                source="declared: one forced CPU device",
            ),
        )
    else:
        profiles = ()
        kinds = Counter()
        for device in devices:
            kind = match_device_kind(device.device_kind)
            if kind is None:
                raise UserError(
                    f"The catalog has no card that JAX calls {device.device_kind!r}. "
                    "Declare it in a cluster file under [kinds] (see docs/cluster.md) "
                    "and pass it with --cluster."
                )
            kinds[kind] += 1
    node = Node(
        name="here",
        devices=tuple(DeviceGroup(kind=k, count=n) for k, n in kinds.items()),
        host_memory_bytes=host_bytes,
        host_cores=os.cpu_count() or 1,
        link=IN_NODE,
    )
    return Cluster(name="here", nodes=(node,), profiles=profiles)


def peak_bytes(devices: Mapping[str, jax.Device]) -> dict[str, int]:
    """Peak bytes in use by device name, where the backend counts them."""
    peaks = {}
    for name, device in devices.items():
        stats = device.memory_stats() or {}
        if "peak_bytes_in_use" in stats:
            peaks[name] = stats["peak_bytes_in_use"]
    return peaks
