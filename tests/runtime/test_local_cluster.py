"""What this machine is taken to be where nobody describes it."""

import os

import jax
import pytest

from hexijax.runtime.devices import local_cluster

GIB = 2**30


@pytest.mark.parametrize(("host_gib", "each_gib"), [(3, 2), (64 * 8, 32)])
def test_cpu_devices_share_half_of_the_host_s_memory(
    host_gib: int, each_gib: int, monkeypatch: pytest.MonkeyPatch
):
    assert len(jax.local_devices()) == 8
    sizes = {"SC_PHYS_PAGES": host_gib * GIB // 4096, "SC_PAGE_SIZE": 4096}
    monkeypatch.setattr(os, "sysconf", sizes.__getitem__)
    cluster = local_cluster()
    each = {device.usable_memory_bytes for device in cluster.devices}
    assert each == {each_gib * GIB}
    assert cluster.nodes[0].host_memory_bytes == host_gib * GIB
