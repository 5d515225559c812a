"""The environment that JAX starts in follows from the cluster and the flags."""

from pathlib import Path

import pytest

from hexijax.cluster import Cluster
from hexijax.job import platform

CLUSTERS = Path(__file__).parents[2] / "experiments" / "clusters"
FORCE = "--xla_force_host_platform_device_count"


@pytest.mark.parametrize(
    ("cluster", "flags", "platforms", "forced"),
    [
        (None, {}, None, None),
        (None, {"cpu": True}, "cpu", None),
        ("quickstart", {}, "cpu", 8),
        ("h100_x4", {}, None, None),
        ("h100_x4", {"cpu": True}, "cpu", None),
        ("hexiscale", {"emulate": True}, "cpu", 8),
    ],
)
def test_platform_and_forced_devices(
    cluster: str | None,
    flags: dict[str, bool],
    platforms: str | None,
    forced: int | None,
):
    environ: dict[str, str] = {}
    made = Cluster.from_toml(CLUSTERS / f"{cluster}.toml") if cluster else None
    platform.prepare(made, environ=environ, **flags)
    assert environ.get("JAX_PLATFORMS") == platforms
    assert (f"{FORCE}={forced}" in environ.get("XLA_FLAGS", "")) == (forced is not None)


def test_a_host_beside_cards_has_parts_before_the_ghosts(
    monkeypatch: pytest.MonkeyPatch,
):
    monkeypatch.setattr(platform.os, "cpu_count", lambda: 16)
    alone: dict[str, str] = {}
    cluster = Cluster.from_toml(CLUSTERS / "a100_v100.toml")
    platform.prepare(cluster, environ=alone)
    assert alone["JAX_NUM_CPU_DEVICES"] == "8"
    assert "XLA_FLAGS" not in alone

    island, *_ = dict.fromkeys(d.island for d in cluster.devices)
    others = sum(d.island != island for d in cluster.devices)
    apart = {"JAX_NUM_CPU_DEVICES": "2"}  # inherited from the launcher
    platform.prepare(cluster, island=island, environ=apart)
    assert f"{FORCE}={others + 8}" in apart["XLA_FLAGS"]
    assert "JAX_NUM_CPU_DEVICES" not in apart

    emulated: dict[str, str] = {}
    platform.prepare(cluster, island=island, emulate=True, environ=emulated)
    assert f"{FORCE}={len(cluster.devices)}" in emulated["XLA_FLAGS"].split()


def test_what_the_user_has_set_is_kept():
    environ = {
        "XLA_FLAGS": f"--xla_dump_to=x {FORCE}=2",
        "JAX_COMPILATION_CACHE_DIR": "mine",
    }
    cluster = Cluster.from_toml(CLUSTERS / "quickstart.toml")
    platform.prepare(cluster, environ=environ)
    dump, count, _ = environ["XLA_FLAGS"].split()
    assert (dump, count) == ("--xla_dump_to=x", f"{FORCE}=8")
    assert environ["JAX_COMPILATION_CACHE_DIR"] == "mine"
    platform.prepare(None, environ=(fresh := {"XDG_CACHE_HOME": "/cache"}))
    assert fresh["JAX_COMPILATION_CACHE_DIR"] == "/cache/hexijax/jax"
