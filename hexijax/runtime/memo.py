"""Results kept with the object they belong to, and gone when it goes."""

import functools
from collections.abc import Callable
from typing import Any

MADE_BY = "_made_by_"
"""How the attributes that hold results begin."""


def memo(method: Callable[..., Any]) -> Callable[..., Any]:
    """Calls a method once for each of its positional arguments.

    ``functools.cache`` would keep every object alive that ever called the method: an
    engine with all its arrays.
    """
    name = MADE_BY + method.__name__

    @functools.wraps(method)
    def once(self: Any, *args: Any) -> Any:
        made = self.__dict__.setdefault(name, {})
        if args not in made:
            made[args] = method(self, *args)
        return made[args]

    return once
