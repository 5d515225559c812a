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
    from hexijax.planner import make_plan
    from hexijax.weights import load

__version__ = "0.1.0"

__all__ = ["Cluster", "Experiment", "__version__", "load", "make_plan"]

_HOME_OF = {
    "Cluster": "hexijax.cluster",
    "Experiment": "hexijax.experiment",
    "load": "hexijax.weights",
    "make_plan": "hexijax.planner",
}


def __getattr__(name: str) -> object:
    if name not in _HOME_OF:
        raise AttributeError(
            f"module 'hexijax' has no attribute {name!r}."
            f"{did_you_mean(name, _HOME_OF)} Its public names are "
            f"{', '.join(sorted(_HOME_OF))}."
        )
    value = getattr(importlib.import_module(_HOME_OF[name]), name)
    globals()[name] = value  # the next access is a plain one
    return value


def __dir__() -> list[str]:
    return sorted(globals().keys() | _HOME_OF.keys())
