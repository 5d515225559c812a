"""Shuffled, endless batches of windows over one flat array of tokens.

    window i = tokens[i * length : i * length + length + 1], every 20th one held out

Only indices pass through grain (their shuffle costs some 0.1 ms a sample); a batch's
tokens are then taken in one indexing. Read without threads: JAX computes meanwhile.
"""

import dataclasses
import sys
from collections.abc import Callable

import numpy as np

from hexijax.errors import UserError
from hexijax.experiment import BatchIterator

HELD_OUT_EVERY = 20
"""One window in this many is kept from training."""


def shuffled(
    count: int,
    take: Callable[[np.ndarray], dict[str, np.ndarray]],
    batch_size: int,
    seed: int,
) -> BatchIterator:
    """Endless batches of what has these many places, each pass in another order.

    Args:
        count: places.
        take: makes a batch of some of them.
        batch_size: samples of a batch.
        seed: of the order.
    """
    import grain  # here, because it imports jax

    # Not endless: grain's length of that overflows with small batches.
    passes = sys.maxsize // count // 2
    dataset = (
        grain.MapDataset.range(count)
        .shuffle(seed=seed)
        .repeat(passes)
        .batch(batch_size)
        .map(take)
    )
    options = grain.ReadOptions(num_threads=0, prefetch_buffer_size=0)
    return iter(dataset.to_iter_dataset(options))


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Windows:
    """The windows of one split, by index."""

    tokens: np.ndarray
    """One-dimensional integers, in memory or mapped from a file."""

    length: int
    """Tokens of a window's inputs; it reads one more for the targets."""

    source: str
    """What the tokens came from, for messages."""

    vocab_size: int | None = None
    """Tokens are below it; None: not checked."""

    held_out: bool = False
    """The windows kept from training instead of those trained on."""

    def __post_init__(self) -> None:
        if self.length < 1:
            raise UserError(
                f"A window length of {self.length} was asked of {self.source}; it must "
                "be at least 1."
            )
        if len(self) < 1:
            needed, why = self.length + 1, ""
            if self.held_out:
                needed = HELD_OUT_EVERY * self.length + 1
                why = f" (one in {HELD_OUT_EVERY} is held out)"
            raise UserError(
                f"{self.source} has {self.tokens.size:,} tokens, too few: {needed:,} "
                f"are needed for one window of length {self.length:,}{why}. Give more "
                "data or a smaller length."
            )

    def __len__(self) -> int:
        windows = max(0, self.tokens.size - 1) // self.length
        held_out = windows // HELD_OUT_EVERY
        return held_out if self.held_out else windows - held_out

    def take(self, indices_B: np.ndarray) -> dict[str, np.ndarray]:
        """The batch of the windows with these indices in the split."""
        if self.held_out:
            windows_B = indices_B * HELD_OUT_EVERY + HELD_OUT_EVERY - 1
        else:
            windows_B = indices_B + indices_B // (HELD_OUT_EVERY - 1)
        offsets_BT = windows_B[:, None] * self.length + np.arange(self.length + 1)
        tokens_BT = np.asarray(self.tokens[offsets_BT], np.int32)
        self._check_vocabulary(tokens_BT, offsets_BT)
        return {
            "inputs": np.ascontiguousarray(tokens_BT[:, :-1]),
            "targets": np.ascontiguousarray(tokens_BT[:, 1:]),
        }

    def batches(self, batch_size: int, seed: int) -> BatchIterator:
        """Endless batches of exactly ``batch_size``, each pass in another order.

        The position (``get_state``) is one number, good for this ``batch_size`` only.
        """
        return shuffled(len(self), self.take, batch_size, seed)

    def _check_vocabulary(self, tokens_BT: np.ndarray, offsets_BT: np.ndarray) -> None:
        # JAX clamps silently. Batch by batch, as a whole file may be terabytes.
        if self.vocab_size is None:
            return
        wrong_BT = (tokens_BT < 0) | (tokens_BT >= self.vocab_size)
        if wrong_BT.any():
            raise UserError(
                f"{self.source} has token {tokens_BT[wrong_BT][0]} at position "
                f"{offsets_BT[wrong_BT][0]:,}, but the vocabulary has "
                f"{self.vocab_size:,} tokens, numbered from 0. The file was made by "
                "another tokenizer, or is read with a wrong dtype."
            )
