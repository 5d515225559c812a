"""Where islands meet: one server in the launcher, never in an island.

    hello -> welcome(run, generation, brief) -> join(address, facts) -> agreed(peers)
    then: beats; gather(tag, value) -> everyone's values; stop; lost; a new generation

Who is silent, or hangs up without leaving, is lost: ``check`` says so and the launcher
decides. The server waits for nobody and never dies of what an island says.
"""

import dataclasses
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hexijax.errors import did_you_mean
from hexijax.islands.facts import disagreement
from hexijax.islands.meetings import Meetings
from hexijax.islands.wire import (
    Closed,
    Line,
    Message,
    answer,
    joined,
    listen,
    new_token,
    shut,
)

HELLO_S = 10.0
"""In which whoever connects must have said who it is."""

SILENCE_S = 10.0
"""Without a word from it, an island is lost."""

BEATS = 10
"""Of an island, in the time after which its silence is a loss."""

Clock = Callable[[], float]


@dataclasses.dataclass(frozen=True, kw_only=True, slots=True)
class Heard:
    """Something an island did that its launcher should know."""

    island: str
    """Which."""

    what: str
    """``connected``, ``joined``, ``halted``, ``left``, ``blames``, ``asks to stop``."""

    said: Mapping[str, Any] = dataclasses.field(default_factory=dict)
    """Its own words."""


@dataclasses.dataclass(slots=True, eq=False)
class _Peer:
    line: Line
    host: str
    pid: int
    silent_s: float = 0.0
    welcomed: int = -1  # of which generation it has been told
    joined: int = -1
    address: str = ""
    facts: Mapping[str, str] = dataclasses.field(default_factory=dict)
    waits: tuple[str, float] | None = None  # for which island, and since when
    left: bool = False
    broken: str = ""


