"""Sums of products of sizes: ``{"TDF": 4, "TD": 21}`` is 4·T·D·F + 21·T·D.

T positions, D width, F feed-forward width, K features of all key heads, N query heads,
H features of a head, V vocabulary or classes, X learned positions, P features of a
patch, Y kinds of token, 1 one.
"""

import dataclasses
import math
from collections.abc import Mapping

Sizes = Mapping[str, int]
"""What each letter is."""

Terms = Mapping[str, int | float]
"""A factor for each product of letters."""

Bytes = Mapping[str, tuple[int, int]]
"""For each product of letters: a factor of the compute dtype's bytes, and the bytes
that are there in any dtype (float32 inside norms and softmax, casts to it)."""

Products = tuple[tuple[str, str, str, float], ...]
"""Rows, what is summed over, columns, and how many."""


def product(letters: str, sizes: Sizes) -> int:
    """The product that some letters stand for."""
    return math.prod(sizes[letter] for letter in letters)


def total(terms: Terms, sizes: Sizes) -> float:
    """The sum."""
    return float(sum(c * product(letters, sizes) for letters, c in terms.items()))


def total_bytes(terms: Bytes, sizes: Sizes, item_bytes: int) -> int:
    """The sum in a compute dtype of so many bytes."""
    return round(
        sum(
            (each * item_bytes + always) * product(letters, sizes)
            for letters, (each, always) in terms.items()
        )
    )


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Costs:
    """A layer's figures for one sample. Its input is kept under every policy."""

    forward: Terms
    """Operations."""

    backward: Terms
    """Operations, twice those of the products and what norms and softmax ask for."""

    products: Products
    """Of the forward with a weight; attention's follow from its sizes."""

    moved: Bytes
    """What the forward's kernels between products read and write, weights left out."""

    back: Bytes
    """The same of the backward."""

    kept: Bytes
    """Kept for the backward without remat."""

    dots: Bytes
    """Kept of the outputs of products and attention."""

    full: Bytes
    """Kept of the input alone."""

    joined: Bytes
    """Kept without remat where forward and backward are one program."""

    reads_input: bool = False
    """Its backward reads its input without remat too: no norm stands before it."""
