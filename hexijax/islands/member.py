"""An island's side of the rendezvous.

    Member.connect -> welcome() -> join() -> Agreed -> ... gather, leave
    beside it: a thread that beats, and one that listens

Every wait has a deadline and ends early where an island is lost or the launcher has
gone. An island whose launcher has gone ends by itself: nothing is left behind.
"""

import contextlib
import os
import sys
import threading
import time
from collections.abc import Callable, Mapping
from typing import Any

from hexijax.errors import UserError
from hexijax.islands.rendezvous import HELLO_S
from hexijax.islands.wire import Closed, Line, Message, Refused, call, derived
from hexijax.islands.world import IslandLost, Welcome, World

LOST = 3
"""Exit code: another island or the launcher was lost."""

GRACE_S = 5.0
"""From the launcher's end until an island that has not ended is ended."""

ANSWER_S = 5.0
"""For the launcher to say who is late."""

LAUNCHER = "the launcher"

DEAF_S = 60.0
"""Without a word from it, the launcher has gone."""


class LauncherGone(UserError):
    """Nobody is at the rendezvous any more."""


class Dismissed(Exception):
    """There is nothing to do for this island."""


class Member:
    """A connected island."""

    def __init__(
        self,
        line: Line,
        *,
        name: str,
        token: str,
        end: Callable[[], None] = lambda: os._exit(LOST),
        grace_s: float = GRACE_S,
        deaf_s: float = DEAF_S,
    ):
        """See ``connect``; ``end`` is called ``grace_s`` after the launcher's end."""
        self.name = name
        self._line, self._token, self._end = line, token, end
        self.host = line.host
        """This machine's address, as far as the launcher is concerned."""
        self._grace_s, self._deaf_s = grace_s, deaf_s
        self._news = threading.Condition()
        self._welcome: Welcome | None = None
        self._agreed: tuple[int, dict[str, str]] | None = None
        self._gathered: dict[str, dict[str, Any]] = {}
        self._late: dict[str, str] = {}  # who is, by tag, once it has asked
        self._dismissed = False
        self.waits: Callable[[], tuple[str, float] | None] = lambda: None
        """The island that this one waits for, and for how long: beats tell it."""
        self._lost: tuple[int, str, str] | None = None
        self._refused = self._gone = ""
        self._left = threading.Event()
        self.stopping = threading.Event()
        """Set once all are to halt after a step that they agree on."""
        self.change = False
        """Whether that is for a change of who takes part, and not the end."""
        self._heard_s = time.monotonic()
        self._generation = 0
        threading.Thread(target=self._listen, daemon=True).start()

    @classmethod
    def connect(
        cls,
        address: str,
        name: str,
        *,
        token: str,
        seconds: float,
        of: int | None = None,
        **options: Any,
    ) -> "Member":
        """Finds the rendezvous, trying for ``seconds``.

        Args:
          address: ``host:port`` of the rendezvous.
          name: of this island, or its number among them.
          token: of the run.
          seconds: the launcher may come up later than an island.
          of: how many islands there are, if that is to be checked.
          options: see ``Member``.

        Raises:
          UserError: nobody is there, or takes us.
        """
        deadline, why = time.monotonic() + seconds, ""
        while (left := deadline - time.monotonic()) > 0:
            try:
                line = call(address, token, max(0.1, min(left, HELLO_S)))
                line.send({"island": name, "of": of, "pid": os.getpid()})
                return cls(line, name=name, token=token, **options)
            except (OSError, Closed) as error:
                why = str(error)
                time.sleep(min(0.2, left))
        raise UserError(
            f"No launcher at {address} within {seconds:g} s ({why}). Start it first: "
            "hexijax launch; it says its address."
        )

    # Waiting for each other.

    def welcome(self, after: int, seconds: float) -> Welcome:
        """What is to be done, of a generation later than ``after`` (-1: of the first).

        Raises:
          UserError: it did not come.
          Dismissed: there is nothing to do.
        """
        return self._wait(
            lambda: (
                self._welcome
                if self._welcome and self._welcome.generation > after
                else None
            ),
            what="the launcher's plan",
            seconds=seconds,
            lost=False,
        )

    def join(
        self,
        welcome: Welcome,
        *,
        address: str,
        facts: Mapping[str, str],
        seconds: float,
        pull_s: float,
    ) -> World:
        """Waits for all islands, and for what they agree on.

        Args:
          welcome: to what.
          address: of this island's transfer server.
          facts: what must be the same on all: ``plan``, ``code``, ``data``.
          seconds: until when all must be there.
          pull_s: see ``World``.

        Raises:
          UserError: somebody does not come, or the facts differ.
        """
        with self._news:
            self._generation = welcome.generation
            self._gathered.clear()
            self._late.clear()
            self.stopping.clear()
        self._send(
            {
                "do": "join",
                "generation": welcome.generation,
                "address": address,
                "facts": dict(facts),
            }
        )
        peers = self._wait(
            lambda: (
                self._agreed[1]
                if self._agreed and self._agreed[0] == welcome.generation
                else None
            ),
            what="all islands to join",
            seconds=seconds,
        )
        return World(
            name=self.name,
            islands=welcome.islands,
            run=welcome.run,
            generation=welcome.generation,
            key=derived(self._token, "transfers", welcome.run, welcome.generation),
            peers={k: v for k, v in peers.items() if k != self.name},
            pull_s=pull_s,
        )

    def gather(self, tag: str, value: Any, seconds: float) -> dict[str, Any]:
        """Every island's value, by island; each must call it with the same tag.

        Raises:
          IslandLost: somebody has gone, or is not there in time.
          UserError: not even the launcher answers in time.
        """
        self.post(tag, value)
        return self.collect(tag, seconds)

    def post(self, tag: str, value: Any) -> None:
        """The first half of ``gather``; does not wait."""
        message = {"do": "gather", "tag": tag, "value": value}
        self._send(message | {"generation": self._generation})

    def collect(self, tag: str, seconds: float) -> dict[str, Any]:
        """The second half."""
        found = self._wait(
            lambda: self._gathered.get(tag),
            what=f"all islands at {tag!r}",
            seconds=seconds,
            tag=tag,
        )
        with self._news:
            del self._gathered[tag]
            self._late.pop(tag, None)
        return found

    def collected(self, tag: str) -> bool:
        """Whether ``collect`` would wait no more."""
        with self._news:
            return tag in self._gathered

    def lost(self) -> str | None:
        """An island of this generation that is lost, or the launcher; None: none is
        known."""
        with self._news:
            if self._is_lost():
                return self._lost[1] if self._lost else None
            return LAUNCHER if self._gone else None

    def await_loss(self, seconds: float) -> str | None:
        """``lost``, once it is known; None: it is not within ``seconds``."""
        until = time.monotonic() + seconds
        with self._news:
            while not (self._is_lost() or self._gone) and time.monotonic() < until:
                self._news.wait(0.1)
        return self.lost()

    def _is_lost(self) -> bool:
        return self._lost is not None and self._lost[0] >= self._generation

    # Saying something.

    def ask_stop(self) -> None:
        """Asks that the run end after a step that all agree on."""
        self._send({"do": "stop"})

    def blame(self, island: str, why: str, waited_s: float) -> None:
        """Tells the launcher that an island did not answer for so long."""
        message = {"do": "blame", "island": island, "why": why}
        self._send(message | {"waited_s": waited_s})

    def halted(self, done: int) -> None:
        """Says that this island has halted for a change, with all of ``done`` saved."""
        self._send({"do": "halted", "done": done})

    def leave(self, code: int, **words: Any) -> None:
        """Says that this island ends, and with which exit code; hangs up.

        Of its ``words`` the launcher shows the first island's ``error``.
        """
        if self._left.is_set():
            return
        with contextlib.suppress(LauncherGone):
            self._send({"do": "leave", "code": code, **words})
        self._left.set()
        self._line.close()

    def _send(self, message: Message) -> None:
        try:
            self._line.send(message)
        except Closed as error:
            raise LauncherGone(self._gone or _gone(str(error))) from error

    # Threads.

    def _beat(self, every_s: float) -> None:
        while not self._left.wait(every_s):
            silent_s = time.monotonic() - self._heard_s
            if silent_s > self._deaf_s:
                self._launcher_gone(f"it has said nothing for {silent_s:.0f} s")
            if self._gone:
                return
            with contextlib.suppress(LauncherGone):
                self._send({"do": "beat", "waits": self.waits()})

    def _listen(self) -> None:
        try:
            while True:
                self._take(self._line.receive())
        except Closed as error:
            self._line.close()
            if not self._left.is_set():
                self._launcher_gone(str(error))

    def _take(self, said: Message) -> None:
        self._heard_s = time.monotonic()
        with self._news:
            match said["say"]:
                case "admitted":
                    self.name = said["island"]
                    beat = threading.Thread(target=self._beat, args=(said["beat_s"],))
                    beat.daemon = True
                    beat.start()
                case "welcome":
                    self._welcome = Welcome(
                        run=said["run"],
                        generation=said["generation"],
                        islands=tuple(said["islands"]),
                        brief=said["brief"],
                    )
                case "agreed":
                    self._agreed = said["generation"], said["peers"]
                case "gathered":
                    if said["generation"] == self._generation:
                        self._gathered[said["tag"]] = said["values"]
                case "late":
                    self._late[said["tag"]] = next(iter(said["islands"]), "")
                case "dismissed":
                    self._dismissed = True
                case "lost":
                    self._lost = said["generation"], said["island"], said["why"]
                case "refused":
                    self._refused = said["error"]
                case "stop":
                    self.change = said["change"]
                    self.stopping.set()
                case _:
                    pass  # a beat, which says that the launcher lives
            self._news.notify_all()

    def _launcher_gone(self, why: str) -> None:
        """The main thread may end by itself, as it does after a step; else it is
        ended, wherever it is."""
        with self._news:
            if self._gone or self._refused:
                return
            self._gone = _gone(why)
            self._news.notify_all()
        if not self._left.wait(self._grace_s):
            print(f"Island {self.name}: {self._gone}", file=sys.stderr, flush=True)
            self._end()

    def _wait(
        self,
        found: Callable[[], Any],
        *,
        what: str,
        seconds: float,
        lost: bool = True,
        tag: str | None = None,
    ) -> Any:
        """``tag``: where all meet; who is late there is asked for in the end."""
        began, asked = time.monotonic(), False
        with self._news:
            while (value := found()) is None:
                if self._refused:
                    raise Refused(self._refused)
                if self._dismissed:
                    raise Dismissed(self.name)
                if self._gone:
                    raise LauncherGone(self._gone)
                waited = time.monotonic() - began
                if lost and self._is_lost() and self._lost:
                    _, name, why = self._lost
                    raise IslandLost(name, what, waited, why)
                if tag is not None and (name := self._late.pop(tag, "")):
                    raise IslandLost(name, what, waited)
                if waited > seconds and tag is not None and not asked:
                    self._send({"do": "late", "tag": tag})
                    asked, seconds = True, seconds + ANSWER_S
                elif waited > seconds:
                    raise UserError(
                        f"Island {self.name} waited {seconds:g} s for {what}. The logs "
                        "of the others say what keeps them."
                    )
                self._news.wait(min(seconds - waited + 0.01, 1.0))
            return value


def _gone(why: str) -> str:
    return (
        f"the launcher has gone ({why}), so the run ends here. Start it again with "
        "--resume."
    )
