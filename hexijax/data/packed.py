"""Documents packed into windows, none of which sees another.

    inputs     int32 [B, length]    tokens, 0 at padding
    targets    int32 [B, length]    the token that follows in the same document
    segments   int32 [B, length]    1, 2, ... by document in the window, 0 at padding
    positions  int32 [B, length]    of a token in its piece of a document
    weights    float32 [B, length]  1, and 0 at padding

A model that takes ``segments`` lets a token attend to its own segment only, and one
that takes ``positions`` counts from each document's start. The loss is weighted by
``weights``, so padding adds nothing.
"""

import dataclasses
import functools

import numpy as np

from hexijax.data.packing import Packing, pack
from hexijax.data.ragged import Ragged
from hexijax.data.reading import Reading
from hexijax.data.windows import HELD_OUT_EVERY, shuffled
from hexijax.errors import UserError
from hexijax.experiment import BatchIterator


@dataclasses.dataclass(frozen=True)
class Packed(Reading):
    """Documents, several to a sample; whole ones are held out."""

    def batches(self, batch_size: int) -> BatchIterator:
        """An endless iterator of batches of exactly ``batch_size`` samples."""
        assert self.vocabulary is None or self.vocabulary  # refuses what cannot fit
        return shuffled(len(self._packing), self.take, batch_size, self.seed)

    @property
    def filled(self) -> float:
        """How much of the windows is no padding, up to 1."""
        return int(self._packing.count_P.sum()) / (len(self._packing) * self.length)

    def take(self, indices_B: np.ndarray) -> dict[str, np.ndarray]:
        """The batch of the windows with these numbers."""
        packing, shape = self._packing, (len(indices_B), self.length)
        names = ("inputs", "targets", "segments", "positions")
        batch = {name: np.zeros(shape, np.int32) for name in names}
        for row, window in enumerate(indices_B):
            at = 0
            first, last = packing.first_W[window], packing.first_W[window + 1]
            for segment, piece in enumerate(range(first, last), 1):
                count, start = packing.count_P[piece], packing.start_P[piece]
                document = packing.document_P[piece]
                tokens = self._documents.take(document, start, start + count + 1)
                self._check(tokens, document)
                place = (row, slice(at, at + count))
                batch["inputs"][place] = tokens[:-1]
                batch["targets"][place] = tokens[1:]
                batch["segments"][place] = segment
                batch["positions"][place] = np.arange(count)
                at += count
        return {**batch, "weights": (batch["segments"] > 0).astype(np.float32)}

    def _check(self, tokens: np.ndarray, document: int) -> None:
        size = self.vocab_size
        if size is not None and (tokens.max() >= size or tokens.min() < 0):
            wrong = tokens[(tokens < 0) | (tokens >= size)][0]
            raise UserError(
                f"{self._source} has token {wrong} in document {document:,}, but the "
                f"vocabulary has {size:,} tokens, numbered from 0. It was made by "
                "another tokenizer."
            )

    @functools.cached_property
    def _documents(self) -> Ragged:
        """Those of this split: whole ones are held out, so that no half is seen."""
        documents, _ = self._opened
        kept_D = np.arange(len(documents)) % HELD_OUT_EVERY == HELD_OUT_EVERY - 1
        return documents.some(kept_D if self.held_out else ~kept_D)

    @functools.cached_property
    def _packing(self) -> Packing:
        if self.length < 1:
            raise UserError(
                f"A length of {self.length} was asked of {self._source}; it must be at "
                "least 1."
            )
        packing = pack(np.asarray(self._documents.length_D), self.length)
        if not len(packing):
            kept = f" held out (one in {HELD_OUT_EVERY} is)" * self.held_out
            raise UserError(
                f"{self._source} has {len(self._documents):,} documents{kept}, none of "
                "two tokens or more, so there is nothing to predict. Give more data."
            )
        return packing
