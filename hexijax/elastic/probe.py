"""Asks devices whether they still compute: what a failed step is followed by.

A device that has fallen off its bus raises, or never answers.
"""

import threading
from collections.abc import Iterable, Mapping
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    import jax

ANSWER_S = 30.0
"""In which a device must answer: it may still have a step's programs in its queue."""


def silent(
    devices: "Mapping[str, Iterable[jax.Device]]", within_s: float = ANSWER_S
) -> list[str]:
    """Nodes of which some device does not add two numbers in time.

    Args:
      devices: by node.
      within_s: seconds for all of them together.
    """
    answered = {node: threading.Event() for node in devices}

    def ask(node: str) -> None:
        if all(map(adds, devices[node])):
            answered[node].set()

    # A thread that waits for a dead device waits for ever; it holds nothing.
    threads = [threading.Thread(target=ask, args=[n], daemon=True) for n in devices]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(within_s)
    return [node for node, event in answered.items() if not event.is_set()]


def adds(device: "jax.Device") -> bool:
    """Whether a device adds two numbers right."""
    import jax

    try:
        return int(jax.device_put(1, device) + 1) == 2
    except RuntimeError:  # as JAX's errors of devices are
        return False
