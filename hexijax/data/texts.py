"""Text made into tokens by a tokenizer, and cut into windows."""

import dataclasses
import functools

import numpy as np

from hexijax.data.reading import Reading
from hexijax.data.windows import Windows
from hexijax.experiment import BatchIterator


@dataclasses.dataclass(frozen=True)
class Text(Reading):
    """Windows over documents, one after the other, as a tokenizer's tokens.

    Tokens are made once and kept under ``~/.cache/hexijax`` (``$XDG_CACHE_HOME``).
    """

    def batches(self, batch_size: int) -> BatchIterator:
        """An endless iterator of batches of exactly ``batch_size`` samples."""
        assert self.vocabulary is None or self.vocabulary  # refuses what cannot fit
        return self._windows.batches(batch_size, self.seed)

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
