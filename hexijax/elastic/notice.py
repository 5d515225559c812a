"""The notice before a machine is taken: SIGTERM.

Spot machines are told 30 to 120 s ahead, and their agents pass it on as SIGTERM.
"""

import signal
import threading
from collections.abc import Callable, Generator
from contextlib import contextmanager
from types import FrameType

NOTICE_S = 30.0
"""The shortest that a large cloud gives."""


@contextmanager
def on_sigterm(call: Callable[[], None]) -> Generator[None]:
    """While it lasts, the first SIGTERM calls ``call``; a second ends the process."""
    if threading.current_thread() is not threading.main_thread():
        yield  # signals are the main thread's
        return
    before = signal.getsignal(signal.SIGTERM)

    def take(signum: int, frame: FrameType | None) -> None:
        signal.signal(signal.SIGTERM, before)
        call()

    signal.signal(signal.SIGTERM, take)
    try:
        yield
    finally:
        signal.signal(signal.SIGTERM, before)
