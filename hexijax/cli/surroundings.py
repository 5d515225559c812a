"""Which island this process is, as whoever started it says in the environment.

    run --island auto -> HEXIJAX_* | Slurm | Kubernetes | MPI -> number, how many, where

A launcher that starts equal processes, one a node, numbers them; islands are counted in
the order of the cluster file.
"""

import dataclasses
from collections.abc import Mapping

from hexijax.errors import UserError

AUTO = "auto"
"""``--island auto``."""

_NUMBERS = (
    ("HEXIJAX_ISLAND", "HEXIJAX_ISLANDS"),
    ("SLURM_PROCID", "SLURM_NTASKS"),
    ("JOB_COMPLETION_INDEX", "HEXIJAX_ISLANDS"),  # an indexed Job of Kubernetes
    ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE"),
    ("PMI_RANK", "PMI_SIZE"),
)
RENDEZVOUS = "HEXIJAX_RENDEZVOUS"
"""Where the launcher listens: ``HOST:PORT``."""


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Place:
    """What the environment says."""

    island: str
    """A name, or a number from 0."""

    of: int | None
    """How many there are; None: it does not say."""


def place(environ: Mapping[str, str]) -> Place:
    """This process's place among those that were started together.

    Raises:
      UserError: the environment does not say.
    """
    for number, count in _NUMBERS:
        if island := environ.get(number, ""):
            of = environ.get(count, "")
            return Place(island=island, of=int(of) if of.isdigit() else None)
    asked = ", ".join(number for number, _ in _NUMBERS)
    raise UserError(
        f"--island auto: none of {asked} is set, so nothing says which island this is. "
        "Start it by srun, by an indexed Job of Kubernetes or by mpirun, set "
        "HEXIJAX_ISLAND, or name it: --island NAME."
    )
