"""A run in figures: ``report.json``, and the lines on the screen at its end."""

import contextlib
import importlib.metadata
import platform
from collections.abc import Mapping, Sequence
from typing import Any

import hexijax
from hexijax.cluster import Cluster, DeviceProfile
from hexijax.plan import Plan
from hexijax.plan.serial import report_replicas
from hexijax.report.metrics import Meter, Metrics

FORMAT_VERSION = 1

_PACKAGES = ("jax", "jaxlib", "flax", "optax", "orbax-checkpoint", "grain", "numpy")

Report = dict[str, Any]


def make_report(
    *,
    name: str,
    status: str,
    metrics: Metrics,
    meter: Meter,
    plan: Plan | None,
    cluster: Cluster,
    devices: Mapping[str, str],
    peak_bytes_by_device: Mapping[str, int],
    data: Mapping[str, str] | None = None,
) -> Report:
    """All figures of a run, JSON-able.

    Args:
        name: of the experiment.
        status: ``done``, ``interrupted`` or ``failed``.
        metrics: the steps so far.
        meter: their speed.
        plan: None for the plain program on one device.
        cluster: whose devices the plan names.
        devices: what JAX calls the device that stands for each name.
        peak_bytes_by_device: measured; empty where the backend does not count.
        data: fingerprints of what was trained and evaluated on.
    """
    return {
        "version": FORMAT_VERSION,
        "name": name,
        "status": status,
        "steps": metrics.steps,
        "skipped_steps": metrics.skipped,
        "loss_first": _finite(metrics.first_loss),
        "loss_last": _finite(metrics.last_loss),
        **meter.summary(),
        "predicted_step_s": plan.prediction.step_s
        if plan and plan.prediction
        else None,
        "peak_bytes_by_device": dict(peak_bytes_by_device),
        "devices": [
            {"name": name, "kind": _kind(cluster, name), "jax": jax_name}
            for name, jax_name in devices.items()
        ],
        "data": dict(data or {}),
        "versions": versions(),
        "replicas": report_replicas(plan) if plan else [],
    }


def versions() -> dict[str, str]:
    """Of Python, hexijax and what it runs on, as far as it is installed."""
    found = {"python": platform.python_version(), "hexijax": hexijax.__version__}
    for name in _PACKAGES:
        with contextlib.suppress(importlib.metadata.PackageNotFoundError):
            found[name] = importlib.metadata.version(name)
    return found


def peak_flops_per_s(plan: Plan, cluster: Cluster) -> float | None:
    """Dense peaks of the plan's devices, each in its stage's dtype; None if unknown."""
    dtype_by_device = {
        name: stage.dtype for _, stage in plan.stages() for name in stage.devices
    }
    total = 0.0
    for name, dtype in dtype_by_device.items():
        peak = product_flops_per_s(cluster.device(name).profile, dtype)
        if peak is None:
            return None
        total += peak
    return total


def product_flops_per_s(profile: DeviceProfile, dtype: str) -> float | None:
    """Dense peak of a kind's matrix products in a dtype; None: it has none.

    JAX multiplies float32 matrices in tf32 where a card has it, so that peak counts.
    """
    peaks = profile.dense_flops_per_s
    if dtype == "float32" and "tf32" in peaks:
        dtype = "tf32"
    return peaks.get(dtype)


def render(report: Report, folder: str, more: Sequence[str] = ()) -> str:
    """The few lines a person wants at the end; ``more`` stand before the folder."""
    if not report["steps"]:
        return f"{report['name']}: {report['status']} before the first step. {folder}"
    first, last = (_number(report[key], ".4f") for key in ("loss_first", "loss_last"))
    speed = [
        f"{_number(report['tokens_per_s'], ',.0f')} tokens/s",
        f"{_number(report['measured_step_s'], '.4g')} s a step",
    ]
    if report["predicted_step_s"] and "prediction" not in report:
        # The plan's own word, stale once edited by hand; ``more`` knows better.
        speed.append(f"predicted {_number(report['predicted_step_s'], '.4g')} s")
    if report["mfu"] is not None:
        speed.append(f"MFU {report['mfu']:.1%}")
    skipped = report.get("skipped_steps", 0)  # reports of older versions lack it
    left_out = f", of which {skipped} were skipped" if skipped else ""
    lines = [
        f"{report['name']}: {report['status']} after {report['steps']} steps{left_out}",
        f"  loss    {first} -> {last}",
        f"  speed   {', '.join(speed)}",
    ]
    if peaks := report["peak_bytes_by_device"]:
        device = max(peaks, key=lambda name: peaks[name])
        lines.append(f"  memory  at most {peaks[device] / 2**30:.2f} GiB ({device})")
    return "\n".join([*lines, *more, f"  folder  {folder}"])


def _kind(cluster: Cluster, name: str) -> str:
    known = {device.name: device.profile.kind for device in cluster.devices}
    return known.get(name, "")


def _finite(loss: float | None) -> float | str | None:
    """JSON has no NaN: it is written as text."""
    return loss if loss is None or abs(loss) < float("inf") else str(loss)


def _number(value: float | str | None, form: str) -> str:
    return (
        str(value) if value is None or isinstance(value, str) else format(value, form)
    )
