"""The largest plan a file may describe.

A slip of the finger in a range, ``layers 0-30000000``, must end as an error and not as
all the memory of the host.
"""

MAX_LAYERS = 100_000
"""Layers of one chain."""

MAX_DEVICES = 100_000
"""Devices named by one range."""

MAX_INTEGER = 2**62
"""Any other count or number of bytes."""
