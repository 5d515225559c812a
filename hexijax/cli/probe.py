"""What a host has, for `hexijax cluster init` on another: JSON on a line.

python -m hexijax.cli.probe              devices, memory, versions
python -m hexijax.cli.probe rate HOST    listens there, says where, serves one caller
python -m hexijax.cli.probe rate-to HOST:PORT     calls it
"""

import contextlib
import json
import os
import platform
import shutil
import subprocess
import sys
from typing import Any

from hexijax.islands import rates
from hexijax.islands.wire import TOKEN


def look() -> dict[str, Any]:
    """This machine, as a node of a cluster file, with what was measured."""
    from hexijax.report.summary import versions
    from hexijax.runtime.devices import local_cluster

    cluster = local_cluster()
    (node,) = cluster.nodes
    return {
        "cluster": cluster.to_json(),
        "kinds": [[group.kind, group.count] for group in node.devices],
        "free_bytes": free_bytes(),
        "apart": cards_apart(),
        "host_memory_bytes": node.host_memory_bytes,
        "host_cores": node.host_cores,
        "versions": versions() | {"system": platform.platform()},
    }


def free_bytes() -> list[int]:
    """Memory that is free now on each NVIDIA card."""
    said = _nvidia_smi("--query-gpu=memory.free", "--format=csv,noheader,nounits")
    return [int(x) * 2**20 for x in said.split() if x.isdigit()]


def cards_apart() -> list[list[int]]:
    """Pairs of NVIDIA cards that cannot read each other's memory."""
    return parse_peers(_nvidia_smi("topo", "-p2p", "r"))


def parse_peers(said: str) -> list[list[int]]:
    """Pairs that `nvidia-smi topo -p2p r` does not call OK."""
    words = [line.split() for line in said.splitlines()]
    rows = [w for w in words if w and w[0].startswith("GPU") and "X" in w[1:]]
    found = []
    for i, row in enumerate(rows):
        for j, word in enumerate(row[1 : len(rows) + 1]):
            if i < j and word not in ("OK", "X"):
                found.append([i, j])
    return found


def _nvidia_smi(*words: str) -> str:
    if shutil.which("nvidia-smi") is None:
        return ""
    with contextlib.suppress(OSError, subprocess.TimeoutExpired):
        return subprocess.run(
            ["nvidia-smi", *words], capture_output=True, text=True, timeout=30
        ).stdout
    return ""


def _main(words: list[str]) -> None:
    match words:
        case ["rate", host]:
            rates.serve(host, os.environ[TOKEN], lambda at: print(at, flush=True))
        case ["rate-to", address]:
            print(json.dumps(rates.measure(address, os.environ[TOKEN])))
        case ["arrays" | "arrays-to" as way, where]:
            os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
            from hexijax.islands import array_rates

            if way == "arrays":
                token = os.environ[TOKEN]
                array_rates.serve(where, token, lambda at: print(at, flush=True))
            else:
                print(json.dumps(array_rates.measure(where, os.environ[TOKEN])))
        case _:
            print(json.dumps(look()))


if __name__ == "__main__":
    _main(sys.argv[1:])
