"""`hexijax new`: a project of one's own, which runs at once.

DIR -> experiment.py, model.py, cluster.toml, tests/, pyproject.toml, README.md
"""

import argparse
import re
import shlex
from importlib import resources
from importlib.resources.abc import Traversable
from pathlib import Path

from hexijax.errors import UserError

SUFFIX, NAME = ".in", "@name@"
"""Of the files it is made from, and what stands in them for the project's name."""

_SHOWN = 5


def new(arguments: argparse.Namespace) -> int:
    """Writes the project; returns the exit code."""
    folder = arguments.folder
    written = write_project(folder)
    print("\n".join(str(path) for path in written))
    print(
        f"\nIt runs: cd {shlex.quote(str(folder))}; hexijax run experiment.py; pytest\n"
        "Then write your cards into cluster.toml and your model into model.py."
    )
    return 0


def write_project(folder: Path) -> list[Path]:
    """The files written.

    Raises:
      UserError: the folder cannot be made, or is there and not empty.
    """
    name = re.sub(r"[^a-z0-9-]+", "-", folder.absolute().name.lower()).strip("-")
    if not name:
        raise UserError(
            f"{folder} gives the project no name: letters and digits of the folder's "
            "name are it. Name a folder, as my-model."
        )
    if folder.exists():
        there = sorted(p.name for p in folder.iterdir()) if folder.is_dir() else None
        if there is None or there:
            more = ", ..." if len(there or ()) > _SHOWN else ""
            what = "is a file"
            if there:
                what = f"is not empty: it holds {', '.join(there[:_SHOWN])}{more}"
            raise UserError(
                f"The folder {folder} {what}. Nothing is written over; name one that "
                "is empty or not there."
            )
    try:
        return [
            _write(file, folder, parts, name)
            for file, parts in _templates(resources.files("hexijax.cli") / "project")
        ]
    except OSError as error:
        raise UserError(
            f"The project cannot be written to {folder}: {error.strerror}."
        ) from error


def _templates(
    folder: Traversable, above: tuple[str, ...] = ()
) -> list[tuple[Traversable, tuple[str, ...]]]:
    """Each file, with the folders it lies in."""
    found: list[tuple[Traversable, tuple[str, ...]]] = []
    for entry in sorted(folder.iterdir(), key=lambda entry: entry.name):
        if entry.is_dir():
            found += _templates(entry, (*above, entry.name))
        elif entry.name.endswith(SUFFIX):
            found.append((entry, above))
    return found


def _write(file: Traversable, folder: Path, above: tuple[str, ...], name: str) -> Path:
    own = file.name.removesuffix(SUFFIX)
    path = folder.joinpath(*above, f".{own}" if own == "gitignore" else own)
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(file.read_text(encoding="utf-8").replace(NAME, name), "utf-8")
    return path
