"""Datasets that Hugging Face's `datasets` saved on disk, through pyarrow.

folder/dataset_dict.json         splits, a folder each
folder/state.json                names of the Arrow files
folder/data-00000-of-00002.arrow mapped, never read whole

folder, column -> texts, or Ragged where the column holds lists of tokens
"""

import dataclasses
import functools
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import numpy as np

from hexijax.data.ragged import Ragged
from hexijax.errors import UserError, did_you_mean

SPLITS, STATE = "dataset_dict.json", "state.json"


def is_saved(path: Path) -> bool:
    """Whether a folder is a dataset saved on disk."""
    return (path / SPLITS).is_file() or (path / STATE).is_file()


@dataclasses.dataclass(frozen=True)
class Saved:
    """One column of one split."""

    path: Path
    """The folder that ``save_to_disk`` wrote."""

    column: str
    """Of text, or of lists of token numbers."""

    split: str | None = None
    """Where there are several; None: the only one, or ``train``."""

    @functools.cached_property
    def folder(self) -> Path:
        """That of the split.

        Raises:
          UserError: there is no such split.
        """
        if not (self.path / SPLITS).is_file():
            return self.path
        splits = [str(name) for name in _json(self.path / SPLITS)["splits"]]
        name = self.split or (splits[0] if len(splits) == 1 else "train")
        if name not in splits:
            raise UserError(
                f"The dataset {self.path} has the splits {', '.join(splits)}, and "
                f"{name!r} was asked.{did_you_mean(name, splits)} Name one: split=."
            )
        return self.path / name

    @property
    def facts(self) -> str:
        """Changes when the data does: its own fingerprint, its files and sizes."""
        state = _json(self.folder / STATE)
        files = [(x.name, x.stat().st_size) for x in self._files]
        return repr((state.get("_fingerprint"), files, self.column))

    @property
    def holds_tokens(self) -> bool:
        """Whether it holds lists of whole numbers, and not text.

        Raises:
          UserError: it holds neither.
        """
        kind = self._chunks.type  # says so where pyarrow is missing
        import pyarrow as pa

        is_list = pa.types.is_list(kind) or pa.types.is_large_list(kind)
        if is_list and pa.types.is_integer(kind.value_type):
            return True
        if pa.types.is_string(kind) or pa.types.is_large_string(kind):
            return False
        raise UserError(
            f"Column {self.column!r} of {self.folder} holds {kind}; documents are text "
            "or lists of whole numbers. Name another: column=."
        )

    def texts(self) -> Iterator[str]:
        """Each document."""
        for chunk in self._chunks.chunks:
            for text in chunk:
                yield text.as_py() or ""

    def ragged(self) -> Ragged:
        """The documents of tokens, where they lie in the files."""
        values, chunks = list[np.ndarray](), list[np.ndarray]()
        starts, lengths = list[np.ndarray](), list[np.ndarray]()
        for i, chunk in enumerate(self._chunks.chunks):
            if chunk.null_count:
                raise UserError(
                    f"Column {self.column!r} of {self.folder} lacks the tokens of "
                    f"{chunk.null_count} documents (null). Leave them out."
                )
            # `values` and `offsets` know nothing of each other's cut.
            stops = np.asarray(chunk.offsets, np.int64)
            values.append(chunk.values.to_numpy(zero_copy_only=False))
            starts.append(stops[:-1])
            lengths.append(np.diff(stops))
            chunks.append(np.full(len(chunk), i, np.int32))
        return Ragged(
            values=tuple(values),
            chunk_D=np.concatenate([*chunks, np.zeros(0, np.int32)]),
            start_D=np.concatenate([*starts, np.zeros(0, np.int64)]),
            length_D=np.concatenate([*lengths, np.zeros(0, np.int64)]),
        )

    @functools.cached_property
    def _files(self) -> list[Path]:
        listed = _json(self.folder / STATE)["_data_files"]
        return [self.folder / entry["filename"] for entry in listed]

    @functools.cached_property
    def _chunks(self) -> Any:
        try:
            import pyarrow as pa
        except ImportError as error:
            raise UserError(
                f"The dataset {self.path} is read with the package pyarrow, which is "
                "not installed: pip install 'hexijax[datasets]'."
            ) from error
        tables = []
        for file in self._files:
            try:
                tables.append(pa.ipc.open_stream(pa.memory_map(str(file))).read_all())
            except (OSError, pa.ArrowInvalid) as error:
                raise UserError(
                    f"{file} of the dataset cannot be read: {error}. Save it anew."
                ) from error
        table = pa.concat_tables(tables)
        if self.column not in table.column_names:
            raise UserError(
                f"The dataset {self.folder} has the columns "
                f"{', '.join(table.column_names)}, and {self.column!r} was asked."
                f"{did_you_mean(self.column, table.column_names)} Name one: column=."
            )
        return table.column(self.column)


def _json(file: Path) -> Any:
    try:
        return json.loads(file.read_text(encoding="utf-8"))
    except (OSError, ValueError) as error:
        raise UserError(
            f"{file} cannot be read ({error}): the folder is no dataset that was saved "
            "with save_to_disk."
        ) from error
