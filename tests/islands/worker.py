"""One island as a process of its own, told what to do on its standard input.

    python -m tests.islands.worker '{"island": ..., "islands": ...}'

It says its transfer address, is told the others', and then does a task a line.
"""

import json
import sys
import time
from typing import Any


def main() -> None:
    given = json.loads(sys.argv[1])
    from hexijax.job import platform
    from tests.islands.cases import cluster

    made = cluster(given["count"])
    platform.prepare(made, island=given["island"])

    import numpy as np

    from hexijax.islands.transfer import TransferChannel, start_server
    from hexijax.islands.world import World
    from tests.islands import tasks

    server = start_server("127.0.0.1:0")
    print(json.dumps(server.address), flush=True)
    peers = json.loads(sys.stdin.readline())
    world = World(
        name=given["island"],
        islands=tuple(made.islands),
        run="test",
        generation=0,
        key=bytes.fromhex(given["key"]),
        peers=peers,
        pull_s=given["pull_s"],
    )
    channel = TransferChannel(server, world)
    for line in sys.stdin:
        task = json.loads(line)
        began = time.perf_counter()
        found: dict[str, Any] = getattr(tasks, task.pop("do"))(world, channel, **task)
        arrays = {k: x for k, x in found.items() if isinstance(x, np.ndarray)}
        told = {k: x for k, x in found.items() if k not in arrays}
        if arrays:
            told["file"] = f"{given['folder']}/{given['island']}.npz"
            np.savez(told["file"], **arrays)
        told["took_s"] = time.perf_counter() - began
        print(json.dumps(told), flush=True)


if __name__ == "__main__":
    main()
