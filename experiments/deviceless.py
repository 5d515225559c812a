"""A card that this machine does not have, to compile for.

    kind -> compile_only -> jax.Device without memory or streams

XLA's plugin for CUDA compiles for a card by its description and says what the program
would take; nothing runs. Needs `jax[cuda13]`, no driver. Kernels are not timed against
each other, so products go to the library, which is what timing mostly finds for large
ones; triton's fusions may save a little over that.
"""

import os
from typing import Any

from hexijax.cluster import DeviceProfile
from hexijax.cluster.catalog import get

FLAGS = "--xla_gpu_autotune_level=0 --xla_gpu_enable_triton_gemm=false"
"""For XLA_FLAGS before JAX starts."""

LIMITS = """
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  registers_per_core_limit: 65536 registers_per_block_limit: 65536 fpus_per_core: 128
  shared_memory_per_block: 49152 l2_cache_size: 52428800 clock_rate_ghz: 1.7
"""
"""Of no effect on memory."""

SHARED_KIB = {(7, 0): 96, (7, 5): 64, (8, 0): 163, (8, 6): 99, (8, 9): 99, (9, 0): 227}
"""Of a block, by compute capability."""


def set_flags() -> None:
    """To be called before anything imports JAX."""
    os.environ["JAX_PLATFORMS"] = "cpu"
    os.environ["XLA_FLAGS"] = f"{os.environ.get('XLA_FLAGS', '')} {FLAGS}"


def compile_only(kind: str, count: int = 1) -> list[Any]:
    """Cards of the catalog's ``kind`` in one host, as JAX devices."""
    from jax.experimental import topologies

    profile = get(kind)
    _pretend_cudnn(profile)
    topology = topologies.get_topology_desc(
        "host", "cuda", target_config=_target(profile), topology=f"1x{count}x1"
    )
    return list(topology.devices)


def _target(profile: DeviceProfile) -> str:
    assert profile.compute_capability is not None, profile.kind
    major, minor = map(int, profile.compute_capability.split("."))
    shared = SHARED_KIB[major, minor] * 1024
    memory = int(profile.memory_bytes_per_s)
    return (
        f"gpu_device_info {{ {LIMITS} core_count: {profile.compute_units or 80} "
        f"shared_memory_per_core: {shared + 1024} memory_bandwidth: {memory} "
        f"shared_memory_per_block_optin: {shared} "
        f"device_memory_size: {profile.nominal_memory_bytes} "
        f"cuda_compute_capability {{ major: {major} minor: {minor} }} }} "
        'runtime_version { major: 13 } platform_name: "CUDA" '
        "dnn_version_info { major: 9 minor: 10 } "
        f'device_description_str: "{profile.kind}"'
    )


def _pretend_cudnn(profile: DeviceProfile) -> None:
    """JAX asks this machine's card whether it has fused attention; there is none."""
    from jax._src.cudnn import fused_attention_stablehlo as fused

    found: dict[str, object] = {
        "check_cudnn_version": lambda: 91000,
        "check_compute_capability": lambda least: True,
        "is_cuda_compute_capability_equal": (
            lambda asked: asked == profile.compute_capability
        ),
    }
    for name, answer in found.items():
        setattr(fused, name, answer)
