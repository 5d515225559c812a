"""The parameters in a run's saved steps, whatever plan wrote them.

    run folder/checkpoints/<step>/<writer>/   a part; see ``weights.stored``
    run folder/tiers.json                     where else the run has saved

Reading needs neither plan nor engine.
"""

import dataclasses
import functools
import json
from collections.abc import Mapping, Sequence
from pathlib import Path

import numpy as np

from hexijax.weights.errors import Damaged, WeightsError
from hexijax.weights.slices import MASTER, Key
from hexijax.weights.source import (
    Box,
    Source,
    Tensor,
    box_shape,
    index,
    inside,
    overlap,
    rows_of,
)
from hexijax.weights.stored import manifest
from hexijax.weights.stored.files import Folder, open_files
from hexijax.weights.stored.manifest import Param
from hexijax.weights.stored.parts import Part, parts_in, whole_steps
from hexijax.weights.tree import Path as TreePath

CHECKPOINTS = "checkpoints"
TIERS = "tiers.json"


@dataclasses.dataclass(frozen=True)
class Run(Source):
    """The parameters of a run of ``hexijax run``.

    ``path``: the run's folder, or one step's in its ``checkpoints``. ``step``: None:
    the newest that is whole.
    """

    path: str | Path
    step: int | None = None

    @functools.cached_property
    def parts(self) -> Sequence[Part]:
        """What tiles the step."""
        return find_step(Path(self.path).expanduser(), self.step)

    @property
    def found_step(self) -> int:
        """Optimizer steps done."""
        return self.parts[0].step

    @functools.cached_property
    def stored(self) -> Mapping[str, Param]:
        """The parameters by name."""
        return {param.name: param for param in self.parts[0].manifest.params}

    @property
    def where(self) -> str:
        """The step's folder."""
        return f"{self.parts[0].files.where}/{self.found_step}"

    @functools.cached_property
    def tensors(self) -> Mapping[str, Tensor]:
        """What there is, by path."""
        return {name: param.tensor for name, param in self.stored.items()}

    @property
    def paths(self) -> Mapping[str, TreePath]:
        """Where each parameter is in the tree."""
        return {name: param.path for name, param in self.stored.items()}

    def read(self, name: str, box: Box) -> np.ndarray:
        """A box, put together from those that the plan's devices held.

        Where a step lies in several places, a damaged one is passed over.
        """
        out = np.empty(box_shape(box), self.stored[name].tensor.dtype)
        for part in self.parts:
            for held in part.holds.get(Key(name, MASTER), ()):
                both = overlap(held, box)
                if both is not None:
                    out[index(inside(both, box))] = self._piece(part, name, both)
        return out

    def _piece(self, part: Part, name: str, box: Box) -> np.ndarray:
        try:
            return part.read(name, MASTER, box)
        except Damaged:
            for other in self.parts:
                holds = other.holds.get(Key(name, MASTER), ())
                if other is not part and any(overlap(h, box) == box for h in holds):
                    return other.read(name, MASTER, box)
            raise

    def windows(self, name: str) -> list[Box]:
        """Runs of rows, in few enough that chunks are not decoded over and over."""
        return rows_of(self.tensors[name])


def is_run(path: Path) -> bool:
    """Whether a path is a run's folder or a step's."""
    known = (path / CHECKPOINTS).is_dir() or (path / TIERS).is_file()
    return known or _is_step(path)


def _is_step(path: Path) -> bool:
    return path.name.isdigit() and any(path.glob(f"*/{manifest.NAME}"))


def find_step(path: Path, step: int | None) -> Sequence[Part]:
    """The parts of a step of a run.

    Raises:
      WeightsError: there is none.
    """
    if step is None and _is_step(path):
        path, step = path.parent, int(path.name)
    told: list[str] = []
    folder = path / CHECKPOINTS if (path / CHECKPOINTS).is_dir() else path
    parts = parts_in(Folder(folder.resolve()), "disk", tell=told.append)
    for label, where in saved_elsewhere(path):
        try:
            parts += parts_in(open_files(where), label, tell=told.append)
        except OSError as error:
            told.append(str(error))
    steps = whole_steps(parts)
    if steps and (step is None or step in steps):
        return steps[max(steps) if step is None else step]
    if not path.is_dir():
        raise WeightsError(f"There is no run {path} (looked from {Path.cwd()}).")
    if not steps:
        why = f" ({told[0]})" if told else ""
        raise WeightsError(
            f"The run {path} has no checkpoint, so its parameters are gone{why}. A run "
            "saves them at its end, unless it was told --no-save, and every N steps "
            "with --save-every N."
        )
    raise WeightsError(
        f"The run {path} has no step {step}; saved are "
        f"{', '.join(map(str, sorted(steps)))}. Name one with --step."
    )


def saved_elsewhere(run: Path) -> list[tuple[str, str]]:
    """(label, path or URL) of each place outside its folder that a run saved in."""
    file = run / TIERS
    if not file.is_file():
        return []
    try:
        found = json.loads(file.read_text())["tiers"]
        return [(str(tier["label"]), str(tier["where"])) for tier in found]
    except (OSError, ValueError, KeyError, TypeError) as error:
        raise WeightsError(
            f"{file} is not what a run writes there ({error!r}). Mend it, or remove "
            "it: then only what lies in the run's folder is found."
        ) from error
