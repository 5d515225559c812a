"""Text to token numbers: bytes, or a tokenizer by file or by name.

"bytes"                256 tokens, nothing to install
"folder/tokenizer.json"    a file of Hugging Face's `tokenizers`, or its folder
"gpt2"                     a name on their hub, fetched or found in their cache
"""

import dataclasses
import functools
import hashlib
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import numpy as np

from hexijax.errors import UserError

BYTES = "bytes"


@dataclasses.dataclass(frozen=True)
class Tokenizer:
    """Makes tokens of text."""

    name: str = BYTES
    """``bytes``, a file or folder, or a name."""

    @property
    def vocab_size(self) -> int:
        """Token numbers are below it."""
        if self.name == BYTES:
            return 256
        return 1 + max(self._made.get_vocab(with_added_tokens=True).values())

    @property
    def dtype(self) -> np.dtype[Any]:
        """The smallest that holds every token."""
        size = self.vocab_size
        return np.dtype(
            np.uint8 if size <= 2**8 else np.uint16 if size <= 2**16 else np.uint32
        )

    def encode(self, texts: Sequence[str]) -> list[np.ndarray]:
        """Each text's tokens, without special ones around it."""
        if self.name == BYTES:
            return [np.frombuffer(text.encode(), np.uint8) for text in texts]
        encoded = self._made.encode_batch(list(texts), add_special_tokens=False)
        return [np.asarray(x.ids, self.dtype) for x in encoded]

    def token(self, text: str) -> int:
        """The number of one token, as ``<|endoftext|>``.

        Raises:
          UserError: there is no such token.
        """
        if self.name == BYTES:
            raw = text.encode()
            found = raw[0] if len(raw) == 1 else None
        else:
            found = self._made.token_to_id(text)
        if found is None:
            raise UserError(
                f"The tokenizer {self.name!r} of {self.vocab_size:,} tokens has no "
                f"token {text!r}. Name one that it has, or leave end= out."
            )
        return int(found)

    @functools.cached_property
    def fingerprint(self) -> str:
        """Twelve hex digits of what it makes of a text."""
        if self.name == BYTES:
            return BYTES
        return hashlib.sha256(self._made.to_str().encode()).hexdigest()[:12]

    @functools.cached_property
    def _made(self) -> Any:
        try:
            import tokenizers
        except ImportError as error:
            raise UserError(
                f"The tokenizer {self.name!r} needs the package tokenizers, which is "
                "not installed: pip install 'hexijax[tokenizers]'. Bytes need nothing: "
                f"tokenizer={BYTES!r}."
            ) from error
        path = Path(self.name).expanduser()
        file = path / "tokenizer.json" if path.is_dir() else path
        on_disk = file.is_file()
        if not on_disk and (path.is_dir() or path.suffix == ".json"):
            raise UserError(
                f"There is no tokenizer file {file} (looked from {Path.cwd()})."
            )
        try:
            if on_disk:
                return tokenizers.Tokenizer.from_file(str(file))
            return tokenizers.Tokenizer.from_pretrained(self.name)
        except Exception as error:  # the package raises `Exception` itself, no kind
            what = "read" if on_disk else "found on the hub or in its cache"
            raise UserError(
                f"The tokenizer {self.name!r} cannot be {what}: {error}. Name a "
                "tokenizer.json, a folder with one, or one of the hub's."
            ) from error


def check_vocabulary(
    tokenizer: Tokenizer, vocab_size: int | None, source: str
) -> int | None:
    """Tokens that the data may hold; None: not known.

    Raises:
      UserError: the tokenizer has more than the model knows.
    """
    if vocab_size is not None and tokenizer.vocab_size > vocab_size:
        raise UserError(
            f"The tokenizer {tokenizer.name!r} of {source} has "
            f"{tokenizer.vocab_size:,} tokens, and the model knows vocab_size="
            f"{vocab_size:,}. Give the model at least as many, or name the tokenizer "
            "that it was made for."
        )
    return tokenizer.vocab_size
