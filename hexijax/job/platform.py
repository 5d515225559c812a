"""What must stand before JAX starts: its platform, forced CPU devices, the cache.

JAX reads JAX_PLATFORMS when it is imported and XLA_FLAGS when it opens its backend, so
both follow from flags and the cluster file alone, before the experiment's file runs.
What the user has set already is kept.
"""

import os
from collections.abc import Callable, Mapping, MutableMapping, Sequence
from pathlib import Path
from typing import Any

from hexijax.cluster import Cluster, Device
from hexijax.costs.hosts import host_parts
from hexijax.errors import UserError
from hexijax.job.clusters import given_cluster

_READ_ON_IMPORT: Mapping[str, Callable[[str], Any]] = {
    "JAX_PLATFORMS": str,
    "JAX_COMPILATION_CACHE_DIR": str,
    "JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS": float,
    "JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES": int,
    "JAX_NUM_CPU_DEVICES": int,
}
"""What ``prepare`` may set, and how JAX reads it."""

_FORCE = "--xla_force_host_platform_device_count"

_CARDS = ("/dev/nvidiactl", "/dev/kfd")
"""There where a driver of NVIDIA's or AMD's cards is."""


def prepare(
    cluster: Cluster | None,
    *,
    emulate: bool = False,
    cpu: bool = False,
    island: str | None = None,
    environ: MutableMapping[str, str] = os.environ,
) -> None:
    """Sets the environment for a run on ``cluster``; None: on this machine.

    Args:
        cluster: kinds of vendor ``cpu`` stand for forced CPU devices.
        emulate: let forced CPU devices stand for every device.
        cpu: leave GPUs alone.
        island: what of the cluster this process drives; forced CPU devices stand for
            all that others do.
        environ: where it is set.
    """
    forced = _forced(cluster, emulate=emulate, island=island)
    own = [d for d in cluster.devices if island in (None, d.island)] if cluster else []
    on_cpu = bool(own) and all(d.profile.vendor == "cpu" for d in own)
    if cpu or (cluster is not None and (emulate or on_cpu)):
        environ["JAX_PLATFORMS"] = "cpu"
    # Beside cards their host may share in updates; ghosts come behind its parts.
    parts = host_parts(os.cpu_count())
    cards = not emulate and any(d.profile.vendor != "cpu" for d in own)
    if forced:
        _force_cpu_devices(forced + parts * cards, environ)
    elif _has_cards(own, environ):
        environ.setdefault("JAX_NUM_CPU_DEVICES", str(parts))
    environ.setdefault("JAX_COMPILATION_CACHE_DIR", str(cache_folder(environ)))
    # Every program: those of a plan are many and small.
    environ.setdefault("JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS", "0")
    environ.setdefault("JAX_PERSISTENT_CACHE_MIN_ENTRY_SIZE_BYTES", "-1")


def emulate(cluster: Cluster | str | Path) -> None:
    """Lets forced CPU devices of this process stand for a cluster's cards.

    Call it before JAX opens its backend, so before anything is computed or
    ``jax.devices()`` is asked: the number of CPU devices is fixed from then on. Then
    give ``Trainer`` ``emulate=True``. It shows that a job runs, and its numbers; never
    its speed.

    Args:
        cluster: it, or its file.

    Raises:
      UserError: JAX has started with fewer devices.
    """
    found = given_cluster(cluster)
    assert found is not None
    stand(found, emulate=True, file=None if cluster is found else str(cluster))


def stand(
    cluster: Cluster | None, *, emulate: bool = False, file: str | None = None
) -> None:
    """``prepare`` where JAX may have been imported, or may even have started.

    Args:
        cluster: see ``prepare``.
        emulate: see ``prepare``.
        file: where the cluster was read from, for the message.

    Raises:
      UserError: JAX has started with fewer CPU devices than stand for others.
    """
    import jax

    from hexijax import compat

    if not compat.has_started():
        before = {name: os.environ.get(name) for name in _READ_ON_IMPORT}
        prepare(cluster, emulate=emulate)
        for name, value in before.items():  # JAX has read these already
            if os.environ.get(name) != value:
                jax.config.update(name.lower(), _READ_ON_IMPORT[name](os.environ[name]))
        return
    wanted = _forced(cluster, emulate=emulate)
    if not wanted:
        return
    assert cluster is not None
    there = len(jax.local_devices() if emulate else jax.local_devices(backend="cpu"))
    if there < wanted:
        call = f"hexijax.emulate({(file or 'cluster')!r})"
        call = call if file else call.replace("'", "")
        raise UserError(
            f"Cluster {cluster.name!r} needs {wanted} forced CPU devices, and JAX has "
            f"started with {there}: their number is fixed when it first computes. Call "
            f"{call} before that, at the top of the program, or set in the "
            f'environment JAX_PLATFORMS=cpu XLA_FLAGS="{_FORCE}={wanted}".'
        )


def _forced(
    cluster: Cluster | None, *, emulate: bool, island: str | None = None
) -> int:
    """CPU devices that stand for devices of the cluster, or of other islands."""
    devices = cluster.devices if cluster else ()
    return sum(
        emulate or d.profile.vendor == "cpu" or island not in (None, d.island)
        for d in devices
    )


def cache_folder(environ: MutableMapping[str, str] = os.environ) -> Path:
    """Where compiled programs are kept between runs."""
    base = environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "hexijax" / "jax"


def _has_cards(own: Sequence[Device], environ: Mapping[str, str]) -> bool:
    """Whether this process drives accelerators, as far as one knows before JAX does."""
    if environ.get("JAX_PLATFORMS") == "cpu" or _FORCE in environ.get("XLA_FLAGS", ""):
        return False
    return bool(own) or any(map(os.path.exists, _CARDS))


def _force_cpu_devices(count: int, environ: MutableMapping[str, str]) -> None:
    flags = environ.get("XLA_FLAGS", "").split()
    flags = [flag for flag in flags if not flag.startswith(_FORCE)]
    flags.append(f"{_FORCE}={count}")
    if not any("xla_cpu_multi_thread_eigen" in flag for flag in flags):
        # Several devices keep the cores busy; threads inside each would only contend.
        flags.append("--xla_cpu_multi_thread_eigen=false")
    environ["XLA_FLAGS"] = " ".join(flags)
    environ.pop("JAX_NUM_CPU_DEVICES", None)  # it would have the last word
