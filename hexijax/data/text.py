"""Text as bytes: 256 tokens, no tokenizer, nothing to download."""

import dataclasses
import functools
import glob
import hashlib
import sysconfig
from pathlib import Path

import numpy as np

from hexijax.data.windows import Windows
from hexijax.errors import UserError
from hexijax.experiment import BatchIterator

MAX_BYTES = 2**30
"""Text is held in memory; beyond this a token file serves better."""

_BINARY_SNIFF_BYTES = 1024


@dataclasses.dataclass(frozen=True)
class TextBytes:
    """Bytes of text files, in sorted order.

    Without a path: the standard library of the Python that runs, some 5 MB of text that
    every installation has.
    """

    path: str | None = None
    """A file, a folder (all text files below it) or a glob pattern."""

    length: int = 128
    """Tokens of a sample's inputs."""

    _: dataclasses.KW_ONLY

    vocab_size: int = 256
    """Tokens the model knows; a byte is one of 256."""

    held_out: bool = False
    """The twentieth of the text kept for evaluation, instead of the rest."""

    seed: int = 0
    """Order of the samples."""

    @property
    def vocabulary(self) -> int:
        """Tokens are below it."""
        return self.vocab_size

    def batches(self, batch_size: int) -> BatchIterator:
        """An endless iterator of batches of exactly ``batch_size`` samples."""
        return self._windows.batches(batch_size, self.seed)

    def fingerprint(self) -> str:
        """Twelve hex digits of the text and of how it is read."""
        facts = f"{self.length} {self.held_out} {self.seed}".encode()
        return hashlib.sha256(facts + self._text).hexdigest()[:12]

    @functools.cached_property
    def _text(self) -> bytes:
        files = find_text_files(self.path)
        size = sum(file.stat().st_size for file in files)
        if size > MAX_BYTES:
            raise UserError(
                f"{self.path} holds {size:,} bytes of text; at most {MAX_BYTES:,} are "
                "read into memory. Write the tokens to a .npy file, which is mapped, "
                "or name fewer files."
            )
        return b"\n".join(file.read_bytes() for file in files)

    @functools.cached_property
    def _windows(self) -> Windows:
        return Windows(
            tokens=np.frombuffer(self._text, np.uint8),
            length=self.length,
            source=self.path or "Python's standard library",
            vocab_size=self.vocab_size,
            held_out=self.held_out,
        )


def find_text_files(path: str | None) -> list[Path]:
    """The files ``path`` stands for, sorted, so that every machine reads one order.

    Raises:
      UserError: there are none.
    """
    if path is None:
        library = Path(sysconfig.get_paths()["stdlib"])
        files = sorted(library.glob("*.py"))
        if not files:
            raise UserError(
                f"This Python has no sources of its standard library in {library}, the "
                "default text. Give text files of your own: --set data=PATH."
            )
        return files
    given = Path(path).expanduser()
    if given.is_file():
        return [given]
    if given.is_dir():
        inside = (p for p in given.rglob("*") if not _hidden(p.relative_to(given)))
        files = sorted(p for p in inside if p.is_file() and _is_text(p))
    else:
        files = sorted(Path(p) for p in glob.glob(str(given), recursive=True))
        files = [file for file in files if file.is_file()]
    if not files:
        what = "no text files in it" if given.is_dir() else "no such file"
        raise UserError(
            f"Text was asked from {path!r}, but there is {what} (looked from "
            f"{Path.cwd()}). Give a file, a folder or a quoted glob pattern."
        )
    return files


def _hidden(path: Path) -> bool:
    return any(part.startswith(".") for part in path.parts)


def _is_text(path: Path) -> bool:
    with path.open("rb") as file:
        return b"\0" not in file.read(_BINARY_SNIFF_BYTES)
