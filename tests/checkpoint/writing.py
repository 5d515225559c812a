"""A process that saves until it is killed: its state is a function of the step.

    python -m tests.checkpoint.writing FOLDER FAR

Prints each step when it is committed.
"""

import sys
from pathlib import Path

import numpy as np

from hexijax.checkpoint.slices import Key, Slice, Tensor, whole_slice
from hexijax.checkpoint.tiers import Inventory
from hexijax.checkpoint.writer import (
    clear_leftovers,
    copy_part,
    remove_part,
    write_part,
)
from hexijax.weights.source import Box, index
from hexijax.weights.stored.files import Folder
from hexijax.weights.stored.manifest import Param, Stand
from hexijax.weights.stored.parts import parts_in, whole_steps

SHAPES = {
    Key("w", "master"): (300, 400),
    Key("w", "0/mu"): (300, 400),
    Key("b", "master"): (7,),
    Key("", "0/count"): (),
}
TENSORS = {key: Tensor(shape, np.dtype("float32")) for key, shape in SHAPES.items()}
PARAMS = [Param(path=("w",), tensor=TENSORS[Key("w", "master")])]


def numbers(key: Key, step: int) -> np.ndarray:
    """All of an array after some steps."""
    shape = SHAPES[key]
    count = int(np.prod(shape, dtype=int))
    first = step * 1000.0 + len(key.kind)
    return (first + np.arange(count, dtype=np.float32)).reshape(shape)


def halves(step: int) -> dict[str, dict[Slice, np.ndarray]]:
    """The state of two nodes: each has some rows of the matrices."""
    found: dict[str, dict[Slice, np.ndarray]] = {"n0": {}, "n1": {}}
    for key, shape in SHAPES.items():
        array = numbers(key, step)
        if len(shape) < 2:
            found["n1"][whole_slice(key, shape)] = array
            continue
        for node, rows in (("n0", (0, 120)), ("n1", (120, 300))):
            box: Box = (rows, (0, shape[1]))
            found[node][Slice(*key, box)] = array[index(box)]
    return found


def save(files: Folder, step: int, *nodes: str, session: str = "") -> None:
    """Both nodes' parts, or those of some, by processes that are of one session."""
    facts = {"session": session} if session else {}
    for node, held in halves(step).items():
        if not nodes or node in nodes:
            write_part(
                files,
                held,
                writer=node,
                stand=Stand(step=step, data_state={"at": step}, facts=facts),
                tensors=TENSORS,
                params=PARAMS,
            )


def check(stored: Inventory, step: int) -> None:
    """Every number of a step, by any boxes."""
    for key, shape in SHAPES.items():
        want, seen = numbers(key, step), np.zeros(shape, int)
        for source in stored.sources(step):
            for box in source.holds.get(key, ()):
                np.testing.assert_array_equal(source.read(*key, box), want[index(box)])
                seen[index(box)] += 1
        assert (seen >= 1).all(), key


def main(folder: Path, far: Path) -> None:
    """Saves, sends, and keeps two, for ever."""
    files, target = Folder(folder), Folder(far)
    clear_leftovers(files, ["n0", "n1"])
    found = whole_steps(parts_in(files, "disk"))
    step = max(found, default=0)
    while True:
        step += 1
        save(files, step)
        print(step, flush=True)
        parts = parts_in(files, "disk")
        if step % 3 == 0:
            for part in parts:
                if part.step == step:
                    copy_part(part, target)
        for part in parts:
            if part.step < step - 1:
                remove_part(part)


if __name__ == "__main__":
    main(Path(sys.argv[1]), Path(sys.argv[2]))
