"""What a card of the published profiles can do: its measured layer times.

layer_times.json, links.json (memory) -> profile(gpu) -> DeviceProfile
"""

import dataclasses
import functools
from collections.abc import Mapping
from pathlib import Path

from hexijax.cluster import DeviceProfile, catalog
from hexijax.cluster.values import Scalar
from hexijax.published.files import PublishedDataError, read, records

DTYPE = "float32"
"""The source trains in it."""

CARDS = {
    "A100-40": "a100-40g-sxm",
    "A100-80": "a100-80g-sxm",
    "V100-16": "v100-16g-sxm",
    "GH-96": "gh200-96g",
    "Titan-RTX": "titan-rtx-24g",
    "RTX-2080": "rtx2080ti-11g",  # 11 GB: the Ti
    "RTX-3090": "rtx3090-24g",
}
"""The catalog's name of each card; peaks and memory bandwidth are taken from there."""

PARTS = ("embed", "first", "block", "head")
"""Layers the profiler timed: 0, 1, 2 and the last; all further blocks repeat layer 2.

The first block is measured slower by a constant of some 0.3 ms, whatever the batch, so
it is a signature of its own."""


def signature(model: str, part: str) -> str:
    """Of a layer in the chain and in the profile's rows."""
    return f"{model}/{part}"


@functools.cache
def profile(folder: Path, gpu: str) -> DeviceProfile:
    """The kind called ``gpu`` with every layer time that was measured on it.

    Raises:
      PublishedDataError: no such card.
    """
    known = records(read(folder, "sailor", "links"), "gpus", gpu=gpu)
    if not known or gpu not in CARDS:
        raise PublishedDataError(
            f"The card {gpu!r} was asked for; links.json and the catalog have "
            f"{', '.join(CARDS)}."
        )
    return dataclasses.replace(
        catalog.profiles()[CARDS[gpu]],
        kind=gpu,
        nominal_memory_bytes=known[0]["memory_bytes"],
        usable_memory_bytes=0,
        native_dtypes=(DTYPE,),
        layer_times=tuple(_rows(folder, gpu)),
        source="measured by eth-easl/sailor; peaks from the catalog",
    )


def _rows(folder: Path, gpu: str) -> list[Mapping[str, Scalar]]:
    found: list[Mapping[str, Scalar]] = []
    for record in records(read(folder, "sailor", "layer_times"), "records", gpu=gpu):
        timed = (0, 1, 2, record["num_layers"] - 1)
        for part, layer in zip(PARTS, timed, strict=True):
            found.append(
                {
                    "signature": signature(record["model"], part),
                    "dtype": DTYPE,
                    "tensor": record["tp"],
                    "samples": record["mbs"],
                    "forward_s": record["fwd_s"][layer],
                    "backward_s": record["bwd_s"][layer],
                }
            )
        if record["update_params"]:
            found.append(
                {
                    "update_params": record["update_params"],
                    "update_s": record["update_s"],
                }
            )
    return found
