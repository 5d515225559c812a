"""A file that says who takes part: for a person, or a scheduler's script, to edit.

    # node     what
    fast       here
    slow       leaves 120      in 120 s; until then it is drained
    spare      gone

Nodes that it does not name are as they were. It is looked at between steps.
"""

import contextlib
from pathlib import Path

from hexijax.elastic.members import Members
from hexijax.elastic.notice import NOTICE_S
from hexijax.errors import UserError, did_you_mean

WORDS = ("here", "leaves", "gone")


class Roll:
    """Reads the file when it has changed, and tells the members."""

    def __init__(self, file: Path, members: Members):
        self._file, self._members = file, members
        self._seen: tuple[int, int] | None = None

    def write(self) -> None:
        """The file, as things stand."""
        present = self._members.present
        lines = [
            f"{node.name}  {'here' if node.name in present else 'gone'}\n"
            for node in self._members.whole.nodes
        ]
        self._file.parent.mkdir(parents=True, exist_ok=True)
        self._file.write_text("# node  here | leaves SECONDS | gone\n" + "".join(lines))
        self._seen = self._stamp()

    def look(self) -> None:
        """Tells the members what has changed in the file.

        Raises:
          UserError: a line says nothing, or names nobody.
        """
        stamp = self._stamp()
        if stamp is None or stamp == self._seen:
            return
        self._seen = stamp
        for number, line in enumerate(self._file.read_text().splitlines(), 1):
            words = line.partition("#")[0].split()
            if words:
                self._tell(words, number)

    def _tell(self, words: list[str], number: int) -> None:
        node, what, *more = [*words, ""][: max(2, len(words))]
        seconds = more[0] if more else str(NOTICE_S)
        right = what in WORDS and len(more) <= (what == "leaves")
        within_s = -1.0
        with contextlib.suppress(ValueError):
            within_s = float(seconds)
        if not right or not within_s >= 0:
            raise UserError(
                f"{self._file}, line {number}: {' '.join(words)!r}. A line is a node's "
                "name and `here`, `gone` or `leaves SECONDS`."
                f"{did_you_mean(what, WORDS)}"
            )
        match what:
            case "here":
                self._members.join(node)
            case "leaves":
                self._members.notice(node, within_s)
            case _:
                self._members.lose(node)

    def _stamp(self) -> tuple[int, int] | None:
        try:
            found = self._file.stat()
        except OSError:
            return None
        return found.st_mtime_ns, found.st_size
