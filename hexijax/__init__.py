"""Train unmodified Flax models on clusters whose accelerators differ.

The public names load on first use, so that ``import hexijax``, and planning with it,
imports no JAX.
"""

import importlib
from typing import TYPE_CHECKING

from hexijax.errors import did_you_mean

if TYPE_CHECKING:
    from hexijax.cluster import Cluster
    from hexijax.experiment import Experiment
    from hexijax.job.intake import trace_chain
    from hexijax.job.platform import emulate
    from hexijax.planner import make_plan
    from hexijax.simulator import predict as simulate
    from hexijax.trainer import Trainer
    from hexijax.weights import load

__version__ = "0.1.0"

__all__ = [
    "Cluster",
    "Experiment",
    "Trainer",
    "__version__",
    "emulate",
    "load",
    "make_plan",
    "simulate",
    "trace_chain",
]

_HOME_OF = {
    "Cluster": "hexijax.cluster.Cluster",
    "Experiment": "hexijax.experiment.Experiment",
    "Trainer": "hexijax.trainer.Trainer",
    "emulate": "hexijax.job.platform.emulate",
    "load": "hexijax.weights.load",
    "make_plan": "hexijax.planner.make_plan",
    "simulate": "hexijax.simulator.predict",
    "trace_chain": "hexijax.job.intake.trace_chain",
}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(
            f"module 'hexijax' has no attribute {name!r}."
            f"{did_you_mean(name, _HOME_OF)} Its public names are "
            f"{', '.join(sorted(_HOME_OF))}."
        )
    module, _, there = _HOME_OF[name].rpartition(".")
    value = getattr(importlib.import_module(module), there)
    globals()[name] = value  # the next access is a plain one
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _HOME_OF.keys())
