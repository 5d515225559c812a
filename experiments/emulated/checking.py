"""What the cards are, before anything is trained: products, links, memory.

python -m experiments.emulated.checking RESULT
"""

import argparse
import json
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

from hexijax.runtime.profiling import host_link_s, link_s


def product_flops_per_s(device: jax.Device, rows: int, repeats: int = 8) -> float:
    """Of a square bfloat16 product of random numbers: the median of some."""
    with jax.default_device(device):
        a, b = jax.random.normal(jax.random.key(0), (2, rows, rows), jnp.bfloat16)
        product = jax.jit(lambda a, b: a @ b)
        product(a, b).block_until_ready()
        times = []
        for _ in range(repeats):
            began = time.perf_counter()
            for _ in range(4):
                out = product(a, b)
            out.block_until_ready()
            times.append((time.perf_counter() - began) / 4)
    return 2 * rows**3 / statistics.median(times)


def check(rows: int, message_bytes: int) -> dict[str, Any]:
    """Of all devices of this process."""
    devices = jax.devices()
    first, last = devices[0], devices[-1]
    small_s = link_s(first, last, 4096, 50)
    pairs = [(a, b) for a in devices for b in devices if a != b]
    rates = {
        f"{a.id} to {b.id}": message_bytes / (link_s(a, b, message_bytes) - small_s)
        for a, b in pairs
    }
    stats = [device.memory_stats() or {} for device in devices]
    return {
        "card": first.device_kind,
        "cards": len(devices),
        "jax": jax.__version__,
        "python": platform.python_version(),
        "product_flops_per_s": [product_flops_per_s(d, rows) for d in devices],
        "link_latency_s": small_s,
        "link_bytes_per_s": rates,
        "host_bytes_per_s": message_bytes / host_link_s(first, message_bytes),
        "limit_bytes": [each.get("bytes_limit") for each in stats],
    }


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--setting", default="four")
    args = parser.parse_args()
    found = check(256, 2**20) if args.setting == "small" else check(8192, 2**28)
    args.result.write_text(json.dumps(found, indent=1))


if __name__ == "__main__":
    main()
