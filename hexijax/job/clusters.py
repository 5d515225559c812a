"""Where a job runs: a cluster file, a cluster, or this machine."""

import dataclasses
from pathlib import Path

from hexijax.cluster import Cluster
from hexijax.errors import UserError


def read_cluster(file: Path) -> Cluster:
    """The cluster in ``file``.

    Raises:
      UserError: there is no such file, or it does not describe a cluster.
    """
    if not file.is_file():
        raise UserError(
            f"There is no cluster file {file} (looked from {Path.cwd()}). Examples lie "
            "in experiments/clusters."
        )
    return Cluster.from_toml(file)


def given_cluster(given: Cluster | str | Path | None) -> Cluster | None:
    """A cluster, or the one in a file; None stays, for this machine."""
    if given is None or isinstance(given, Cluster):
        return given
    return read_cluster(Path(given).expanduser())


def regrouped(cluster: Cluster, count: int) -> Cluster:
    """The cluster with neighbouring nodes in ``count`` islands, called as the first.

    Raises:
      UserError: it has fewer nodes.
    """
    nodes = cluster.nodes
    if len(nodes) < count:
        raise UserError(
            f"--local {count}: cluster {cluster.name!r} has {len(nodes)} nodes, and an "
            "island is a node or more. Ask for at most that many, or describe more "
            "nodes in the cluster file."
        )
    at = [i * count // len(nodes) for i in range(len(nodes))]
    called = {k: node.name for k, node in reversed([*zip(at, nodes, strict=True)])}
    made = [
        dataclasses.replace(node, island=called[k])
        for k, node in zip(at, nodes, strict=True)
    ]
    return dataclasses.replace(cluster, nodes=tuple(made))
