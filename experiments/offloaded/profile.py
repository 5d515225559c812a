"""What the card and its host do alone: products, links, updates, layers.

    python -m experiments.offloaded.profile RESULT --layers llama-3:4,8 gpt-4B:8:full

The result is written after each part.
"""

import argparse
import json
import os
import platform
import statistics
import time
from pathlib import Path
from typing import Any

import jax
import numpy as np
from jax.sharding import SingleDeviceSharding

from experiments.offloaded import cells
from hexijax.job.intake import trace_chain
from hexijax.layers.chain import Remat
from hexijax.program.program import Site
from hexijax.runtime.layer_timing import layer_rows
from hexijax.runtime.links import host_links, product_flops_per_s
from hexijax.runtime.stopwatch import median_s
from hexijax.runtime.update_timing import UpdateTime, update


def links(device: jax.Device) -> dict[str, float]:
    """Bytes a second into the device and out of it, alone and both at once."""
    found = host_links(device)
    alone = {"in": found.inward[-1], "out": found.outward[-1]}
    rates = {way: num_bytes / seconds for way, (num_bytes, seconds) in alone.items()}
    return rates | {"both": min(found.in_bytes_per_s, found.out_bytes_per_s)}


def pieces(device: jax.Device, count: int = 40) -> dict[str, float]:
    """Seconds that each of many small arrays adds to a copy of one: until the host has
    asked for it, and until it is there, into the device and out of it."""
    here = SingleDeviceSharding(device)
    host = here.with_memory_kind("pinned_host")
    found: dict[str, float] = {}
    for way, source, target in (("in", host, here), ("out", here, host)):
        arrays = [jax.device_put(np.ones(4096, np.float32), source)] * count

        def copied(number: int, arrays: Any = arrays, target: Any = target) -> Any:
            return jax.device_put(arrays[:number], [target] * number)

        asked: list[float] = []
        for number in (1, count) * 5:
            jax.block_until_ready(copied(number))
            began = time.perf_counter()
            made = copied(number)
            asked.append(time.perf_counter() - began)
            jax.block_until_ready(made)
        one, many = (statistics.median(asked[i::2]) for i in range(2))
        found[f"{way} asked"] = (many - one) / (count - 1)
        one, many = (median_s(lambda n=n, c=copied: c(n)) for n in (1, count))
        found[f"{way} there"] = (many - one) / (count - 1)
        found[f"{way} one"] = one
    return found


def updates(name: str, site: Site) -> UpdateTime:
    """A model's optimizer at a site."""
    experiment = cells.model(name)
    chain = trace_chain(experiment)
    devices = {cells.DEVICE: jax.devices()[0]}
    return update(
        experiment, chain, devices, cells.DEVICE, dtype=experiment.dtype, site=site
    )


def layers(
    name: str, samples: int, remat: Remat, *, small: bool
) -> list[dict[str, Any]]:
    """Rows of a model's layers under a policy."""
    experiment = cells.model(name)
    return layer_rows(
        experiment,
        trace_chain(experiment),
        cells.cluster(130, small=small),
        {cells.DEVICE: jax.devices()[0]},
        [cells.DEVICE],
        dtype=experiment.dtype,
        samples=samples,
        remat=remat,
    )


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("result", type=Path)
    parser.add_argument("--layers", nargs="*", default=[])
    parser.add_argument("--small", action="store_true")
    args = parser.parse_args()
    found: dict[str, Any] = {
        "card": jax.devices()[0].device_kind,
        "jax": jax.__version__,
        "python": platform.python_version(),
        "cores": len(os.sched_getaffinity(0)),
        "rows": [],
    }

    def keep() -> None:
        args.result.write_text(json.dumps(found, indent=1))

    device = jax.devices()[0]
    rows = 256 if args.small else 8192
    found["product_flops_per_s"] = product_flops_per_s(device, "bfloat16", rows)
    found["links"] = links(device)
    found["pieces"] = pieces(device)
    keep()
    for words in args.layers:
        name, sizes, *policies = words.split(":")
        if "update_params_per_s" not in found:
            found["update_params_per_s"] = updates(name, Site.HOST).params_per_s
            on_device = updates(name, Site.DEVICE)
            found["rows"].append(
                {"update_params": on_device.params, "update_s": on_device.seconds}
            )
            keep()
        for remat in map(Remat, policies[0].split(",") if policies else ["none"]):
            for samples in map(int, sizes.split(",")):
                found["rows"] += layers(name, samples, remat, small=args.small)
                keep()


if __name__ == "__main__":
    main()
