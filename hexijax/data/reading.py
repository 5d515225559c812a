"""What is read, and how it becomes tokens, for every data made of documents."""

import dataclasses
import functools
import hashlib

from hexijax.data.documents import holds_tokens, open_documents
from hexijax.data.ragged import Ragged
from hexijax.data.tokenizer import BYTES, Tokenizer, check_vocabulary


@dataclasses.dataclass(frozen=True)
class Reading:
    """Documents as tokens; its kinds say what a sample is."""

    path: str | None = None
    """A dataset that Hugging Face's ``save_to_disk`` wrote; or text files as
    ``TextBytes`` takes them, a document each; in a ``.jsonl`` each line is one."""

    length: int = 128
    """Tokens of a sample's inputs."""

    tokenizer: str = BYTES
    """A tokenizer.json, a folder with one, a name on Hugging Face's hub, or ``bytes``.
    What is tokens already is taken as it is."""

    _: dataclasses.KW_ONLY

    column: str = "text"
    """Of the dataset, or key of a line of JSON: text, or lists of token numbers."""

    split: str | None = None
    """Of the dataset; None: the only one, or ``train``."""

    end: str | None = None
    """A token to put after each text, as ``<|endoftext|>``; None: none."""

    vocab_size: int | None = None
    """Tokens the model knows; None: looked up in the model."""

    held_out: bool = False
    """The twentieth kept for evaluation, instead of the rest."""

    seed: int = 0
    """Order of the samples."""

    @property
    def vocabulary(self) -> int | None:
        """Tokens are below it; None: not known before they are read.

        Raises:
          UserError: the tokenizer has more than the model knows.
        """
        if holds_tokens(self.path, self.column, self.split):
            return self.vocab_size
        return check_vocabulary(self._tokenizer, self.vocab_size, self._source)

    def fingerprint(self) -> str:
        """Twelve hex digits of the documents and of how they are read."""
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
