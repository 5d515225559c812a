"""Token files: a flat array of token numbers on disk, mapped and never read whole."""

import dataclasses
import functools
import hashlib
from pathlib import Path

import numpy as np

from hexijax.data.text import TextBytes
from hexijax.data.texts import Text
from hexijax.data.tokenizer import BYTES
from hexijax.data.windows import Windows
from hexijax.errors import UserError, did_you_mean
from hexijax.experiment import BatchIterator

DTYPES = ("uint8", "uint16", "int32", "uint32", "int64")
SUFFIXES = (".npy", ".bin", ".tokens")

_FINGERPRINT_TOKENS = 65536


@dataclasses.dataclass(frozen=True)
class TokenFile:
    """A ``.npy`` file of one dim, or raw little-endian integers of ``dtype``."""

    path: str
    """The file."""

    length: int = 2048
    """Tokens of a sample's inputs."""

    dtype: str = "uint16"
    """Of a raw file; a ``.npy`` file knows its own."""

    _: dataclasses.KW_ONLY

    vocab_size: int | None = None
    """Tokens the model knows; each batch is checked. None: not checked."""

    held_out: bool = False
    """The twentieth of the windows kept for evaluation, instead of the rest."""

    seed: int = 0
    """Order of the samples."""

    @property
    def vocabulary(self) -> int | None:
        """Tokens are below it; None: not known before they are read."""
        return self.vocab_size

    def batches(self, batch_size: int) -> BatchIterator:
        """An endless iterator of batches of exactly ``batch_size`` samples."""
        return self._windows.batches(batch_size, self.seed)

    def fingerprint(self) -> str:
        """Twelve hex digits of how the file is read, its size, start and end."""
        tokens = self._windows.tokens
        facts = (tokens.size, str(tokens.dtype), self.length, self.held_out, self.seed)
        digest = hashlib.sha256(repr(facts).encode())
        digest.update(tokens[:_FINGERPRINT_TOKENS].tobytes())
        digest.update(tokens[-_FINGERPRINT_TOKENS:].tobytes())
        return digest.hexdigest()[:12]

    @functools.cached_property
    def _windows(self) -> Windows:
        return Windows(
            tokens=map_tokens(self.path, self.dtype),
            length=self.length,
            source=self.path,
            vocab_size=self.vocab_size,
            held_out=self.held_out,
        )


def map_tokens(path: str, dtype: str) -> np.ndarray:
    """The file's tokens, mapped read-only.

    Raises:
      UserError: it is missing, or no flat array of integers.
    """
    file = Path(path).expanduser()
    if not file.is_file():
        raise UserError(
            f"The token file {path!r} does not exist (looked from {Path.cwd()})."
        )
    if file.suffix == ".npy":
        return _map_npy(file)
    if dtype not in DTYPES:
        raise UserError(
            f"{path}: dtype {dtype!r} was asked, a token is one of "
            f"{', '.join(DTYPES)}.{did_you_mean(dtype, DTYPES)}"
        )
    item_bytes = np.dtype(dtype).itemsize
    size = file.stat().st_size
    if size == 0 or size % item_bytes:
        raise UserError(
            f"{path} has {size:,} bytes, which is no whole number of {dtype} tokens of "
            f"{item_bytes} bytes. Name the dtype the file was written with, one of "
            f"{', '.join(DTYPES)}."
        )
    return np.memmap(file, np.dtype(dtype).newbyteorder("<"), mode="r")


def open_data(
    path: str | None,
    length: int,
    *,
    vocab_size: int = 256,
    held_out: bool = False,
    tokenizer: str = BYTES,
) -> TextBytes | Text | TokenFile:
    """Tokens where the name ends in .npy, .bin or .tokens, else text: as bytes, or made
    into tokens by ``tokenizer``."""
    if path is not None and path.endswith(SUFFIXES):
        return TokenFile(path, length, vocab_size=vocab_size, held_out=held_out)
    if tokenizer == BYTES:
        return TextBytes(path, length, vocab_size=vocab_size, held_out=held_out)
    return Text(path, length, tokenizer, vocab_size=vocab_size, held_out=held_out)


def _map_npy(file: Path) -> np.ndarray:
    try:
        tokens = np.load(file, mmap_mode="r", allow_pickle=False)
    except (ValueError, EOFError) as error:
        raise UserError(f"{file} is no .npy file: {error}") from error
    if tokens.ndim != 1 or tokens.dtype.kind not in "iu":
        raise UserError(
            f"{file} holds {tokens.dtype} of shape {tokens.shape}; tokens are integers "
            "in one dim. Write them as np.save(path, tokens.reshape(-1))."
        )
    return tokens
