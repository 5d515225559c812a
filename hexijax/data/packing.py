"""Documents packed into windows: which piece of which document lies in which window.

    tokens of each document, length -> pack -> Packing

A document of n tokens has n - 1 pairs of a token and the next one, and a window room
for ``length`` of them. Longer documents are cut, so that no pair is lost; the pieces
then go, the longest first, into the fullest window with room for them (best fit). On
text, windows are some 99% full.
"""

import dataclasses

import numpy as np


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Packing:
    """Pieces by window; P pieces, W windows."""

    document_P: np.ndarray
    """Whose piece it is."""

    start_P: np.ndarray
    """Its first token in the document."""

    count_P: np.ndarray
    """Its pairs: it reads one token more."""

    first_W: np.ndarray
    """A window's first piece, and one past the last piece: ``W + 1`` numbers."""

    def __len__(self) -> int:
        return len(self.first_W) - 1


def pack(length_D: np.ndarray, length: int) -> Packing:
    """Packs documents of these many tokens into windows of ``length`` pairs.

    The same input gives the same windows.
    """
    document_P, start_P, count_P = _pieces(length_D, length)
    window_P = np.zeros(len(count_P), np.int64)
    with_room: list[list[int]] = [[] for _ in range(length + 1)]
    rooms = 0  # bit r: there is a window with room for r
    windows = 0
    for piece in np.argsort(-count_P, kind="stable"):
        count = int(count_P[piece])
        fitting = rooms >> count
        if fitting:
            room = count + (fitting & -fitting).bit_length() - 1
            window = with_room[room].pop()
            if not with_room[room]:
                rooms &= ~(1 << room)
        else:
            room, window, windows = length, windows, windows + 1
        window_P[piece] = window
        left = room - count
        if left:
            with_room[left].append(window)
            rooms |= 1 << left
    order = np.argsort(window_P, kind="stable")
    first_W = np.searchsorted(window_P[order], np.arange(windows + 1))
    return Packing(
        document_P=document_P[order],
        start_P=start_P[order],
        count_P=count_P[order],
        first_W=first_W,
    )


def _pieces(
    length_D: np.ndarray, length: int
) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """Each document's pieces, in order: its number, where they start, their pairs."""
    pairs_D = np.maximum(length_D - 1, 0)
    pieces_D = -(-pairs_D // length)
    document_P = np.repeat(np.arange(len(length_D)), pieces_D)
    before_D = np.cumsum(pieces_D) - pieces_D
    start_P = (np.arange(len(document_P)) - before_D[document_P]) * length
    count_P = np.minimum(length, pairs_D[document_P] - start_P)
    return document_P, start_P, count_P
