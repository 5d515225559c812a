"""Tokens drawn at random: for measuring speed, where nothing is to be learnt."""

import dataclasses
from collections.abc import Iterator
from typing import Any

import numpy as np

from hexijax.experiment import Batch, BatchIterator


@dataclasses.dataclass(frozen=True)
class RandomTokens:
    """Uniform tokens; the loss stays near ``log(vocab_size)``."""

    vocab_size: int
    """Tokens are below it."""

    length: int
    """Tokens of a sample's inputs."""

    _: dataclasses.KW_ONLY

    seed: int = 0
    """Of the tokens."""

    @property
    def vocabulary(self) -> int:
        """Tokens are below it."""
        return self.vocab_size

    def batches(self, batch_size: int) -> BatchIterator:
        """An endless iterator of batches of exactly ``batch_size`` samples."""
        return _Draws(self, batch_size)

    def fingerprint(self) -> str:
        """What the tokens follow from."""
        return f"random-{self.vocab_size}-{self.length}-{self.seed}"


@dataclasses.dataclass
class _Draws:
    """Batch number n follows from (seed, n)."""

    data: RandomTokens
    batch_size: int
    next_batch: int = 0

    def __iter__(self) -> Iterator[Batch]:
        return self

    def __next__(self) -> Batch:
        rng = np.random.default_rng((self.data.seed, self.next_batch))
        self.next_batch += 1
        shape = (self.batch_size, self.data.length + 1)
        tokens_BT = rng.integers(0, self.data.vocab_size, shape, dtype=np.int32)
        return {
            "inputs": np.ascontiguousarray(tokens_BT[:, :-1]),
            "targets": np.ascontiguousarray(tokens_BT[:, 1:]),
        }

    def get_state(self) -> Any:
        return {"next_batch": self.next_batch}

    def set_state(self, state: Any) -> None:
        self.next_batch = state["next_batch"]