class Rendezvous:
    """The meeting place of one run."""

    def __init__(
        self,
        islands: Sequence[str],
        *,
        run: str,
        known: Sequence[str] = (),
        token: str | None = None,
        address: str = "127.0.0.1:0",
        silence_s: float = SILENCE_S,
        clock: Clock = time.monotonic,
        say: Callable[[str], None] = lambda text: None,
    ):
        """
        Args:
          islands: those of the first generation, in the cluster's order.
          run: what the run is called.
          known: all that may ever come, in the cluster's order, which numbers them;
            empty: these.
          token: its secret; None: a new one.
          address: where it listens; port 0: any.
          silence_s: without a word from it, an island is lost.
          clock: of this machine.
          say: takes lines for people.

        Raises:
          UserError: nobody can listen there.
        """
        self.run, self.token = run, token or new_token()
        self.islands, self.generation = tuple(islands), 0
        self.known = tuple(known) or self.islands
        self.heard: queue.SimpleQueue[Heard] = queue.SimpleQueue()
        self._brief: Message | None = None
        self._silence_s, self._clock, self._say = silence_s, clock, say
        self._checked_s = self._began_s = clock()
        self._peers: dict[str, _Peer] = {}
        self._meetings = Meetings()
        self._told: set[str] = set()
        self._losses: list[Message] = []  # of this generation
        self._lock = threading.RLock()
        self._server = listen(address)
        self._closed = False
        threading.Thread(target=self._accept, daemon=True).start()

    @property
    def address(self) -> str:
        """Where it listens."""
        host, port = self._server.getsockname()[:2]
        return joined(host, port)

    # What the launcher does.

    def brief(self, brief: Message) -> None:
        """What islands are to do: JSON. Those that wait for it get it now."""
        with self._lock:
            self._brief = brief
            peers = [(k, p) for k, p in self._peers.items() if not p.left]
        for name, peer in peers:
            self._welcome(name, peer)

    def missing(self) -> tuple[str, ...]:
        """Islands of this generation that have not joined it."""
        with self._lock:
            joined = {k for k, p in self._peers.items() if p.joined == self.generation}
            return tuple(name for name in self.islands if name not in joined)

    def waited_s(self) -> float:
        """Since this generation began."""
        return self._clock() - self._began_s

    def where(self, island: str) -> tuple[str, int] | None:
        """Host and process of an island that has connected."""
        with self._lock:
            peer = self._peers.get(island)
            return (peer.host, peer.pid) if peer else None

    def check(self) -> dict[str, str]:
        """Islands found lost since the last call, and why; a few times a second."""
        with self._lock:
            now = self._clock()
            # At most as long as beats are apart: in a longer gap it was we who slept.
            gap_s = min(max(now - self._checked_s, 0.0), self._silence_s / BEATS)
            self._checked_s = now
            lost = {}
            for name, peer in self._peers.items():
                if peer.left or name in self._told:
                    continue
                peer.silent_s += gap_s
                if peer.broken:
                    lost[name] = f"it hung up ({peer.broken})"
                elif peer.silent_s > self._silence_s:
                    lost[name] = f"it has said nothing for {peer.silent_s:.1f} s"
            self._told |= lost.keys()
            return lost

    def lose(self, island: str, why: str) -> None:
        """Hangs up on it: what it says no longer counts. Tells the others, those too
        that are still to come, if they wait for it."""
        with self._lock:
            peer = self._peers.pop(island, None)
            self._told.discard(island)
        if peer:
            peer.line.close()
        if island in self.islands:
            message = {"say": "lost", "island": island, "why": why}
            message |= {"generation": self.generation}
            self._losses.append(message)
            self._tell(message)

    def hear_out(self, island: str, seconds: float) -> None:
        """Waits until all that an island said before it ended has been heard."""
        until = time.monotonic() + seconds
        while (peer := self._peers.get(island)) and not (peer.left or peer.broken):
            if time.monotonic() > until:
                return
            time.sleep(0.005)

    def dismiss(self, island: str) -> None:
        """Tells one that it has nothing to do: it ends, and that is no fault."""
        with self._lock:
            peer = self._peers.get(island)
        if peer and not peer.left:
            peer.left = True  # it may hang up
            self._send(peer, {"say": "dismissed"})

    def culprit(self, blamed: str, waited_s: float) -> str:
        """Who keeps whoever blames: of islands that wait for each other in a chain the
        last, of a circle the one blamed.

        Args:
          blamed: did not answer.
          waited_s: for so long; 0: it is known to be at fault. It is itself kept by
            another if it has waited for that one at least half the time.
        """
        with self._lock:
            seen = [blamed]
            while waited_s and (waits := self._waits(seen[-1])):
                other, since_s = waits
                if self._clock() - since_s < waited_s / 2:
                    break
                if other in seen:
                    return blamed
                seen.append(other)
            return seen[-1]

    def suspend(self) -> None:
        """This generation has ended: who comes waits for the next."""
        with self._lock:
            self.islands = ()

    def anew(self, islands: Iterable[str], brief: Message) -> int:
        """Begins another generation, of these islands; its number."""
        with self._lock:
            self.generation += 1
            self.islands = tuple(islands)
            self._meetings.clear()
            self._losses.clear()
            self._began_s = self._clock()
        self.brief(brief)
        return self.generation

    def stop(self, *, change: bool = False) -> None:
        """Asks all to halt after a step that they agree on: to end, or for a change
        of who takes part."""
        self._tell({"say": "stop", "change": change})

    def close(self) -> None:
        """Ends it; islands that are still connected end too."""
        self._closed = True
        shut(self._server)
        with self._lock:
            peers = list(self._peers.values())
        for peer in peers:
            peer.line.close()

    # What islands do.

    def _accept(self) -> None:
        while not self._closed:
            try:
                connection, (host, *_) = self._server.accept()
                late = struct.pack("ll", int(HELLO_S), 0)
                connection.setsockopt(socket.SOL_SOCKET, socket.SO_SNDTIMEO, late)
            except OSError:  # closed; or no file is left, or whoever called has gone
                time.sleep(0.0 if self._closed else 0.1)
                continue
            threading.Thread(
                target=self._serve, args=(connection, str(host)), daemon=True
            ).start()

    def _serve(self, connection: socket.socket, host: str) -> None:
        try:
            line = answer(connection, self.token, HELLO_S)
        except (Closed, OSError) as error:
            self._say(f"rendezvous: {host} was turned away: {error}")
            connection.close()
            return
        peer: _Peer | None = None
        try:
            if admitted := self._admit(line.receive(), line, host):
                name, peer = admitted
                while True:
                    self._take(name, peer, line.receive())
        except (Closed, ValueError, KeyError, TypeError) as error:
            if peer:
                peer.broken = str(error) or type(error).__name__
        finally:
            line.close()

    def _admit(self, hello: Message, line: Line, host: str) -> tuple[str, _Peer] | None:
        name, of = str(hello.get("island")), hello.get("of")
        if name.isdigit() and name not in self.known and int(name) < len(self.known):
            name = self.known[int(name)]
        peer = _Peer(line=line, host=host, pid=int(hello["pid"]))
        with self._lock:
            there = self._peers.get(name)
            error = ""
            if name not in self.known:
                hint = did_you_mean(name, self.known)
                have = ", ".join(self.known)
                error = f"This run has no island {name!r}.{hint} It has {have}."
            elif there is not None:
                error = (
                    f"Island {name!r} is there already: process {there.pid} on "
                    f"{there.host}. Each island is started once."
                )
            elif of is not None and of != len(self.known):
                error = (
                    f"Island {name!r} was started as one of {of}, and this run has "
                    f"{len(self.known)}: {', '.join(self.known)}. An island is a node "
                    "of the cluster file unless that says otherwise."
                )
            else:
                self._peers[name] = peer
        if error:
            self._say(f"rendezvous: {host} was turned away: {error}")
            line.send({"say": "refused", "error": error})
            return None
        beat_s = self._silence_s / BEATS
        self._send(peer, {"say": "admitted", "island": name, "beat_s": beat_s})
        self.heard.put(Heard(island=name, what="connected", said=hello))
        self._welcome(name, peer)
        return name, peer

    def _welcome(self, name: str, peer: _Peer) -> None:
        with self._lock:
            if self._brief is None or name not in self.islands:
                return
            if peer.welcomed == self.generation:
                return
            peer.welcomed = self.generation
            message = {
                "say": "welcome",
                "run": self.run,
                "generation": self.generation,
                "islands": self.islands,
                "brief": self._brief,
            }
            losses = [*self._losses]
        for each in (message, *losses):
            self._send(peer, each)

    def _take(self, name: str, peer: _Peer, said: Message) -> None:
        peer.silent_s = 0.0
        match said["do"]:
            case "beat":
                waits = said.get("waits")
                peer.waits = waits and (str(waits[0]), self._clock() - float(waits[1]))
                self._send(peer, {"say": "beat"})
            case "join":
                self._join(name, peer, said)
            case "gather":
                self._gather(name, said)
            case "late":
                with self._lock:
                    late = self._meetings.late(str(said["tag"]), self.islands)
                words = {"say": "late", "tag": said["tag"], "islands": late}
                self._send(peer, words)
            case "stop":
                self.heard.put(Heard(island=name, what="asks to stop"))
                self.stop()
            case "halted":
                self.heard.put(Heard(island=name, what="halted", said=said))
            case "blame":
                self.heard.put(Heard(island=name, what="blames", said=said))
            case "leave":
                peer.left = True
                self.heard.put(Heard(island=name, what="left", said=said))
            case other:
                raise ValueError(f"it asked for {other!r}")

    def _join(self, name: str, peer: _Peer, said: Message) -> None:
        with self._lock:
            if said["generation"] != self.generation or name not in self.islands:
                return  # it will hear of the new one
            peer.joined, peer.address = self.generation, str(said["address"])
            peer.facts = {str(k): str(v) for k, v in said["facts"].items()}
            self.heard.put(Heard(island=name, what="joined", said=said))
            if self.missing():
                return
            members = {name: self._peers[name] for name in self.islands}
        if error := disagreement({k: p.facts for k, p in members.items()}):
            self._tell({"say": "refused", "error": error})
            return
        peers = {k: p.address for k, p in members.items()}
        self._tell({"say": "agreed", "generation": self.generation, "peers": peers})

    def _gather(self, name: str, said: Message) -> None:
        with self._lock:
            if said["generation"] != self.generation or not self.islands:
                return
            tag = str(said["tag"])
            values = self._meetings.add(
                tag, name, said["value"], self.islands, self._clock()
            )
        if values is not None:
            message = {"say": "gathered", "tag": tag, "values": values}
            self._tell(message | {"generation": said["generation"]})

    def _waits(self, island: str) -> tuple[str, float] | None:
        """For which other an island waits, and since when: where all meet, or for what
        that one sends."""
        if found := self._meetings.waits(island, self.islands):
            return found
        peer = self._peers.get(island)
        return peer.waits if peer else None

    def _tell(self, message: Message) -> None:
        with self._lock:
            peers = [p for p in self._peers.values() if not p.left]
        for peer in peers:
            self._send(peer, message)

    def _send(self, peer: _Peer, message: Message) -> None:
        try:
            peer.line.send(message)
        except Closed as error:
            peer.broken = peer.broken or str(error)
