"""Where islands meet: one server in the launcher, never in an island.

    hello -> welcome(run, generation, brief) -> join(address, facts) -> agreed(peers)
    then: beats; gather(tag, value) -> everyone's values; stop; lost; a new generation

Who is silent, or hangs up without leaving, is lost: ``check`` says so and the launcher
decides. The server waits for nobody and never dies of what an island says.
"""

import dataclasses
import errno
import queue
import socket
import struct
import threading
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from hexijax.errors import UserError, did_you_mean
from hexijax.islands.wire import (
    Closed,
    Line,
    Message,
    answer,
    joined,
    new_token,
    shut,
    split_address,
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
          known: all that may ever take part; empty: these.
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
        self._values: dict[str, dict[str, Any]] = {}
        self._told: set[str] = set()
        self._lock = threading.RLock()
        self._server = _listen(address)
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
        """Hangs up on it: what it says no longer counts. Tells the others, if they
        wait for it."""
        with self._lock:
            peer = self._peers.pop(island, None)
            self._told.discard(island)
        if peer:
            peer.line.close()
        if island in self.islands:
            message = {"say": "lost", "island": island, "why": why}
            self._tell(message | {"generation": self.generation})

    def suspend(self) -> None:
        """Nobody is left: who comes waits for the next generation."""
        with self._lock:
            self.islands = ()

    def anew(self, islands: Iterable[str], brief: Message) -> int:
        """Begins another generation, of these islands; its number."""
        with self._lock:
            self.generation += 1
            self.islands = tuple(islands)
            self._values.clear()
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
        self._send(peer, message)

    def _take(self, name: str, peer: _Peer, said: Message) -> None:
        peer.silent_s = 0.0
        match said["do"]:
            case "beat":
                self._send(peer, {"say": "beat"})
            case "join":
                self._join(name, peer, said)
            case "gather":
                self._gather(name, said)
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
            if said["generation"] != self.generation:
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
            if said["generation"] != self.generation:
                return
            tag = str(said["tag"])
            values = self._values.setdefault(tag, {})
            values[name] = said["value"]
            if values.keys() != set(self.islands):
                return
            del self._values[tag]
        message = {"say": "gathered", "tag": tag, "values": values}
        self._tell(message | {"generation": said["generation"]})

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


def disagreement(facts: Mapping[str, Mapping[str, str]]) -> str:
    """What islands disagree on, by island and fact; empty: nothing."""
    names = dict.fromkeys(fact for found in facts.values() for fact in found)
    for fact in names:
        by_value: dict[str, list[str]] = {}
        for island, found in facts.items():
            by_value.setdefault(found.get(fact, "none"), []).append(island)
        if len(by_value) > 1:
            sides = " and ".join(
                f"{value} on {', '.join(islands)}"
                for value, islands in by_value.items()
            )
            return (
                f"The islands' {fact} is not the same: {sides}. All islands run one "
                f"plan with one code on the same data; {_mend(fact)}"
            )
    return ""


def _mend(fact: str) -> str:
    match fact:
        case "plan":
            return "give each the plan file of this run."
        case "code":
            return "bring hexijax and the experiment's folder to one state everywhere."
        case "data":
            return "bring the data's files to one state everywhere."
        case _:
            return "start each with the same flags."


def _listen(address: str) -> socket.socket:
    host, port = split_address(address)
    family = socket.AF_INET6 if ":" in host else socket.AF_INET
    server = socket.socket(family, socket.SOCK_STREAM)
    server.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
    try:
        server.bind((host, port))
        server.listen(128)
    except OSError as error:
        server.close()
        if error.errno == errno.EADDRINUSE:
            raise UserError(
                f"Port {port} of {host} is in use, perhaps by another launch. Name "
                "another with --listen HOST:PORT; port 0 takes one that is free."
            ) from error
        raise UserError(
            f"Nothing can listen at {address}: {error.strerror}. --listen takes an "
            "address of this machine."
        ) from error
    return server
