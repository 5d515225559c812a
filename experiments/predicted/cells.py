"""What is predicted and measured: a model, on two cards, with their profile.

name -> cell(name) -> Cell; Cell, profile -> Cell.problem -> Problem
"""

import dataclasses
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

from experiments import llama_1b
from experiments.predicted import small
from hexijax.cluster import Cluster
from hexijax.errors import UserError
from hexijax.experiment import Experiment
from hexijax.job.clusters import read_cluster
from hexijax.job.intake import trace_chain, training_facts
from hexijax.layers.chain import Chain
from hexijax.report.problem import Problem
from models.llama import LlamaConfig
from models.sizes import get_config

CLUSTERS = Path(__file__).parents[1] / "clusters"


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Cell:
    """A model and the cards that it trains on."""

    make: Callable[[], Experiment]
    """What is trained, its norm clipped."""

    config: LlamaConfig
    """Of the model."""

    cluster: str
    """File of the two cards, as data sheets have them."""

    sizes: tuple[int, ...]
    """Microbatches to draw from, samples a device; what lies between measured ones is
    reckoned from them."""

    samples: tuple[int, int]
    """Fewest and most samples a device and step."""

    batch_size: int
    """Sequences of a step where equal cards are compared."""

    def experiment(self, batch_size: int, *, clip: bool) -> Experiment:
        """For a plan's batch, with or without clipping by the global norm."""
        made = self.make()
        norm = made.clip_norm if clip else None
        return dataclasses.replace(made, batch_size=batch_size, clip_norm=norm)

    def chain(self) -> Chain:
        """The model as layers, traced here."""
        return trace_chain(self.make())

    def measured_cluster(self, profile: Path | None) -> Cluster:
        """The cards, with what a profile file says of them."""
        cluster = read_cluster(CLUSTERS / self.cluster)
        if profile is None:
            return cluster
        return cluster.with_profiles(profile, of_others=False)

    def problem(
        self, chain: Chain, cluster: Cluster, batch_size: int, *, clip: bool
    ) -> Problem:
        """What a plan of ``batch_size`` solves."""
        return Problem(
            name=self.make().name,
            chain=chain,
            cluster=cluster,
            batch_size=batch_size,
            training=_training(self, clip),
        )


@functools.cache
def _training(cell: Cell, clip: bool) -> Any:
    return training_facts(cell.experiment(1, clip=clip))


def _large_config() -> LlamaConfig:
    config = get_config("llama", "1.35B", max_length=2048)
    assert isinstance(config, LlamaConfig)
    return config


CELLS = {
    "llama": Cell(
        make=llama_1b.experiment,
        config=_large_config(),
        cluster="h200_x2.toml",
        sizes=(2, 3, 4, 6, 8),
        samples=(8, 24),
        batch_size=256,
    ),
    "small": Cell(
        make=small.experiment,
        config=small.CONFIG,
        cluster="cpu_x2.toml",
        sizes=(1, 2, 3, 4),
        samples=(4, 12),
        batch_size=16,
    ),
}


def cell(name: str) -> Cell:
    """By name.

    Raises:
      UserError: there is none of that name.
    """
    if name not in CELLS:
        raise UserError(
            f"{name!r} was asked for; there are {', '.join(CELLS)} to be predicted."
        )
    return CELLS[name]
