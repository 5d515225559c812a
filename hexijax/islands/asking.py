"""A question that takes long, in a thread of its own: who asks goes on looking.

begin(question) -> ... answer() is None ... -> answer() == (question, answer)
"""

import threading
from collections.abc import Callable, Hashable
from typing import Generic, TypeVar

Q = TypeVar("Q", bound=Hashable)
A = TypeVar("A")


class Asking(Generic[Q, A]):
    """One question counts, the last; they are answered one after another.

    Args:
      ask: answers; it may raise, and ``answer`` raises the same.
    """

    def __init__(self, ask: Callable[[Q], A]):
        self._ask, self._turn = ask, threading.Lock()
        self._now: _Pending[Q, A] | None = None

    def begin(self, question: Q) -> None:
        """Forgets an earlier question, unless it is the same."""
        if self._now is not None and self._now.question == question:
            return
        self._now = _Pending(question)
        threading.Thread(target=self._work, args=(self._now,), daemon=True).start()

    def answer(self) -> tuple[Q, A] | None:
        """The question and its answer, once; None: there is none yet."""
        now = self._now
        if now is None or not now.done.is_set():
            return None
        self._now = None
        if now.error is not None:
            raise now.error
        (found,) = now.found
        return now.question, found

    def _work(self, asked: "_Pending[Q, A]") -> None:
        with self._turn:
            try:
                if asked is self._now:
                    asked.found.append(self._ask(asked.question))
            except BaseException as error:  # raised where it is waited for
                asked.error = error
            finally:
                asked.done.set()


class _Pending(Generic[Q, A]):
    def __init__(self, question: Q):
        self.question, self.done = question, threading.Event()
        self.found: list[A] = []
        self.error: BaseException | None = None
