"""Errors that speak to people.

A ``UserError`` is a fault of the input: a file, a flag, a model, a cluster. Its text is
all the reader gets (the command line prints it and ends with 2, no traceback), so it
says what was asked, where, both numbers, the rule, and a way out. Faults of our own are
``assert``s and keep their traceback.
"""

import difflib
from collections.abc import Iterable


class UserError(ValueError):
    """What was asked for cannot be done, and the asker can mend it."""


def did_you_mean(name: str, choices: Iterable[str]) -> str:
    """`` Did you mean 'x'?`` to append to a message, or nothing if no choice is near.

    Case does not count: ``did_you_mean("h100", ["H100"])`` finds ``H100``.
    """
    by_folded = {choice.casefold(): choice for choice in choices}
    near = difflib.get_close_matches(name.casefold(), by_folded, n=1, cutoff=0.6)
    return f" Did you mean {by_folded[near[0]]!r}?" if near else ""
