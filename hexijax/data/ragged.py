"""Documents of unlike lengths, as pieces of flat arrays in memory or mapped from files.

texts -> encode_all -> tokens.bin, stops.npy in a cache -> Ragged

Text is made into tokens once: the next run maps what the first one wrote.
"""

import contextlib
import dataclasses
import hashlib
import logging
import os
import shutil
import tempfile
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

import numpy as np

from hexijax.data.tokenizer import Tokenizer
from hexijax.errors import UserError

AT_ONCE = 1000
"""Documents made into tokens in one call: a tokenizer uses all cores for them."""

_log = logging.getLogger("hexijax")


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Ragged:
    """Documents of tokens; D of them."""

    values: tuple[np.ndarray, ...]
    """Flat integers: the chunks that documents lie in."""

    chunk_D: np.ndarray
    """Which chunk a document lies in."""

    start_D: np.ndarray
    """Where in it."""

    length_D: np.ndarray
    """Tokens of it."""

    def __len__(self) -> int:
        return len(self.length_D)

    def take(self, document: int, start: int, stop: int) -> np.ndarray:
        """Some of a document's tokens."""
        first = self.start_D[document]
        return self.values[self.chunk_D[document]][first + start : first + stop]

    def some(self, keep_D: np.ndarray) -> "Ragged":
        """The documents at these places, or where this is true."""
        return dataclasses.replace(
            self,
            chunk_D=self.chunk_D[keep_D],
            start_D=self.start_D[keep_D],
            length_D=self.length_D[keep_D],
        )


def in_one(flat: np.ndarray, stop_D: np.ndarray) -> Ragged:
    """Documents one after the other, each ending at its stop."""
    start_D = np.concatenate([[0], stop_D[:-1]]).astype(np.int64)[: len(stop_D)]
    return Ragged(
        values=(flat,),
        chunk_D=np.zeros(len(stop_D), np.int32),
        start_D=start_D,
        length_D=stop_D - start_D,
    )


def encode_all(
    texts: Iterable[str], tokenizer: Tokenizer, *, end: int | None, facts: str
) -> Ragged:
    """Every text's tokens, followed by ``end``; from the cache if they are there.

    Args:
        texts: read only if they are not.
        tokenizer: makes the tokens.
        end: a token after each text; None: none.
        facts: change when the texts do.
    """
    key = repr((facts, tokenizer.fingerprint, end, 1))
    folder = cache_folder() / hashlib.sha256(key.encode()).hexdigest()[:24]
    if not folder.is_dir():
        _log.info("making tokens of text, once; they are kept in %s", folder)
        _write(texts, tokenizer, end, folder)
    stop_D = np.load(folder / "stops.npy", mmap_mode="r")
    size = int(stop_D[-1]) if len(stop_D) else 0
    flat = np.zeros(0, tokenizer.dtype)
    if size:  # an empty file cannot be mapped
        flat = np.memmap(folder / "tokens.bin", tokenizer.dtype, "r", shape=(size,))
    return in_one(flat, np.asarray(stop_D))


def cache_folder() -> Path:
    """Where tokens are kept between runs."""
    base = os.environ.get("XDG_CACHE_HOME") or "~/.cache"
    return Path(base).expanduser() / "hexijax" / "tokens"


def _write(
    texts: Iterable[str], tokenizer: Tokenizer, end: int | None, folder: Path
) -> None:
    """Writes whole or not at all; another run may do the same meanwhile."""
    try:
        folder.parent.mkdir(parents=True, exist_ok=True)
        unfinished = Path(tempfile.mkdtemp(dir=folder.parent, prefix=".unfinished-"))
    except OSError as error:
        raise UserError(
            f"Tokens are kept in {folder.parent}, which cannot be written: "
            f"{error.strerror}. Set XDG_CACHE_HOME to a folder that can."
        ) from error
    try:
        stops, at = list[int](), 0
        tail = np.asarray([] if end is None else [end], tokenizer.dtype)
        with (unfinished / "tokens.bin").open("wb") as file:
            for some in _batched(texts, AT_ONCE):
                for tokens in tokenizer.encode(some):
                    whole = np.concatenate([tokens, tail]) if tail.size else tokens
                    file.write(whole.tobytes())
                    at += len(whole)
                    stops.append(at)
        np.save(unfinished / "stops.npy", np.asarray(stops, np.int64))
        with contextlib.suppress(OSError):  # the other was first
            unfinished.rename(folder)
    finally:
        shutil.rmtree(unfinished, ignore_errors=True)


def _batched(texts: Iterable[str], size: int) -> Iterator[Sequence[str]]:
    some: list[str] = []
    for text in texts:
        some.append(text)
        if len(some) == size:
            yield some
            some = []
    if some:
        yield some
