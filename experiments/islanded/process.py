"""A process of the islands' benchmark: one island of several, or all of it.

python -m experiments.islanded.process TASK BRIEF --island NAME --rendezvous HOST:PORT
python -m experiments.islanded.process TASK BRIEF --result FILE
"""

import argparse
import json
import os
from pathlib import Path
from typing import Any

from hexijax.cluster import Cluster
from hexijax.islands.member import Member
from hexijax.islands.processes import end_with_launcher
from hexijax.islands.wire import TOKEN
from hexijax.job import platform

JOIN_S = 120.0


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("task")
    parser.add_argument("brief", type=Path, help="cluster, and arguments of the task")
    parser.add_argument("--island")
    parser.add_argument("--rendezvous")
    parser.add_argument("--result", type=Path)
    args = parser.parse_args()
    brief = json.loads(args.brief.read_text())
    cluster = Cluster.from_json(brief["cluster"]) if brief["cluster"] else None
    if args.island is None:
        platform.prepare(cluster)
        args.result.write_text(json.dumps(_run(args.task, cluster, brief)))
        return
    assert cluster is not None, "an island is part of one"
    end_with_launcher()
    member = Member.connect(
        args.rendezvous, args.island, token=os.environ[TOKEN], seconds=JOIN_S
    )
    platform.prepare(cluster, island=args.island)
    member.leave(0, found=_run(args.task, cluster, brief, member))


def _run(
    task: str,
    cluster: Cluster | None,
    brief: dict[str, Any],
    member: Member | None = None,
) -> Any:
    """After the environment is set: it imports JAX."""
    from experiments.islanded import paths, training
    from experiments.islanded.here import Here, island
    from hexijax.runtime.devices import local_cluster

    if member is not None and cluster is not None:
        here = island(cluster, member)
    else:
        here = Here(cluster=cluster or local_cluster())
    module = paths if hasattr(paths, task) else training
    return getattr(module, task)(here, **brief["given"])


if __name__ == "__main__":
    main()
