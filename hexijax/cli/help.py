"""An experiment's own help: its note, and its fields with a sentence each."""

import shutil
import textwrap
from collections.abc import Iterable

from hexijax.cli.fields import Field, read_source
from hexijax.cli.loading import find_experiment


def experiment_help(name: str) -> str:
    """The note and the fields of an experiment, without running it."""
    source = read_source(find_experiment(name))
    own = {field.name for field in source.parameters}
    shared = [field for field in source.fields.values() if field.name not in own]
    return "\n\n".join(
        [
            f"{source.path.name}: {source.note}",
            _table("its own fields (--set FIELD=VALUE):", source.parameters),
            _table("fields of every experiment:", shared),
        ]
    )


def _table(title: str, fields: Iterable[Field]) -> str:
    width = min(shutil.get_terminal_size().columns, 88)
    lines = [title]
    for field in fields:
        lines.append(f"  {field.name} = {field.default}  ({field.type or 'any'})")
        if field.doc:
            indent = " " * 6
            lines += textwrap.wrap(
                field.doc.replace("``", ""),
                width,
                initial_indent=indent,
                subsequent_indent=indent,
            )
    return "\n".join(lines)
