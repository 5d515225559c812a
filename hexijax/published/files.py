"""Finds and opens the files of one source."""

import json
from pathlib import Path
from typing import Any

from hexijax.errors import UserError


class PublishedDataError(UserError):
    """A folder of public measurements that lacks what was asked of it."""


def read(folder: Path | str, source: str, name: str) -> dict[str, Any]:
    """The JSON object ``<folder>/<source>/<name>.json``.

    ``folder`` may be the source's own folder too.
    """
    tried = [Path(folder) / source / f"{name}.json", Path(folder) / f"{name}.json"]
    for file in tried:
        if file.is_file():
            return _object(file)
    raise PublishedDataError(
        f"{tried[0]} was asked for, and there is no such file (nor {tried[1]}). Give "
        f"the folder that holds {source}/, or that folder itself."
    )


def _object(file: Path) -> dict[str, Any]:
    try:
        data = json.loads(file.read_text(encoding="utf-8"))
    except ValueError as error:
        raise PublishedDataError(f"{file} is no JSON: {error}.") from None
    if not isinstance(data, dict):
        raise PublishedDataError(
            f"{file} holds a {type(data).__name__}; it must be one JSON object."
        )
    return data


def records(data: dict[str, Any], key: str, **wanted: object) -> list[dict[str, Any]]:
    """Records of a list whose fields equal those wanted."""
    return [
        record
        for record in data[key]
        if all(record.get(name) == value for name, value in wanted.items())
    ]
