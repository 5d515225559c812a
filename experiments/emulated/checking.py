"""What the cards are, before anything is trained: products, links, memory.

python -m experiments.emulated.checking RESULT
"""

import argparse
import json
import platform
from pathlib import Path
from typing import Any

import jax

from hexijax.runtime.links import host_link_s, link_s, product_flops_per_s


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
        "product_flops_per_s": [
            product_flops_per_s(d, "bfloat16", rows) for d in devices
        ],
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
