"""Memory that was freed, back to the system."""

import ctypes


def give_back_freed() -> None:
    """Asks the C library to keep no freed memory.

    glibc keeps up to 64 MiB for each of its arenas, and each thread of a library may
    have one: what a host holds would be a multiple of what is in use. Other C libraries
    have no such call, and are left alone.
    """
    if _trim is not None:
        _trim(0)


_trim = getattr(ctypes.CDLL(None), "malloc_trim", None)
