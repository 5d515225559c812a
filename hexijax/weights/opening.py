"""What a person may give for weights, as a ``Source``: a path, or one already.

path -> Run | Safetensors | Orbax
"""

import dataclasses
from pathlib import Path
from typing import Any, TypeGuard

from hexijax.weights.errors import WeightsError
from hexijax.weights.orbax import METADATA, Orbax
from hexijax.weights.runs import Run, is_run
from hexijax.weights.safetensors import Safetensors, is_safetensors
from hexijax.weights.source import Source


def is_weights(given: Any) -> TypeGuard[str | Path | Source]:
    """Whether ``given`` names weights, and is no function or tree."""
    return isinstance(given, str | Path | Source)


def open_weights(given: "str | Path | Source") -> Source:
    """The source behind a path, by what lies there.

    Raises:
      WeightsError: nothing there looks like weights.
    """
    if isinstance(given, Source):
        return given
    path = Path(given).expanduser()
    if is_run(path):
        return Run(path)
    if is_safetensors(path):
        return Safetensors(path)
    if path.is_dir() and any(path.glob(f"**/{METADATA}")):
        return Orbax(path)
    what = "holds none" if path.exists() else "is not there"
    raise WeightsError(
        f"Weights were asked of {path}, which {what} (looked from {Path.cwd()}). They "
        "are a safetensors file or a folder of them, an Orbax folder, or the folder of "
        "a run."
    )


def beside(given: Any, folder: Path) -> Any:
    """The same, with a relative path taken from ``folder``; no weights stay as is."""
    if isinstance(given, str | Path):
        return folder / Path(given).expanduser()
    if isinstance(given, Safetensors | Orbax | Run):
        return dataclasses.replace(given, path=folder / Path(given.path).expanduser())
    return given
