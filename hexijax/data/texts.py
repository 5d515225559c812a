"""Text made into tokens by a tokenizer, and cut into windows."""

import dataclasses
import functools
import hashlib

import numpy as np

from hexijax.data.documents import holds_tokens, open_documents
from hexijax.data.ragged import Ragged
from hexijax.data.tokenizer import BYTES, Tokenizer, check_vocabulary
from hexijax.data.windows import Windows
from hexijax.experiment import BatchIterator


@dataclasses.dataclass(frozen=True)
class Text:
    """Windows over text files, one file after the other, as a tokenizer's tokens.

    Tokens are made once and kept under ``~/.cache/hexijax`` (``$XDG_CACHE_HOME``).
    """

    path: str | None = None
    """What ``TextBytes`` takes, ``.jsonl`` files, or a dataset that Hugging Face's
    ``save_to_disk`` wrote."""

    length: int = 128
    """Tokens of a sample's inputs."""

    tokenizer: str = BYTES
    """A tokenizer.json, a folder with one, a name on Hugging Face's hub, or ``bytes``.
    What is tokens already is taken as it is."""

    _: dataclasses.KW_ONLY

    column: str = "text"
    """Of a dataset, or key of a line of JSON."""

    split: str | None = None
    """Of a dataset; None: the only one, or ``train``."""

    end: str | None = None
    """A token to put after each text, as ``<|endoftext|>``; None: none."""

    vocab_size: int | None = None
    """Tokens the model knows; None: looked up in the model."""

    held_out: bool = False
    """The twentieth of the windows kept for evaluation, instead of the rest."""

    seed: int = 0
    """Order of the samples."""

    @property
    def vocabulary(self) -> int | None:
        """Tokens are below it; None: not known before they are read."""
        if holds_tokens(self.path, self.column, self.split):
            return self.vocab_size
        return check_vocabulary(self._tokenizer, self.vocab_size, self._source)

    def batches(self, batch_size: int) -> BatchIterator:
        """An endless iterator of batches of exactly ``batch_size`` samples."""
        assert self.vocabulary is None or self.vocabulary  # refuses what cannot fit
        return self._windows.batches(batch_size, self.seed)

    def fingerprint(self) -> str:
        """Twelve hex digits of the text, the tokenizer, and how it is read."""
        facts = (self._opened[1], self.length, self.held_out, self.seed, self.end)
        if not holds_tokens(self.path, self.column, self.split):
            facts = (*facts, self._tokenizer.fingerprint)
        return hashlib.sha256(repr(facts).encode()).hexdigest()[:12]

    @property
    def _source(self) -> str:
        return self.path or "Python's standard library"

    @functools.cached_property
    def _tokenizer(self) -> Tokenizer:
        return Tokenizer(self.tokenizer)

    @functools.cached_property
    def _opened(self) -> tuple[Ragged, str]:
        return open_documents(
            self.path,
            self._tokenizer,
            column=self.column,
            split=self.split,
            end=self.end,
        )

    @functools.cached_property
    def _windows(self) -> Windows:
        values = self._opened[0].values
        return Windows(
            tokens=values[0] if len(values) == 1 else np.concatenate(values),
            length=self.length,
            source=self._source,
            vocab_size=self.vocab_size,
            held_out=self.held_out,
        )
