"""Which JAX device stands for which device of the cluster.

The cluster file says what a card is; JAX's ``device_kind`` may repeat device 0's name for
every card of a mixed host, so it is checked against the file, and the file wins where the
two cannot be told apart.
"""

from collections import defaultdict
from collections.abc import Mapping

import jax

from hexijax.cluster import Cluster
from hexijax.cluster.catalog import match_device_kind
from hexijax.errors import UserError


def assign(cluster: Cluster, *, emulate: bool = False) -> dict[str, jax.Device]:
    """Cluster device name -> JAX device of this process, in order of ids.

    ``emulate``: any device may stand for any other, which shows numbers, never speed.

    Raises:
      UserError: too few devices, or a device of another kind than the file says.
    """
    here = list(jax.local_devices())
    wanted = list(cluster.devices)
    if len(here) < len(wanted):
        raise UserError(
            f"Cluster {cluster.name!r} has {len(wanted)} devices; JAX sees {len(here)} here "
            f"({here[0].platform}). Use --emulate to let forced CPU devices stand in, or a "
            "cluster file of what this machine has."
        )
    if emulate or here[0].platform == "cpu":
        return {d.name: device for d, device in zip(wanted, here, strict=False)}
    by_kind: dict[str | None, list[jax.Device]] = defaultdict(list)
    for device in here:
        by_kind[known_kind(device)].append(device)
    # A kind derived from a catalog card (an emulated slow one) takes cards of that kind.
    chosen: dict[str, jax.Device] = {}
    for want in wanted:
        base = getattr(want.profile, "base", None)
        for kind in (want.profile.kind, base, None):
            if by_kind.get(kind):
                chosen[want.name] = by_kind[kind].pop(0)
                break
        else:
            seen = {kind: len(devices) for kind, devices in by_kind.items() if devices}
            raise UserError(
                f"Device {want.name!r} of cluster {cluster.name!r} is a "
                f"{want.profile.kind!r}; the devices left here are {seen}. Correct the "
                "cluster file, or use --emulate."
            )
    return chosen


def known_kind(device: jax.Device) -> str | None:
    """The catalog's name of a device's kind; None if it has none."""
    profile = match_device_kind(device.device_kind)
    return None if profile is None else profile.kind


def peak_bytes(devices: Mapping[str, jax.Device]) -> dict[str, int]:
    """Peak bytes in use by device name, where the backend counts them."""
    peaks = {}
    for name, device in devices.items():
        stats = device.memory_stats() or {}
        if "peak_bytes_in_use" in stats:
            peaks[name] = stats["peak_bytes_in_use"]
    return peaks
