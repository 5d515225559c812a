"""Documents from what lies on disk: text files, lines of JSON, a saved dataset.

path -> open_documents -> Ragged, a name for messages, facts for fingerprints
"""

import hashlib
import json
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from hexijax.data import arrow
from hexijax.data.ragged import Ragged, encode_all
from hexijax.data.text import find_text_files
from hexijax.data.tokenizer import Tokenizer
from hexijax.errors import UserError, did_you_mean

JSON_LINES = ".jsonl"


def open_documents(
    path: str | None,
    tokenizer: Tokenizer,
    *,
    column: str,
    split: str | None,
    end: str | None,
) -> tuple[Ragged, str]:
    """The documents of ``path``, and what changes when they do.

    Args:
        path: see ``Packed``.
        tokenizer: makes tokens of text.
        column: of a dataset, or a key of each line of JSON.
        split: of a dataset.
        end: a token to put after each text; None: none.
    """
    number = None if end is None else tokenizer.token(end)
    folder = Path(path).expanduser() if path else None
    if folder and arrow.is_saved(folder):
        saved = arrow.Saved(folder, column, split)
        if saved.holds_tokens:
            return saved.ragged(), saved.facts
        texts, facts = saved.texts(), saved.facts
    else:
        files = find_text_files(path)
        facts = _digest(files, column)
        texts = (text for file in files for text in _texts(file, column))
    return encode_all(texts, tokenizer, end=number, facts=facts), facts


def holds_tokens(path: str | None, column: str, split: str | None) -> bool:
    """Whether what lies there is tokens already, so that no tokenizer is used."""
    folder = Path(path).expanduser() if path else None
    saved = folder and arrow.is_saved(folder)
    return bool(folder and saved and arrow.Saved(folder, column, split).holds_tokens)


def read_text(file: Path) -> str:
    """A file's text.

    Raises:
      UserError: it is not UTF-8.
    """
    try:
        return file.read_text(encoding="utf-8")
    except UnicodeDecodeError as error:
        raise UserError(
            f"{file} is no UTF-8 text (byte {error.start}): {error.reason}. Convert "
            "it, or read it as it is with TextBytes."
        ) from error


def _texts(file: Path, column: str) -> Iterator[str]:
    if file.suffix != JSON_LINES:
        yield read_text(file)
        return
    with file.open(encoding="utf-8") as lines:
        for number, line in enumerate(lines, 1):
            if not line.strip():
                continue
            found: Any = None
            try:
                found = json.loads(line)
                text = found[column]
            except (ValueError, KeyError, TypeError) as error:
                known = list(found) if isinstance(found, dict) else []
                raise UserError(
                    f"{file}, line {number}: no text under {column!r}"
                    f" ({type(error).__name__}: {error}).{did_you_mean(column, known)} "
                    "Every line is a JSON object; column= names the key."
                ) from error
            yield str(text)


def _digest(files: list[Path], column: str) -> str:
    digest = hashlib.sha256(column.encode())
    for file in files:
        with file.open("rb") as opened:
            digest.update(hashlib.file_digest(opened, "sha256").digest())
    return digest.hexdigest()
