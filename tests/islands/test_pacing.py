"""A slow link that is not there."""

import time

import jax
import jax.numpy as jnp
import pytest

from hexijax.islands.pacing import Pace

pytestmark = pytest.mark.usefixtures("backend")


def test_nothing_is_there_before_the_link_would_have_brought_it():
    rate, chunk = 4e6, jnp.zeros(50_000, jnp.float32)
    seen: list[tuple[int, float]] = []
    pace = Pace(rate, lambda number, x: seen.append((number, time.monotonic())))
    began = time.monotonic()
    for message in range(2):  # the second waits for the first's last chunk
        pace.send([(3 * message + i, chunk) for i in range(3)])
    assert time.monotonic() - began < 0.1  # and nobody waits for it
    while len(seen) < 6 and time.monotonic() < began + 10:
        time.sleep(0.01)
    assert [number for number, _ in seen] == list(range(6))
    for i, (_, at_s) in enumerate(seen):
        assert at_s - began >= (i + 1) * chunk.nbytes / rate


def test_what_went_wrong_is_raised_by_the_next_message():
    def refuse(number: int, x: jax.Array) -> None:
        raise OSError(f"no way for {number}")

    pace = Pace(1e9, refuse)
    pace.send([(7, jnp.zeros(1))])
    with pytest.raises(OSError, match="no way for 7"):  # noqa: PT012
        for _ in range(1000):
            time.sleep(0.01)
            pace.send([])
