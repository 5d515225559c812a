"""A sender that is no faster than a link one does not have.

    chunks -> Pace -> offered one by one, each once the link would have brought it

A laptop's loopback, or two cards of one host, then stand for hosts that are far apart.
"""

import time
from collections.abc import Callable, Sequence
from concurrent.futures import Future, ThreadPoolExecutor

import jax

_AT_ONCE_S = 1e-4
"""What is waited for no longer was ready."""


class Pace:
    """One direction of a link.

    Args:
      bytes_per_s: what it carries.
      offer: lets the other side fetch the chunk of a number.
    """

    def __init__(self, bytes_per_s: float, offer: Callable[[int, jax.Array], None]):
        self._bytes_per_s, self._offer = bytes_per_s, offer
        self._free_s = 0.0  # when it has carried all that it was given
        self._thread = ThreadPoolExecutor(1, "pace")
        self._last: Future[None] | None = None

    def send(self, numbered: Sequence[tuple[int, jax.Array]]) -> None:
        """Does not wait; an earlier message's error is raised."""
        if self._last is not None and self._last.done():
            self._last.result()
        self._last = self._thread.submit(self._send, time.monotonic(), numbered)

    def _send(self, given_s: float, numbered: Sequence[tuple[int, jax.Array]]) -> None:
        for number, chunk in numbered:
            looked_s = time.monotonic()
            chunk.block_until_ready()
            if (ready_s := time.monotonic()) > looked_s + _AT_ONCE_S:
                given_s = ready_s
            begin_s = max(self._free_s, given_s)
            self._free_s = begin_s + chunk.nbytes / self._bytes_per_s
            time.sleep(max(0.0, self._free_s - time.monotonic()))
            self._offer(number, chunk)
