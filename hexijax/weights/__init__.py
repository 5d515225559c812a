"""Weights in and out: safetensors, Orbax folders, checkpoints, trees.

    file or folder -> Source -> the devices that need each box      Experiment(init=...)
    a run's checkpoint -> Source -> tree, file or folder            load, export

A ``Source`` says names, shapes and dtypes and reads any box of any tensor, so that no
host holds more than a window of a model. Nothing here imports JAX.
"""

from hexijax.weights.errors import WeightsError
from hexijax.weights.exporting import export, write_safetensors
from hexijax.weights.loading import load
from hexijax.weights.maps.vit import vit
from hexijax.weights.names import Named, NameMap
from hexijax.weights.opening import open_weights
from hexijax.weights.orbax import Orbax
from hexijax.weights.runs import Run
from hexijax.weights.safetensors import Safetensors
from hexijax.weights.source import Arrays, Box, Source, Tensor

__all__ = [
    "Arrays",
    "Box",
    "NameMap",
    "Named",
    "Orbax",
    "Run",
    "Safetensors",
    "Source",
    "Tensor",
    "WeightsError",
    "export",
    "load",
    "open_weights",
    "vit",
    "write_safetensors",
]
