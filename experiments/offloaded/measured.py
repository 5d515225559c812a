"""What was measured of the card before, whichever command did it.

bench_offload's JSON, or the .toml of `hexijax profile` -> of_file -> a profile part
"""

import json
import tomllib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from experiments.offloaded.cells import HOST_CORES
from hexijax.errors import UserError


def of_file(path: Path) -> dict[str, Any]:
    """As the ``profile`` part of the benchmark has it: ``links``, bytes a second, and
    ``update_params_per_s`` of the host, ``way_back``, bytes a second of what it made,
    ``product_flops_per_s``, ``rows`` of layers.

    Raises:
      UserError: a profile file of several kinds or nodes, or one that was ended before
        links and updates were measured.
    """
    if path.suffix != ".toml":
        return json.loads(path.read_text())["offload"]["profile"]
    document = tomllib.loads(path.read_text())
    kinds, nodes = document.get("kinds", {}), document.get("nodes", [])
    if len(kinds) != 1 or len(nodes) != 1:
        raise UserError(
            f"{path} has {len(kinds)} kinds and {len(nodes)} nodes; this benchmark is "
            "of one card in one host. Measure that with `hexijax profile --node NAME`."
        )
    ((kind, rows),) = kinds.items()
    card, node = document["measured"][kind], nodes[0]
    wanted = ("host_link_gb_per_s", "host_out_gb_per_s", "host_update_mparams_per_s")
    if missing := [name for name in wanted if name not in node]:
        raise UserError(
            f"{path} has no {', '.join(missing)}. The same `hexijax profile` again "
            "measures what is missing."
        )
    return {
        "links": {
            "in": _rate(card["host_in_bytes_us"]),
            "out": _rate(card["host_out_bytes_us"]),
            "both": 1e9 * min(node["host_link_gb_per_s"], node["host_out_gb_per_s"]),
        },
        "update_params_per_s": 1e6 * node["host_update_mparams_per_s"],
        "product_flops_per_s": 1e12 * card["product_tflops"],
        "way_back": 1e9 * node.get("host_return_gb_per_s", 0.0),
        "cores": HOST_CORES,
        "rows": list(rows.get("layer_times", ())),
    } | {name: card[name] for name in ("card", "jax") if name in card}


def _rate(copies: Sequence[Sequence[float]]) -> float:
    """Bytes a second of the largest copy, the last."""
    num_bytes, microseconds = copies[-1]
    return num_bytes / microseconds * 1e6
