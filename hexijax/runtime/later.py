"""What the host's own processor will have computed, while dispatch goes on.

A thread takes host updates one after another: they wait for gradients on their way from
the devices, and nothing else must. What only passes a result on, a gather of new
parameters, is left to a second one, so that the next update need not wait for it:
dispatch waits where something computes with it, and what stands before that is handed
over meanwhile.
"""

import concurrent.futures
import contextvars
import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any


@dataclasses.dataclass(frozen=True, slots=True)
class Later:
    """One part of a result to come."""

    future: "concurrent.futures.Future[tuple[Any, ...]]"
    part: int


def value(x: Any) -> Any:
    """The thing itself; waits for it where it is to come."""
    return x.future.result()[x.part] if isinstance(x, Later) else x


def later(work: Callable[[], tuple[Any, ...]], parts: int) -> tuple[Later, ...]:
    """The parts of what ``work`` will return, after all updates asked for before."""
    return _by(_worker("host update"), work, parts)


def once_there(
    work: Callable[..., tuple[Any, ...]], given: Sequence[Any], parts: int
) -> tuple[Any, ...]:
    """What ``work`` makes of values: at once, or by a worker where one is to come."""
    if any(isinstance(x, Later) for x in given):
        bearer = _worker("host results")
        return _by(bearer, lambda: work(*map(value, given)), parts)
    return work(*given)


def _by(
    worker: concurrent.futures.ThreadPoolExecutor,
    work: Callable[[], tuple[Any, ...]],
    parts: int,
) -> tuple[Later, ...]:
    future = worker.submit(contextvars.copy_context().run, work)
    return tuple(Later(future, part) for part in range(parts))


@functools.cache
def _worker(name: str) -> concurrent.futures.ThreadPoolExecutor:
    return concurrent.futures.ThreadPoolExecutor(1, name)
