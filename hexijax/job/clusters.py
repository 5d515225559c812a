"""Where a job runs: a cluster file, a cluster, or this machine."""

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
