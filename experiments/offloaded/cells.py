"""What is measured: models, and the card they run on under a cap.

name -> model(name) -> Experiment; rates, rows, cap -> cluster -> Cluster
"""

import dataclasses
from collections.abc import Mapping, Sequence
from typing import Any

from experiments import offload_gpt, offload_llama
from hexijax.cluster import Cluster
from hexijax.data import RandomTokens
from hexijax.experiment import Experiment

DEVICE = "box/0"
HOST_GIB, HOST_CORES = 120, 16


def model(name: str) -> Experiment:
    """``llama-N`` and ``gpt-2B``: Llama's blocks are of 5.1 B's width; ``small-N``."""
    family, size = name.split("-")
    if family == "gpt":
        return offload_gpt.experiment(size=size)
    if family == "small":
        made = offload_llama.experiment(size="1.35B", length=32)
        return _small(made, int(size))
    return offload_llama.experiment(size="5.1B", depth=int(size))


def _small(like: Experiment, depth: int) -> Experiment:
    """A model for CPU devices."""
    from experiments.common import next_token
    from models.llama import Llama, LlamaConfig

    config = LlamaConfig(
        vocab_size=256,
        width=512,
        depth=depth,
        num_heads=4,
        num_kv_heads=4,
        ff_width=1024,
    )
    return dataclasses.replace(
        like,
        name=f"offload_small_{depth}",
        loss=next_token(Llama, config),
        data=RandomTokens(256, 32),
        dtype="float32",
    )


def cluster(
    cap_gib: float,
    *,
    rates: Mapping[str, float] | None = None,
    rows: Sequence[Mapping[str, Any]] = (),
    small: bool = False,
) -> Cluster:
    """One card, of which ``cap_gib`` are used.

    Args:
      cap_gib: device memory, GiB.
      rates: ``in``, ``out`` in bytes a second and ``update`` in parameters a second, as
        measured of the host, and ``return``, bytes a second of what it made; None, or
        left out: the usual ones.
      rows: measured times of the kind's layers.
      small: a forced CPU device.
    """
    kind = SMALL if small else 'base = "h200-141g-sxm"\n'
    lines = [
        *("format = 1", 'name = "offload"', "[kinds.card]", kind),
        f'memory_gib = {cap_gib}\nsource = "a card with a cap"',
        f'[[nodes]]\nname = "box"\nhost_memory_gib = {HOST_GIB}',
        f"host_cores = {HOST_CORES}",
        'devices = [{ kind = "card", count = 1 }]',
    ]
    if rates:
        lines += [
            f"host_link_gb_per_s = {rates['in'] / 1e9:.2f}",
            f"host_out_gb_per_s = {rates['out'] / 1e9:.2f}",
            f"host_update_mparams_per_s = {rates['update'] / 1e6:.0f}",
        ]
        if "return" in rates:
            lines.append(f"host_return_gb_per_s = {rates['return'] / 1e9:.2f}")
    made = Cluster.from_toml("\n".join(lines))
    if not rows:
        return made
    profiles = tuple(
        dataclasses.replace(
            p, layer_times=tuple(rows), source="a card with a cap; layers measured"
        )
        for p in made.profiles
    )
    return dataclasses.replace(made, profiles=profiles)


SMALL = """vendor = "cpu"
peak_tflops = { float32 = 0.05 }
memory_gb_per_s = 10
host_link_gb_per_s = 10"""
