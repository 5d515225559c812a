"""Reads TOML text with exact numbers, and writes a cluster document as TOML.

The standard library reads TOML and does not write it; this writer knows what our
documents hold: tables of tables at the top, lists of tables, and inline tables below.
"""

import json
import os
import re
import tomllib
from collections.abc import Iterator, Mapping
from decimal import Decimal
from pathlib import Path
from typing import Any

from hexijax.cluster.errors import ClusterError

Source = str | os.PathLike[str]
"""A file's path, or TOML text: a ``str`` is a path if it is one line in ``.toml``."""


def load(source: Source, *, called: str) -> tuple[dict[str, Any], str, Path]:
    """A document, its name (``called`` if it is text), and the folder it is in."""
    if isinstance(source, str) and ("\n" in source or not source.endswith(".toml")):
        return loads(source, source=called), called, Path()
    path = Path(source)
    try:
        text = path.read_bytes().decode("utf-8")
    except (OSError, ValueError) as error:
        why = getattr(error, "strerror", None) or error
        raise ClusterError(
            f"{str(path)[:200]!r} cannot be read: {why}. Give the path of a TOML "
            "file in UTF-8, from here or from the file that names it."
        ) from None
    return loads(text, source=path.name), path.name, path.parent


def loads(text: str, *, source: str) -> dict[str, Any]:
    """The document in a text; floats come as decimals."""
    try:
        return tomllib.loads(text, parse_float=Decimal)
    except (ValueError, ArithmeticError, RecursionError) as error:
        raise ClusterError(
            f"{source} is not TOML: {error or type(error).__name__}. Quote text, "
            "write key = value, and look at experiments/clusters for examples."
        ) from None


def dumps(document: Mapping[str, Any]) -> str:
    """The document as text that ``loads`` reads back."""
    return "\n".join(_table_lines(document, path="")) + "\n"


def _table_lines(table: Mapping[str, Any], path: str) -> Iterator[str]:
    """A table's own keys, then the tables in it under headers of their own."""
    below = {key: value for key, value in table.items() if _has_header(value, path)}
    for key, value in table.items():
        if key not in below:
            yield f"{_key(key)} = {_inline(value)}"
    for key, value in below.items():
        name = f"{path}.{_key(key)}" if path else _key(key)
        if isinstance(value, list):
            for item in value:
                yield from ("", f"[[{name}]]", *_table_lines(item, name))
        elif all(_has_header(item, name) for item in value.values()):
            yield from _table_lines(value, name)  # the headers below say enough
        else:
            yield from ("", f"[{name}]", *_table_lines(value, name))


def _has_header(value: object, path: str) -> bool:
    """Tables near the top and lists of tables get headers; deeper ones are inline."""
    depth = path.count(".") + 1 if path else 0
    if isinstance(value, dict):
        return depth == 0 or path == "kinds"
    is_tables = isinstance(value, list) and isinstance(next(iter(value), None), dict)
    return is_tables and (depth == 0 or path == "links")


def _inline(value: object) -> str:
    """A value on one line."""
    if isinstance(value, bool):
        return str(value).lower()
    if isinstance(value, str):
        return json.dumps(value, ensure_ascii=False)  # printable: the same escapes
    if isinstance(value, Decimal):
        return f"{value.normalize():f}"
    if isinstance(value, int | float):
        return repr(value)
    if isinstance(value, list):
        items = [_inline(item) for item in value]
        if value and isinstance(value[0], dict):  # measurements: a line each
            return "[\n" + "".join(f"  {item},\n" for item in items) + "]"
        return f"[{', '.join(items)}]"
    assert isinstance(value, dict), value
    pairs = ", ".join(f"{_key(k)} = {_inline(v)}" for k, v in value.items())
    return f"{{ {pairs} }}" if pairs else "{}"


def _key(key: str) -> str:
    """A key, quoted where it must be."""
    bare = re.fullmatch(r"[A-Za-z0-9_-]+", key)
    return key if bare else json.dumps(key, ensure_ascii=False)
