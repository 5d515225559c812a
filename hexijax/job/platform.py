"""What must stand before JAX starts: its platform, forced CPU devices, the cache.

JAX reads JAX_PLATFORMS when it is imported and XLA_FLAGS when it opens its backend, so
both follow from flags and the cluster file alone, before the experiment's file runs.
What the user has set already is kept.
"""

import os
from collections.abc import MutableMapping
from pathlib import Path

from hexijax.cluster import Cluster

_FORCE = "--xla_force_host_platform_device_count"


def prepare(
    cluster: Cluster | None,
    *,
    emulate: bool = False,
    cpu: bool = False,
    environ: MutableMapping[str, str] = os.environ,
) -> None:
    """Sets the environment for a run on ``cluster``; None: on this machine.

    Args:
        cluster: kinds of vendor ``cpu`` stand for forced CPU devices.
        emulate: let forced CPU devices stand for every device.
        cpu: leave GPUs alone.
        environ: where it is set.
    """
    devices = cluster.devices if cluster else ()
    all_cpu = cluster is not None and (emulate or cluster.on_cpu)
    forced = [d for d in devices if all_cpu or d.profile.vendor == "cpu"]
    if cpu or all_cpu:
        environ["JAX_PLATFORMS"] = "cpu"
    if forced:
        _force_cpu_devices(len(forced), environ)
    environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_folder(environ)))
    # Every program: those of a plan are many and small.
    environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def cache_folder(environ: MutableMapping[str, str] = os.environ) -> Path:
    """Where compiled programs are kept between runs."""
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "hexijax" / "jax"


def _force_cpu_devices(count: int, environ: MutableMapping[str, str]) -> None:
    flags = environ.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if not flag.startswith(_FORCE)]
    flags.append(f"{_FORCE}={count}")
    if not any("xla_cpu_multi_thread_eigen" in flag for flag in flags):
        # Several devices keep the cores busy; threads inside each would only contend.
        flags.append("--xla_cpu_multi_thread_eigen=false")
    environ["XLA_FLAGS"] = " ".join(flags)
