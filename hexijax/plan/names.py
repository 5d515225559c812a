"""Names and ranges of names, as a plan's text writes them.

    ("fast/0", "fast/1", "slow/0")  <->  fast/0-1,slow/0

A name with a character the text gives a meaning (space, comma, '#', ...) stands in
double quotes, as JSON writes strings; a quoted name is never a range.
"""

import json
import re
from collections.abc import Iterator, Sequence

from hexijax.plan.limits import MAX_DEVICES

_PLAIN = re.compile(r"[A-Za-z0-9_./\[\]()+:@<>-]+")
_NUMBERED = re.compile(r"(?P<prefix>.*/)(?P<index>0|[1-9][0-9]{0,7})")
_RANGE = re.compile(r"(?P<prefix>.*/)(?P<first>[0-9]{1,9})-(?P<last>[0-9]{1,9})")


def quote(name: str) -> str:
    """The name as text: bare where nothing in it could be misread."""
    if _PLAIN.fullmatch(name) and not _RANGE.fullmatch(name):
        return name
    return json.dumps(name)


def fold(names: Sequence[str]) -> str:
    """The names in order, runs of consecutive numbers written as ranges."""
    return ",".join(_fold(names))


def _fold(names: Sequence[str]) -> Iterator[str]:
    at = 0
    while at < len(names):
        stop = at + 1
        match = _NUMBERED.fullmatch(names[at])
        if match and _PLAIN.fullmatch(names[at]):
            prefix, index = match["prefix"], int(match["index"])
            end = min(len(names), at + MAX_DEVICES)
            while stop < end and names[stop] == f"{prefix}{index + stop - at}":
                stop += 1
            if stop - at > 1:
                yield f"{names[at]}-{index + stop - at - 1}"
                at = stop
                continue
        yield quote(names[at])
        at = stop


def unfold(text: str) -> tuple[str, ...]:
    """The names that one bare word of ``fold`` stands for.

    Raises:
      ValueError: a range that runs backwards, or names more devices than a plan may.
    """
    match = _RANGE.fullmatch(text)
    if match is None:
        return (text,)
    first, last = int(match["first"]), int(match["last"])
    if last < first:
        raise ValueError(f"a range upwards, such as {match['prefix']}{last}-{first}")
    if last - first >= MAX_DEVICES:
        raise ValueError(f"a range of at most {MAX_DEVICES} devices")
    return tuple(f"{match['prefix']}{i}" for i in range(first, last + 1))
